"""The gate and the peer that takes the least CPU, both running, asked by turns: what a single run blurs shows here.

A machine that has other work, or a slower hour, has it for both. `make bench-gate-peers` installs the peer.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.gate import AGENTCORE, loads
from benchmarks.gate.conversations import Size
from benchmarks.gate.loads import TURNS, Handling, Load
from benchmarks.gate.targets import PEERS_PYTHON, Setting
from benchmarks.report import Row, Section

ROUNDS: Final = 14
LOADS: Final = (
    Load(Size.SMALL, 64, 512, 512),
    Load(Size.SMALL, 512, 512, 512),
    Load(Size.SMALL, 16, 16, 16, turns=TURNS),
)


async def measure(place: Path) -> list[Section]:
    """The ratio of the two for each load: its median over the rounds, each of which has new words."""
    if not PEERS_PYTHON.exists():
        print("There is nobody to take turns with: `make bench-gate-peers` installs the gateways of others", flush=True)
        return []
    setting = Setting.at(place)
    title, program = AGENTCORE[0].format("linear"), AGENTCORE[1]
    found: dict[Load, list[tuple[float, float]]] = {load: [] for load in LOADS}
    async with setting.gate() as gate, setting.peer(title, program, "linear") as peer:
        for target in (gate, peer):
            await loads.warm_up(target)
        for number in range(ROUNDS):
            # The one that was second is first.
            order = (gate, peer) if number % 2 else (peer, gate)
            for load, taken in found.items():
                took = {
                    target.title: (
                        await loads.measure(target, load, load.conversations, Handling(), seed=f" round {number}")
                    ).value
                    for target in order
                }
                taken.append((took[gate.title], took[peer.title]))
    return [Section(f"CPU of the gate, as a part of what {title} takes", [_row(*item) for item in found.items()])]


def _row(load: Load, taken: list[tuple[float, float]]) -> Row:
    ratios = [ours / theirs for ours, theirs in taken]
    note = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    ours, theirs = (median(values) for values in zip(*taken, strict=True))
    return Row(load.name, median(ratios), "x", note, {"gate ms": ours, "peer ms": theirs})
