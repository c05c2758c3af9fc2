"""The inference service: how fast its engines sample beside others on the same model, and what the service costs.

`make bench-vllm` installs vLLM's build for CPUs under .venv-vllm; where it is not, the embedded engine alone is
measured, and the run says so. All that is compared is started first; then they take turns, the others standing still.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import processes
from benchmarks.inference import models, weights
from benchmarks.inference.targets import VLLM_PYTHON, Sample, Service, Target, http, program, service
from benchmarks.report import Row, Section
from benchmarks.timing import beside

NEW_TOKENS: Final = 64
AT_ONCE: Final = {1: 4, 8: 16, 32: 64, 128: 128}
"""Requests by how many run at once."""
ROUNDS: Final = 3
PAIRED: Final = 32
PAIRED_ROUNDS: Final = 8
PAIRED_REQUESTS: Final = 128


async def measure(place: Path) -> list[Section]:
    """All of it."""
    small = models.small(place / "small")
    async with AsyncExitStack() as stack:
        numpy = await stack.enter_async_context(service("numpy", small, place))
        targets: list[Target] = [numpy]
        ours: Sequence[Service] = [numpy]
        if VLLM_PYTHON.exists():
            # Starting is mostly importing, half a minute each.
            async with asyncio.TaskGroup() as tasks:
                starting = [
                    tasks.create_task(stack.enter_async_context(service("vllm", small, place, VLLM_PYTHON))),
                    tasks.create_task(
                        stack.enter_async_context(program("async_llm", "vLLM, in process", small, place))
                    ),
                    tasks.create_task(stack.enter_async_context(program("transformers", "transformers", small, place))),
                    tasks.create_task(stack.enter_async_context(http(small, place))),
                ]
            started = [task.result() for task in starting]
            targets += started
            ours = [each for each in targets if isinstance(each, Service)]
        else:
            print("vLLM and transformers are not measured: `make bench-vllm` installs them", flush=True)
        for target in targets:
            target.server.freeze()
        sections = await _speed(targets)
        for each in ours:
            each.server.thaw()
            # It stood still for minutes: what it was asked first would pay for that.
            await each.load(models.prompts(32, 0), 32, NEW_TOKENS, streamed=True)
            sections.append(await weights.control(each))
            each.server.freeze()
    if VLLM_PYTHON.exists():
        sections.append(await _overhead(small, place))
        sections.append(await weights.pushes(place))
    return sections


async def _alone(target: Target, count: int, at_once: int, seed: int, *, streamed: bool) -> Sample:
    """One load, with nobody else running."""
    target.server.thaw()
    try:
        await target.wake(at_once)
        return await target.load(models.prompts(count, seed), at_once, NEW_TOKENS, streamed=streamed)
    finally:
        target.server.freeze()


async def _speed(targets: Sequence[Target]) -> list[Section]:
    """Tokens per second of whole answers, and time to the first token of streamed ones; medians of the rounds."""
    whole: dict[tuple[Target, int], list[Sample]] = {}
    streamed: dict[tuple[Target, int], list[Sample]] = {}
    for target in targets:
        await _alone(target, 32, 32, 0, streamed=True)
    seed = 1
    for round_ in range(ROUNDS):
        print(f"  round {round_ + 1} of {ROUNDS}", flush=True)
        for at_once, count in AT_ONCE.items():
            for found, stream in ((whole, False), (streamed, True)):
                for target in targets if round_ % 2 else reversed(targets):
                    if stream and not target.streams:
                        found.setdefault((target, at_once), []).append(whole[target, at_once][-1])
                        continue
                    seed += 1
                    sample = await _alone(target, count, at_once, seed, streamed=stream)
                    found.setdefault((target, at_once), []).append(sample)
    sections: list[Section] = []
    rows = {target: _rows(target, whole, streamed) for target in targets}
    for target in targets:
        others = {other.title: rows[other] for other in targets if other is not target}
        told = beside(rows[target], others) if isinstance(target, Service) else rows[target]
        title = f"{target.title}: {models.PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens, small model"
        sections.append(Section(title, told))
    return sections


def _rows(
    target: Target,
    whole: dict[tuple[Target, int], list[Sample]],
    streamed: dict[tuple[Target, int], list[Sample]],
) -> list[Row]:
    rows = []
    for at_once in AT_ONCE:
        samples, streams = whole[target, at_once], streamed[target, at_once]
        also = {
            "first token ms": 1e3 * median(median(sample.first) for sample in streams),
            "streamed tokens/s": median(sample.tokens / sample.seconds for sample in streams),
            "us CPU per token": median(1e6 * sample.cpu_s / sample.tokens for sample in samples),
        }
        speed = median(sample.tokens / sample.seconds for sample in samples)
        rows.append(Row(f"{at_once} at once", speed, "tokens/s", also=also))
    return rows


async def _overhead(small: Path, place: Path) -> Section:
    """The service over the engine that it is made of: pairs of loads, whose order alternates.

    The model's computation has one core and everything else the others, as it is beside an accelerator: where they
    compete for cores, what is measured is how many processes there are.
    """
    cores = os.sched_getaffinity(0)
    engine, rest = {min(cores)}, cores - {min(cores)} or cores
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(min(cores))}
    ratios: list[float] = []
    place = place / "apart"
    place.mkdir()
    async with (
        service("vllm", small, place, VLLM_PYTHON, bound) as ours,
        # The same engine on both sides: what our plugin costs it is in the tables above.
        program("async_llm", "vLLM, in process", small, place, bound | {"VLLM_PLUGINS": "penstock"}) as direct,
    ):
        cpu: dict[Target, list[float]] = {ours: [], direct: []}
        for target in (ours, direct):
            target.server.apart(rest, engine)
        processes.keep_on(os.getpid(), rest)
        try:
            for target in (ours, direct):
                target.server.freeze()
            for target in (ours, direct):
                await _alone(target, PAIRED_REQUESTS, PAIRED, 9_999, streamed=False)
            for round_ in range(PAIRED_ROUNDS):
                speeds: dict[Target, float] = {}
                for target in (ours, direct) if round_ % 2 else (direct, ours):
                    sample = await _alone(target, PAIRED_REQUESTS, PAIRED, 10_000 + round_, streamed=False)
                    speeds[target] = sample.tokens / sample.seconds
                    cpu[target].append(1e6 * sample.cpu_s / sample.tokens)
                ratios.append(speeds[ours] / speeds[direct])
        finally:
            processes.keep_on(os.getpid(), cores)
    rows = [
        Row(
            "tokens per second, of vLLM's in process",
            median(ratios),
            "",
            f"median of {len(ratios)} pairs, {PAIRED} at once",
            {"lowest": min(ratios), "highest": max(ratios)},
        ),
        Row("CPU of the service's process per token", median(cpu[ours]), "us"),
        Row("CPU of vLLM's own front end per token", median(cpu[direct]), "us", "with the load in the same process"),
    ]
    return Section("Our gRPC service over vLLM's AsyncLLM in a process of its own", rows)
