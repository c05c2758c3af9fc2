"""A verifier's judge in a real sandbox: one endpoint, one model, and tokens that nobody trains."""

from __future__ import annotations

import pytest
from tests.support.copying import assert_only_the_endpoint_was_reachable, copy_task, finish
from tests.support.services.stack import Running

from penstock.client import Command, Judge, Mode, RewardFrom, SeedFile, Verifier

ASKS = b"""import json, os, urllib.request
url, key, model = (os.environ[f"PENSTOCK_JUDGE_{name}"] for name in ("URL", "KEY", "MODEL"))
body = {"model": model, "messages": [{"role": "user", "content": "Is it good?"}]}
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
answers = [urllib.request.urlopen(request).read() for _ in range(2)]
answer = json.loads(answers[0])
with open(os.environ["PENSTOCK_REWARD_FILE"], "w") as reward:
    reward.write(str(int(answers[0] == answers[1] and len(answer["choices"]) == 1)))
"""


@pytest.mark.requirement("R134", "R14")
async def test_a_verifier_reaches_its_judge_and_nothing_else(stack: Running) -> None:
    """The engine of the rollout judges too. Asked twice, it answers once."""
    verifier = Verifier(
        files=[SeedFile("ask.py", ASKS)],
        commands=[Command(["true"]), Command(["bash", "probe.sh"]), Command(["python3", "-I", "ask.py"])],
        reward=RewardFrom.FILE,
        judge=Judge(),
    )
    rollout = await stack.ps.rollouts.create(copy_task(stack, verifier=verifier), "shell", mode=Mode.TRANSPARENT_PROXY)
    finished = await finish(rollout)
    assert finished.reward == 1.0, finished.agent_said()
    assert_only_the_endpoint_was_reachable(finished)
    trajectory = await rollout.trajectory()
    (asked,) = trajectory.judge_calls
    assert asked.call_class == "judge" and asked.prompt_count and asked.completion is not None
    assert asked.call_id not in {call.call_id for call in trajectory.calls}
    turns = {turn.call_id for sample in trajectory.samples for turn in sample.turns}
    assert turns and asked.call_id not in turns
