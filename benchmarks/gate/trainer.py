"""A trainer that needs no time to think, as a program: answers every call that the gate has."""

from __future__ import annotations

import asyncio

import numpy as np
import uvloop

from benchmarks.gate.answering import Answering, lines, say
from penstock.client import Completion, Endpoints, ModelCall, connect

CREDITS = 8192
CREDIT_BYTES = 1 << 30


async def main() -> None:
    """`start` has the address and the token of the interception service, and ids by the name of a reply."""
    orders = lines()
    start = await anext(orders)
    endpoints = Endpoints(interception=start["address"], token=start["token"])
    answering = Answering({name: _completion(ids) for name, ids in start["replies"].items()})
    async with (
        connect(endpoints) as ps,
        ps.intercept(credits=CREDITS, credit_bytes=CREDIT_BYTES) as session,
        asyncio.TaskGroup() as tasks,
    ):
        say({})
        obeying = tasks.create_task(answering.obey(orders))
        obeying.add_done_callback(lambda _: session.finish())
        async for call in session.calls():
            tasks.create_task(_answer(call, answering))


async def _answer(call: ModelCall, answering: Answering) -> None:
    answering.continued += call.shared_prefix_count > 0
    await answering.turn()
    await call.deliver(answering.replies[answering.reply])


def _completion(ids: list[int]) -> Completion:
    sampled = np.array(ids, dtype=np.int32)
    return Completion.of_tokens(sampled, np.full(len(ids), -0.5, dtype=np.float32), policy_version=0)


if __name__ == "__main__":
    uvloop.run(main())
