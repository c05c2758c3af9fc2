"""A policy of the demo that says what a test wants: right or wrong, and how sure it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from penstock.client import Completion, LogprobsMode, ModelCall, Penstock
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_demo.tasks import TASKS

TASK = TASKS[0]
RIGHT, WRONG = f"echo {TASK.word} > {TASK.file}", f"echo kiwi > {TASK.file}"
OPENING = "cat note.txt"


def completion(codec: Codec, command: str, probability: float) -> Completion:
    """An answer with this command, or the last one for an empty one."""
    text = (
        f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
        if command
        else "Done."
    )
    ids = np.asarray([*tiny_tokenizer.bytewise(text), codec.end_of_turn_id], np.int32)
    logprobs = np.zeros(ids.size, np.float32)
    logprobs[0] = math.log(probability)
    return Completion.of_tokens(ids, logprobs, policy_version=0, logprobs_mode=LogprobsMode.PROCESSED)


@asynccontextmanager
async def policy(ps: Penstock, codec: Codec, run_id: str, probability: float) -> AsyncIterator[list[tuple[str, int]]]:
    """Answers a run's calls: the second turn has this probability, and every other one of them is right."""
    asked: list[tuple[str, int]] = []

    async def answer(call: ModelCall) -> None:
        asked.append((call.rollout_id, call.index))
        second = RIGHT if sum(index == 1 for _, index in asked) % 2 else WRONG
        command = (OPENING, second, "")[call.index]
        await call.deliver(completion(codec, command, probability if call.index == 1 else 1.0))

    async with ps.intercept(run_id=run_id) as session:

        async def answer_all() -> None:
            async for call in session.calls():
                await answer(call)

        work = asyncio.create_task(answer_all())
        try:
            yield asked
            session.finish()
            await work
        finally:
            work.cancel()
            await asyncio.wait([work])
