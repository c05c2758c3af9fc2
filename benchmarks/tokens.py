"""The token path: what a turn's prompt costs as a conversation grows, and how fast the embedded engine samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import world
from benchmarks.report import Row, Section, percentile
from penstock.client import Sampling
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.chat import Message, ToolCallPart

TURNS: Final = 100
PROMPT_TOKENS: Final = 200
NEW_TOKENS: Final = 64
AT_ONCE: Final = {1: 8, 8: 64, 32: 128}
"""Requests by how many run at once."""


async def measure(place: Path) -> list[Section]:
    """A turn's share of the prompt at the start and late in a conversation, and tokens per second."""
    async with world.numpy_engine(place) as running:
        rows = await _engine(running)
    return [
        Section(f"Prompt of one more turn, in a conversation of up to {TURNS} turns", _turns()),
        Section(f"Embedded engine: demo-size model, {PROMPT_TOKENS} prompt and at most {NEW_TOKENS} new tokens", rows),
    ]


def _turns() -> list[Row]:
    codec = Codec.load(tiny_tokenizer.build([*world.REPLIES], 384))
    history: list[Message] = [Message.system("You are a shell agent."), Message.user("Count the files, one by one.")]
    incremental: list[float] = []
    whole: list[float] = []
    for index in range(TURNS):
        call = ToolCallPart(f"call_{index}", "bash", '{"command": "ls | wc -l"}')
        answer = Message.assistant("", call)
        result = Message.tool(call.id, f"{index} files, and a line of output as a command makes it")
        history.append(answer)
        _timed(incremental, partial(codec.continuation, history, [result], last_id=codec.end_of_turn_id))
        history.append(result)
        _timed(whole, partial(codec.render, history))
    late = slice(-10, None)
    return [
        Row("only what is new, first 10 turns", 1e3 * percentile(incremental[:10], 0.5), "ms", "CPU, p50"),
        Row("only what is new, last 10 turns", 1e3 * percentile(incremental[late], 0.5), "ms", "CPU, p50"),
        Row("the whole conversation, first 10 turns", 1e3 * percentile(whole[:10], 0.5), "ms", "what is avoided"),
        Row("the whole conversation, last 10 turns", 1e3 * percentile(whole[late], 0.5), "ms"),
    ]


def _timed(times: list[float], work: Callable[[], object]) -> None:
    began = time.thread_time()
    work()
    times.append(time.thread_time() - began)


async def _engine(running: world.World) -> list[Row]:
    rows = []
    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS)
    random = np.random.default_rng(0)

    async def generate() -> int:
        prompt = random.integers(9, 300, PROMPT_TOKENS, dtype=np.int32)
        return len(await running.ps.inference.generate(prompt, sampling))

    await generate()
    for at_once, count in AT_ONCE.items():
        left = iter(range(count))

        async def worker(left: Iterator[int] = left) -> int:
            count = 0
            for _ in left:
                count += await generate()
            return count

        before = running.cpu_s()["inference"]
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(worker() for _ in range(at_once))))
        elapsed = time.perf_counter() - began
        used = running.cpu_s()["inference"] - before
        rows.append(
            Row(f"{at_once} at once", tokens / elapsed, "tokens/s", f"{1e6 * used / tokens:.0f} us CPU per token")
        )
    return rows
