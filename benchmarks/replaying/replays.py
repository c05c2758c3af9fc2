"""How long a lost attempt takes to be where it was: rollouts whose sandbox is deleted before their last call.

Each call takes the model a second. Both attempts are timed from their first call to their last one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import rollouts, world
from benchmarks.report import Row, Section, percentile
from penstock.client import Completion, LogprobsMode, ModelCall, Trajectory
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

CALLS: Final = 12
"""Model calls of a rollout; it is lost at the last one."""
LATENCY_S: Final = 1.0
"""Seconds of the model for a call."""
AT_ONCE: Final = 8
AIM: Final = 0.1
"""The most that a replay may take of the original time."""
_LABELS: Final = {"bench": "replays"}


@dataclass(slots=True)
class _Lost:
    """What the trainer saw of each rollout's first attempt."""

    began: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    sampled: int = 0


async def measure(place: Path) -> list[Section]:
    """The time of the first attempt to its loss, and of the replay to the same call."""
    async with world.scripted(place) as running, running.ps.intercept(labels=_LABELS) as session:
        lost = _Lost()
        codec = Codec.load(TokenizerFiles.from_directory(place / "model"))

        async def answer(call: ModelCall) -> None:
            lost.began.setdefault(call.rollout_id, time.monotonic())
            if call.index == CALLS - 1 and call.rollout_id not in lost.took:
                lost.took[call.rollout_id] = time.monotonic() - lost.began[call.rollout_id]
                await running.ps.sandboxes.delete_all({"penstock_rollout": call.rollout_id})
                return
            await asyncio.sleep(LATENCY_S)
            lost.sampled += 1
            await call.deliver(_completion(codec, call.index))

        async def answer_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for call in session.calls():
                    tasks.create_task(answer(call))

        answering = asyncio.create_task(answer_all())
        found = await asyncio.gather(*(_rollout(running, number) for number in range(AT_ONCE)))
        session.finish()
        await answering
    first, again = [lost.took[one.rollout_id] for one in found], [_replayed_s(one) for one in found]
    replayed = sum(call.replayed_from is not None for one in found for call in one.calls)
    if lost.sampled != CALLS * AT_ONCE or replayed != (CALLS - 1) * AT_ONCE:
        raise RuntimeError(f"{lost.sampled} calls were sampled and {replayed} replayed")
    ratio = percentile(again, 0.5) / percentile(first, 0.5)
    rows = [
        Row("first attempt, first to last call, p50", percentile(first, 0.5), "s"),
        Row("its replay, p50", percentile(again, 0.5), "s", also={"most, s": max(again)}),
        Row("ratio", ratio, "", f"aim {AIM:g}"),
        Row("calls sampled", lost.sampled, "", f"of {AT_ONCE} rollouts with {CALLS} calls; {replayed} replayed"),
    ]
    title = f"A sandbox lost at call {CALLS} of {CALLS}, {LATENCY_S:g} s of the model for a call, {AT_ONCE} at once"
    return [Section(title, rows)]


async def _rollout(running: world.World, number: int) -> Trajectory:
    handle = await running.ps.rollouts.create(rollouts.task(number), "shell", labels=_LABELS, max_attempts=2)
    result = await handle.result()
    if result.outcome.reward is None or result.outcome.reward.value != 1.0 or result.rollout.attempts != 2:
        raise RuntimeError(f"rollout {result.rollout_id} went wrong: {result.outcome}")
    return await handle.trajectory()


def _completion(codec: Codec, index: int) -> Completion:
    """Tool calls but for the last one; the one before does the work."""
    text = world.REPLIES[{CALLS - 1: -1, CALLS - 2: 1}.get(index, 0)]
    ids = np.asarray([*tiny_tokenizer.bytewise(text), codec.end_of_turn_id], np.int32)
    return Completion.of_tokens(
        ids, np.full(ids.size, -0.5, np.float32), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )


def _replayed_s(trajectory: Trajectory) -> float:
    """Seconds from the first call of the second attempt to its last one."""
    first, last = trajectory.calls[0].receive_time, trajectory.calls[-1].receive_time
    assert first is not None and last is not None
    return (last - first).total_seconds()
