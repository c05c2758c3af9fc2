"""What calls keep: of their tokens when they are over, and while they wait."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import orjson

from benchmarks.gate.conversations import Conversation, Opening, Size
from benchmarks.gate.doors import Door, connect
from benchmarks.gate.loads import hang_up
from benchmarks.gate.targets import Target
from benchmarks.report import Row

SHORT: Final = (16, 16)
LONG: Final = (16, 8)
"""Conversations and turns of each, with short answers and with long ones, for who keeps much of each."""
AT_ONCE: Final = 8
KEEP_ALIVES: Final = 1
KEPT: Final = "kept of a call"
PATIENCE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Grown:
    rollouts: list[Door]
    bytes: int
    calls: int
    tokens: int


async def measure(target: Target, streams: int, times: int = 1) -> list[Row]:
    """Memory, to be measured before anything else: what is used again once it was freed shows nowhere.

    `times` as many conversations make what is kept of each stand out against what any load needs.

    What a token costs is told by two kinds of conversations, whose answers have 64 and 2,048 tokens.
    """
    ready = await _grow(target, "long", (AT_ONCE, 8))  # what any such load needs once
    short = await _grow(target, "short", (times * SHORT[0], SHORT[1]))
    rows = [Row(KEPT, short.bytes / short.calls / 1024, "KiB", f"of {short.tokens / short.calls:.0f} tokens")]
    rollouts = [*ready.rollouts, *short.rollouts]
    if target.returns_tokens:
        long = await _grow(target, "long", (times * LONG[0], LONG[1]))
        growth = long.bytes / long.calls - short.bytes / short.calls
        tokens = long.tokens / long.calls - short.tokens / short.calls
        rows.append(Row("kept of a token", growth / tokens, "bytes", "longer answers' growth by their tokens"))
        rollouts += long.rollouts
    await target.answers.tell("reply", name="short")
    rows += await _held(target, streams)
    await target.close(rollouts)
    return rows


async def _held(target: Target, count: int) -> list[Row]:
    """Memory of streams that wait, everything that came with each included, and the CPU that they take."""
    opening = Opening.of(Size.SMALL, "warm")
    bodies = [Conversation(opening, f"held {index}").body(stream=True) for index in range(count)]
    before = target.resident_bytes()
    doors = await target.open(count)
    await connect(doors)
    await target.answers.tell("hold")
    answers = [door.post(body) for door, body in zip(doors, bodies, strict=True)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await target.answers.tell("wait", count=count)
            if target.streams_early:
                await asyncio.gather(*(door.come(1) for door in doors))
            memory = target.resident_bytes()
            rows = [
                Row(
                    "a held stream: memory", (memory - before) / count / 1024, "KiB", f"{count:,}, each its own rollout"
                ),
                Row("held streams: memory of the process", memory / 2**20, "MiB", f"{count:,} wait"),
            ]
            if target.streams_early:
                used, began = target.cpu_s(), time.perf_counter()
                await asyncio.gather(*(door.come(door.pieces + KEEP_ALIVES) for door in doors))
                share = (target.cpu_s() - used) / (time.perf_counter() - began)
                rows.append(Row("held streams: CPU while all wait", 100 * share, "% of core", "keep-alives included"))
            await target.answers.tell("free")
            await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()
    await hang_up(target, doors)
    return rows


async def _grow(target: Target, reply: str, size: tuple[int, int]) -> _Grown:
    """So many conversations, AT_ONCE at a time; their rollouts stay open."""
    count, turns = size
    await target.answers.tell("reply", name=reply)
    doors = await target.open(count)
    await connect(doors)
    opening = Opening.of(Size.SMALL, "warm")
    conversations = [Conversation(opening, f"{reply} {index} of {size}") for index in range(count)]
    left = iter(list(zip(doors, conversations, strict=True)))
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for door, conversation in left:
            answer = b"{}"
            for _ in range(turns):
                answer = await door.post(conversation.body())
                conversation.answered(answer)
            tokens += orjson.loads(answer)["usage"]["total_tokens"]

    before = target.resident_bytes()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())
    grown = _Grown(doors, target.resident_bytes() - before, count * turns, tokens)
    for door in doors:
        door.close()
    return grown
