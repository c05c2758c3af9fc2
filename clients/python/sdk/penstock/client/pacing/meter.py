"""How far the rollouts that were trained are from those that were started: four distributions, side by side.

Each is over classes whose edges are fixed, so that runs can be compared and a meter's memory is bounded:

| distribution | of | classes |
|---|---|---|
| task | the task's id | one for each |
| length | trained tokens of all samples | 0, and by powers of two |
| duration | seconds in all phases but queued, all attempts | by powers of two, from 1/8 s |
| reward | the reward's place in the verifier's range | ten, each a tenth of the range wide; none = not graded |

What runs, or ended without a trajectory, is in the class `unknown` of what is not known of it. The distance is the
total variation: half the sum of the differences of shares, from 0 (equal) to 1 (nothing in common). By chance alone a
sample of the started has one too, which stands beside it.
"""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.client.types.results import POLICY_CAUSES, Phase, RolloutResult
from penstock.client.types.trajectories import Reward, Trajectory

DIMENSIONS: Final = ("task", "length", "duration", "reward")
UNKNOWN: Final = "unknown"
_SHORTEST: Final = 1 / 8
"""Seconds: the upper edge of the first class of durations."""
_TENTHS: Final = 10


@dataclass(frozen=True, slots=True)
class Facts:
    """What is counted of a rollout. None = not known."""

    task_id: str
    tokens: int | None = None
    seconds: float | None = None
    reward: Reward | None = None
    is_ended: bool = True

    @classmethod
    def of(cls, rollout: RolloutResult | Trajectory) -> "Facts":
        """Returns those of an ended rollout, as `group.results()` or an export gives it."""
        if isinstance(rollout, Trajectory):
            return cls(rollout.task_id, _tokens(rollout), rollout.duration, rollout.reward)
        times = rollout.rollout.phase_times
        seconds = sum(spent for phase, spent in times.items() if phase is not Phase.QUEUED) if times else None
        tokens = None if rollout.trajectory is None else _tokens(rollout.trajectory)
        return cls(rollout.rollout.task_id, tokens, seconds, rollout.reward)

    @property
    def classes(self) -> tuple[str, str, str, str]:
        """The group's class in each distribution."""
        reward = UNKNOWN if not self.is_ended else "none" if self.reward is None else _tenth(self.reward)
        return self.task_id, _length(self.tokens), _duration(self.seconds), reward


@dataclass(frozen=True, slots=True)
class Share:
    """A class: the shares of started and of trained rollouts in it, 0 to 1."""

    name: str
    started: float
    trained: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """One of the four. `distance` is 0 to 1; `by_chance` what a random sample of as many has on average."""

    name: str
    distance: float
    by_chance: float
    classes: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Bias:
    """How far the trained rollouts are from the started ones. `running` are those that have not ended."""

    started: int
    running: int
    trained: int
    distributions: tuple[Distribution, ...]

    @property
    def distance(self) -> float:
        """The largest of the four; 0.0 while nothing was trained."""
        return max((one.distance for one in self.distributions), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {"distance": self.distance, **asdict(self)}

    def write(self, path: Path | str) -> None:
        """Writes it to a file, as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")


class BiasMeter:
    """Counts rollouts as they start, end and are trained; keeps no rollout."""

    def __init__(self) -> None:
        self._started: tuple[Counter[str], ...] = tuple(Counter() for _ in DIMENSIONS)
        self._trained: tuple[Counter[str], ...] = tuple(Counter() for _ in DIMENSIONS)
        self._running = 0

    def start(self, task_id: str, count: int = 1) -> None:
        """Counts rollouts that were started."""
        self._running += count
        self._count(self._started, Facts(task_id, is_ended=False), count)

    def end(self, facts: Facts) -> None:
        """Counts the end of one that was counted as started."""
        self._running -= 1
        self._count(self._started, Facts(facts.task_id, is_ended=False), -1)
        self._count(self._started, facts)

    def train(self, facts: Facts) -> None:
        """Counts one that is trained, after its end."""
        self._count(self._trained, facts)

    def report(self) -> Bias:
        """Returns the distances so far."""
        started, trained = self._started[0].total(), self._trained[0].total()
        found = tuple(map(_compared, DIMENSIONS, self._started, self._trained)) if trained else ()
        return Bias(started, self._running, trained, found)

    @staticmethod
    def _count(counters: tuple[Counter[str], ...], facts: Facts, by: int = 1) -> None:
        for counter, name in zip(counters, facts.classes, strict=True):
            counter[name] += by


def is_trainable(result: RolloutResult) -> bool:
    """Returns whether a policy can learn from it: it has a reward, and what failed, if anything, may be its fault."""
    return result.reward is not None and (result.failure is None or result.failure.cause in POLICY_CAUSES)


def _compared(name: str, started: Counter[str], trained: Counter[str]) -> Distribution:
    whole, part = started.total(), trained.total()
    names = sorted((found for found in started | trained if started[found] or trained[found]), key=_by_edge)
    shares = tuple(Share(found, started[found] / whole, trained[found] / part) for found in names)
    # Half the mean absolute deviation of each class's share in a sample drawn without putting back, taken as normal.
    left = max(0.0, 1 / part - 1 / whole)
    by_chance = sum(math.sqrt(2 / math.pi * share.started * (1 - share.started) * left) for share in shares) / 2
    return Distribution(name, sum(abs(share.started - share.trained) for share in shares) / 2, by_chance, shares)


def _by_edge(name: str) -> tuple[bool, float, str]:
    edge = name.partition("-")[0].removesuffix("s").removeprefix("<")
    try:
        return False, float(edge) - name.startswith("<"), name
    except ValueError:
        return True, 0.0, name


def _tokens(trajectory: Trajectory) -> int:
    return sum(int(sample.loss_mask.sum()) for sample in trajectory.samples)


def _length(tokens: int | None) -> str:
    if tokens is None:
        return UNKNOWN
    low = 1 << (tokens.bit_length() - 1) if tokens else 0
    return f"{low}-{2 * low - 1}" if low > 1 else str(low)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < _SHORTEST:
        return f"<{_SHORTEST:g}s"
    low = 2.0 ** (math.frexp(seconds)[1] - 1)
    return f"{low:g}s-{2 * low:g}s" if low < 1 else f"{low:.0f}s-{2 * low:.0f}s"


def _tenth(reward: Reward) -> str:
    width = reward.range_max - reward.range_min
    place = (reward.value - reward.range_min) / width if width > 0 else 0.0
    tenth = min(_TENTHS - 1, max(0, math.floor(place * _TENTHS)))
    return f"{tenth / _TENTHS:.1f}-{(tenth + 1) / _TENTHS:.1f}"
