"""The trainer of a soak, as a program: answers every call of the rollouts that have its label, until it is killed.

Its answer depends on the prompt alone, and is written into the log that all engines have, before it is delivered. The
first rollout of each group loses its sandbox once, at its call LOSE_AT, whose answer it does not get.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.hosts import engine, model
from tests.hosts.soak.plan import LABEL, TRAINER
from tests.support.policy import prompt_text, sampled

from penstock.client import Completion, LogprobsMode, ModelCall, Penstock, PenstockError, connect
from penstock.client.transport.endpoints import Endpoints, Tls

LOSE_AT: Final = 2
_PAUSE_S: Final = 0.2


async def main(order: dict[str, Any]) -> None:
    """`order` has the addresses, the token, the authority's file if there is one, and the log."""
    tls = Tls(ca=Path(order["ca"])) if "ca" in order else None
    endpoints = Endpoints(**order["addresses"], token=order["token"], tls=tls)
    while True:
        with suppress(PenstockError):  # all gates or all drivers are away
            async with (
                connect(endpoints) as ps,
                ps.intercept(labels={LABEL: TRAINER}) as session,
                asyncio.TaskGroup() as tasks,
            ):
                async for call in session.calls():
                    tasks.create_task(_answer(ps, call, Path(order["log"])))
        await asyncio.sleep(_PAUSE_S)


async def _answer(ps: Penstock, call: ModelCall, log: Path) -> None:
    if call.index == LOSE_AT and call.rollout_id.endswith("-0"):
        done = log.with_name(f"lost-{call.rollout_id}")
        if not done.exists():
            with suppress(PenstockError):  # its sandbox is lost with its service
                await ps.sandboxes.delete_all({"penstock_rollout": call.rollout_id})
            done.touch()
            return
    ids, logprobs = sampled(model.reply(prompt_text(call)))
    engine.log(log, call.call_id, call.rollout_id, ids)
    completion = Completion.of_tokens(
        np.array(ids), np.array(logprobs), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )
    with suppress(PenstockError):  # the gate was lost, or the call has ended meanwhile
        await call.deliver(completion)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
