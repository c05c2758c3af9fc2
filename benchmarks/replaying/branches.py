"""How long branches take to be at their point: eight of a rollout, from its last call but one.

Each call takes the model a second. A branch is timed from the request for it to its first call that is sampled.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import rollouts, world
from benchmarks.report import Row, Section, percentile
from penstock.client import Call, Completion, LogprobsMode, ModelCall
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

CALLS: Final = 12
"""Model calls of the parent."""
AT: Final = CALLS - 2
"""The call at which it is branched; it does the work."""
LATENCY_S: Final = 1.0
"""Seconds of the model for a call."""
BRANCHES: Final = 8
AIM_S: Final = 1.0
"""The most that branches may take to their point, beyond their replay."""
_LABELS: Final = {"bench": "branches"}


async def measure(place: Path) -> list[Section]:
    """The time from the request to the first sampled call of each branch, and the part of it that is replay."""
    async with world.scripted(place) as running, running.ps.intercept(labels=_LABELS) as session:
        codec = Codec.load(TokenizerFiles.from_directory(place / "model"))
        asked: dict[str, float] = {}
        sampled = 0

        async def answer(call: ModelCall) -> None:
            nonlocal sampled
            asked.setdefault(call.rollout_id, time.monotonic())
            await asyncio.sleep(LATENCY_S)
            sampled += 1
            await call.deliver(_completion(codec, call.index))

        async def answer_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for call in session.calls():
                    tasks.create_task(answer(call))

        answering = asyncio.create_task(answer_all())
        parent = await running.ps.rollouts.create(rollouts.task(0), "shell", labels=_LABELS)
        await parent.result()
        began = time.monotonic()
        group = await parent.branch(AT, BRANCHES)
        created = time.monotonic() - began
        results = await group.results(samples_only=False)
        session.finish()
        await answering
    if any(one.reward is None or one.reward.value != 1.0 or one.trajectory is None for one in results):
        raise RuntimeError(f"branches went wrong: {[one.outcome for one in results]}")
    if sampled != CALLS + BRANCHES * (CALLS - AT):
        raise RuntimeError(f"{sampled} calls were sampled")
    whole = [asked[one.rollout_id] - began for one in results]
    replays = [_replay_s(one.trajectory.calls) for one in results if one.trajectory is not None]
    beyond = [took - replay for took, replay in zip(whole, replays, strict=True)]
    rows = [
        Row("request answered, its answers on disk", created, "s"),
        Row("request to the first sampled call, p50", percentile(whole, 0.5), "s", also={"most, s": max(whole)}),
        Row("of it from the first call to that one: replay, p50", percentile(replays, 0.5), "s"),
        Row("the rest, the slowest branch", max(beyond), "s", f"aim {AIM_S:g}"),
        Row("calls sampled", sampled, "", f"{CALLS} of the parent, {CALLS - AT} of each branch"),
    ]
    title = f"{BRANCHES} branches from call {AT} of {CALLS}, {LATENCY_S:g} s of the model for a call"
    return [Section(title, rows)]


def _completion(codec: Codec, index: int) -> Completion:
    """Tool calls but for the last one; the one before does the work."""
    text = world.REPLIES[{CALLS - 1: -1, CALLS - 2: 1}.get(index, 0)]
    ids = np.asarray([*tiny_tokenizer.bytewise(text), codec.end_of_turn_id], np.int32)
    return Completion.of_tokens(
        ids, np.full(ids.size, -0.5, np.float32), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )


def _replay_s(calls: tuple[Call, ...]) -> float:
    """Seconds from the first call to the one that is sampled."""
    first, point = calls[0].receive_time, calls[AT].receive_time
    assert first is not None and point is not None
    return (point - first).total_seconds()
