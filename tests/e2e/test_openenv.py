"""An agent from npm behind the OpenEnv server, asked for by the unmodified client of PyPI."""

from __future__ import annotations

import pytest
from tests.integration.openenv.conftest import TOKEN, Server, calling
from tests.support.copying import INSTRUCTION, WORD
from tests.support.services.stack import Running

from penstock.adapters.openenv.rollout_arguments import Defaults
from penstock.adapters.openenv.serving import Listen, serving


@pytest.mark.on_demand("opencode for a client of OpenEnv: shell does tasks for one, opencode for the gate's trainers")
@pytest.mark.requirement("R17", "R68")
async def test_opencode_does_a_task_for_a_client_of_openenv(stack: Running) -> None:
    """The default agent, whose prompts the operator has chosen to skip; one path for all agents."""
    defaults = Defaults(endpoint="inference", skip_permissions=True)
    listen = Listen(port=0, token=TOKEN)
    async with serving(stack.ps, listen, defaults) as address, calling() as caller:
        server = Server(address.replace("://", f"://user:{TOKEN}@"), address, stack.ps, caller)
        _, taken, state, _ = await server.call(
            "steps",
            {
                "instruction": INSTRUCTION,
                "setup": [f"echo {WORD} > note.txt", "echo 'cat note.txt > out.txt' > work.sh"],
                "verify": [f'[ "$(cat out.txt)" = {WORD} ]'],
            },
        )
    result = taken["result"]
    assert (result["error"], result["reward"], result["agent_exit_code"]) == (None, 1.0, 0)
    assert all(len(turn["per_token_logps"]) == len(turn["completion_token_ids"]) > 0 for turn in result["proxy_turns"])
    assert state["state"]["rollouts_completed"] == 1
    assert (await stack.ps.rollouts.get(result["rollout_id"])).agent == "opencode"
