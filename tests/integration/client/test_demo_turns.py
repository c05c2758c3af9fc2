"""The demo's training by turns, over real services: what is branched, and which tokens are trained."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from penstock.client import Completion, LogprobsMode, ModelCall, Penstock
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_demo import turns
from penstock_demo.tasks import TASKS

pytestmark = pytest.mark.asyncio(loop_scope="session")
TASK = TASKS[0]
RIGHT, WRONG = f"echo {TASK.word} > {TASK.file}", f"echo kiwi > {TASK.file}"
OPENING = "cat note.txt"


@pytest.fixture(scope="module")
def codec(model_dir: Path) -> Codec:
    """The tokenizer of the stack."""
    return Codec.load(TokenizerFiles.from_directory(model_dir))


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


@pytest.mark.requirement("R129")
async def test_the_uncertain_turn_is_branched_and_trained_alone(ps: Penstock, codec: Codec) -> None:
    run_id = f"demo-turns-{secrets.token_hex(4)}"
    async with policy(ps, codec, run_id, 0.5) as asked:
        collected = await turns.by_turn(ps, run_id, 0, [TASK])
    (parent,) = collected.whole
    assert len(collected.branches) == turns.BRANCHES
    assert {index for rollout, index in asked if rollout != parent.rollout_id} == {1, 2}  # the first is replayed
    assert len(collected.rows) == turns.BRANCHES + 1
    said = {codec.decode(row.ids[row.mask > 0].tolist()) for row in collected.rows}
    assert len(said) == 2 and all(any(command in text for text in said) for command in (RIGHT, WRONG))
    for row in collected.rows:
        assert (row.advantage > 0) == (RIGHT in codec.decode(row.ids[row.mask > 0].tolist()))
    assert sum(row.advantage for row in collected.rows) == pytest.approx(0.0, abs=1e-3)


async def test_nothing_is_branched_where_the_policy_is_sure(ps: Penstock, codec: Codec) -> None:
    run_id = f"demo-turns-{secrets.token_hex(4)}"
    async with policy(ps, codec, run_id, 0.9):
        collected = await turns.by_turn(ps, run_id, 0, [TASK])
    assert len(collected.whole) == 1 and not collected.branches and not collected.rows
