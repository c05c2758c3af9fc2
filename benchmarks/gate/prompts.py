"""Prompts on a trainer's stream: whole, and without what was sent before. The two take turns at one gate."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import processes
from benchmarks.gate.conversations import Conversation, Opening, Size
from benchmarks.gate.doors import connect
from benchmarks.gate.programs import Program, running
from benchmarks.gate.targets import Penstock, Setting
from benchmarks.report import Row, Section

ROUNDS: Final = 5
AT_ONCE: Final = 2
TURNS: Final = 100
RESULT_CHARACTERS: Final = 4_800
"""Of a tool's result: with an answer of 64 tokens, 100 turns come to about 107,000 tokens."""


@dataclass(frozen=True, slots=True)
class _Taken:
    mebibytes: float
    gate_ms: float
    trainer_ms: float
    tokens: int


async def measure(place: Path) -> list[Section]:
    """Bytes of a conversation on the stream, and the CPU of both ends for each call of it."""
    setting = Setting.at(place)
    taken: dict[bool, list[_Taken]] = {False: [], True: []}
    async with setting.stack({}) as stack:
        given = {
            "address": stack.address("interception"),
            "token": stack.trainer_token,
            "ids": setting.replies["short"].ids,
        }
        for number in range(ROUNDS + 1):
            for suffix_only in (False, True) if number % 2 else (True, False):
                argv = [sys.executable, "-m", "benchmarks.gate.stub_trainer"]
                async with running("the trainer", argv, **given, suffix_only=suffix_only) as trainer:
                    target = Penstock("gate", stack, trainer, relay=False)
                    one = await _conversations(target, trainer, f"{number} {suffix_only}")
                    await target.end()
                    if number:  # the first round warms up
                        taken[suffix_only].append(one)
    return [Section(f"A trainer's stream: {TURNS} turns to {taken[True][0].tokens:,} tokens", _rows(taken))]


async def _conversations(target: Penstock, trainer: Program, seed: str) -> _Taken:
    opening = Opening.of(Size.SMALL, "prompts")
    doors = await target.open(AT_ONCE)
    await connect(doors)
    before = target.cpu_s(), processes.cpu_s(trainer.pid)

    async def talk(at: int) -> None:
        conversation = Conversation(opening, f"{seed} {at}", RESULT_CHARACTERS)
        for _ in range(TURNS):
            conversation.answered(await doors[at].post(conversation.body()))

    await asyncio.gather(*(talk(at) for at in range(AT_ONCE)))
    gate, trained = target.cpu_s() - before[0], processes.cpu_s(trainer.pid) - before[1]
    said = await trainer.tell("count")
    await target.close(doors)
    for door in doors:
        door.close()
    calls = said["calls"]
    return _Taken(said["bytes"] / AT_ONCE / 2**20, 1e3 * gate / calls, 1e3 * trained / calls, said["longest"])


def _rows(taken: dict[bool, list[_Taken]]) -> list[Row]:
    rows = []
    for name, unit in (("mebibytes", "MiB"), ("gate_ms", "ms"), ("trainer_ms", "ms")):
        whole, rest = ([getattr(one, name) for one in taken[kind]] for kind in (False, True))
        ratios = [a / b for a, b in zip(rest, whole, strict=True)]
        title = {"mebibytes": "bytes of a conversation", "gate_ms": "CPU of the gate per call"}
        note = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
        also = {f"whole prompts {unit}": median(whole), f"suffix_only {unit}": median(rest)}
        rows.append(Row(title.get(name, "CPU of a trainer per call"), median(ratios), "x", note, also))
    return rows
