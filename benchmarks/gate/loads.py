"""The loads: how many conversations of which size go on at once, and what each costs whoever is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gate.conversations import Conversation, Opening, Size
from benchmarks.gate.doors import Door, connect
from benchmarks.gate.targets import Target
from benchmarks.report import Row, percentile

TURNS: Final = 32
"""Of a growing conversation."""


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations, each a rollout with a connection of its own; `peers` of them where others are asked, 0 = none.

    `cold`: no two have tools or system prompt in common, and nobody has seen them. `held_s` is the time that whoever
    answers takes.
    """

    size: Size
    at_once: int
    conversations: int
    peers: int
    turns: int = 1
    cold: bool = False
    held_s: float = 0.0

    @property
    def name(self) -> str:
        """As its row is called."""
        kind = "first turn" if self.turns == 1 else f"{self.turns} turns"
        if self.held_s:
            kind = f"held {self.held_s:.0f} s"
        elif self.size is Size.AGENT and self.turns == 1:
            kind += ", cold" if self.cold else ", warm"
        return f"{self.size.value}, {kind}, {self.at_once:,} at once"


LOADS: Final = (
    Load(Size.SMALL, 64, 512, 256),
    Load(Size.AGENT, 64, 256, 64),
    Load(Size.AGENT, 64, 64, 64, cold=True),
    Load(Size.SMALL, 16, 16, 16, turns=TURNS),
    Load(Size.AGENT, 16, 16, 16, turns=TURNS),
    Load(Size.SMALL, 1, 256, 128),
    Load(Size.SMALL, 512, 1024, 512),
    Load(Size.SMALL, 4096, 4096, 0),
    Load(Size.SMALL, 64, 64, 64, held_s=1),
    Load(Size.SMALL, 512, 512, 512, held_s=1),
    Load(Size.SMALL, 4096, 4096, 0, held_s=1),
    Load(Size.AGENT, 1, 64, 16),
    Load(Size.AGENT, 512, 512, 0),
)
"""What is told first is measured first: a machine that is busy with other things does not come to the last."""
FURTHER: Final = (
    Load(Size.SMALL, 512, 512, 0, turns=TURNS),
    Load(Size.AGENT, 64, 64, 64, turns=TURNS),
    Load(Size.AGENT, 4096, 4096, 0),
    Load(Size.SMALL, 4096, 4096, 0, held_s=60),
)
"""What takes longer."""


@dataclass(slots=True)
class Handling:
    """What opening and closing rollouts has cost: CPU seconds and how many."""

    rollouts: int = 0
    opening_s: float = 0.0
    closing_s: float = 0.0

    def rows(self) -> list[Row]:
        """Per rollout."""
        return [
            Row("opening a rollout", 1e3 * self.opening_s / self.rollouts, "ms", f"{self.rollouts:,} of them"),
            Row("closing a rollout", 1e3 * self.closing_s / self.rollouts, "ms", "connections' ends included"),
        ]


async def measure(target: Target, load: Load, count: int, handling: Handling, *, seed: str = "") -> Row:
    """CPU of one call, with the times that callers see. Another `seed` gives other words."""
    if load.cold:
        openings = [Opening.of(load.size, f"{load.name} {index}") for index in range(count)]
    else:
        openings = [Opening.of(load.size, "warm")] * count
    conversations = [Conversation(opening, f"{load.name}{seed} {index}") for index, opening in enumerate(openings)]
    await target.answers.tell("latency", s=load.held_s)
    used = target.cpu_s()
    doors = await target.open(count)
    handling.opening_s += target.cpu_s() - used
    await connect(doors)
    await target.answers.tell("count")
    used, began = target.cpu_s(), time.perf_counter()
    times = await talk(doors, conversations, load.turns, load.at_once)
    used, elapsed = target.cpu_s() - used, time.perf_counter() - began
    told = await target.answers.tell("count")
    if target.tells_continued and told["continued"] != count * (load.turns - 1):
        raise RuntimeError(
            f"{load.name}: of {told['calls']} prompts only {told['continued']} went on from what was sampled"
        )
    closing = target.cpu_s()
    await hang_up(target, doors)
    handling.closing_s += target.cpu_s() - closing
    handling.rollouts += count
    also = {
        "p50 ms": 1e3 * percentile(times, 0.5),
        "p99 ms": 1e3 * percentile(times, 0.99),
        "calls/s": len(times) / elapsed,
    }
    return Row(load.name, 1e3 * used / len(times), "ms", f"{len(times):,} calls", also)


async def warm_up(target: Target) -> None:
    """A few calls of each size, so that what is made once is made."""
    for size in Size:
        doors = await target.open(8)
        await connect(doors)
        conversations = [Conversation(Opening.of(size, "warm"), f"warm-up {index}") for index in range(len(doors))]
        await talk(doors, conversations, 2, 4)
        await hang_up(target, doors)


async def talk(doors: Sequence[Door], conversations: Sequence[Conversation], turns: int, at_once: int) -> list[float]:
    """Every conversation through its own door: the seconds that each call took."""
    left = iter(list(zip(doors, conversations, strict=True)))
    times: list[float] = []

    async def worker() -> None:
        for door, conversation in left:
            for _ in range(turns):
                body = conversation.body()
                began = time.perf_counter()
                answer = await door.post(body)
                times.append(time.perf_counter() - began)
                conversation.answered(answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(worker())
    return times


async def hang_up(target: Target, doors: Sequence[Door]) -> None:
    """The agents' ends, then their rollouts'."""
    for door in doors:
        door.close()
    await target.close(doors)
