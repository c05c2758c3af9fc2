"""One frame for all sweeps of refused writes: a scenario is played once for each write that a disk refuses.

A scenario raises AssertionError for what does not hold. The suite draws a sample of the writes;
PENSTOCK_EVERY_REFUSED_WRITE=1 refuses each in its turn.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Final, Protocol, TypeVar

import pytest
from tests.support.disks.failing_disk import FULL, IOERR, Disk

EVERY: Final = os.environ.get("PENSTOCK_EVERY_REFUSED_WRITE") == "1"
COMMITS: Final = 6
"""So many writes are in the sample where all are of one kind, as commits are."""
HANGS_S: Final = 60.0

Error = tuple[int, bool]
"""What a journal's disk answers, and whether SQLite undoes the whole transaction with it."""
_ERRORS: Final[Mapping[str, Error]] = {
    "full": (FULL, True),
    "io error": (IOERR, True),
    "io error of one": (IOERR, False),
}
ERRORS: Final = pytest.mark.parametrize(("code", "undoes"), _ERRORS.values(), ids=_ERRORS.keys())
_OF_ALL: Final = pytest.mark.on_demand("each write is refused by one of the errors, in turn")
IN_TURN: Final = pytest.mark.parametrize(
    "errors",
    [
        pytest.param(tuple(_ERRORS.values()), id="errors in turn"),
        *(pytest.param((error,), id=name, marks=_OF_ALL) for name, error in _ERRORS.items()),
    ],
)
"""`errors` of `in_turn`: all of them, each for some writes, or with `--full` also each for all writes."""
KINDS: Final = pytest.mark.parametrize("commits", [False, True], ids=["statements", "commits"])


def in_turn(errors: tuple[Error, ...], *, commits: bool) -> Callable[[int], Disk]:
    """Makes disks that refuse a write each, by these errors one after another."""
    turn = cycle(errors)

    def disk_at(at: int) -> Disk:
        code, undoes = next(turn)
        return Disk(code, at=at, commits=commits, undoes=undoes)

    return disk_at


class Refusing(Protocol):
    """A disk that refuses one write."""

    @property
    def seen(self) -> list[str]:
        """The writes of the kind that was asked for, up to the one that is refused."""

    @property
    def refused(self) -> list[str]:
        """Those that were refused."""


D = TypeVar("D", bound=Refusing)


@dataclass(frozen=True, slots=True)
class Swept:
    """What the scenario writes on a disk that refuses nothing, and what was refused."""

    written: list[str]
    refused: list[str] = field(default_factory=list)

    def has(self, *kinds: str) -> None:
        """AssertionError where no write of such a kind was refused. A sample may have drawn those of others."""
        for kind in kinds if EVERY else ():
            assert any(write.startswith(kind) for write in self.refused), (kind, self.refused)


async def sweep(
    play: Callable[[Path, D], Awaitable[None]],
    directory: Path,
    disk_at: Callable[[int], D],
    *,
    draw: random.Random | None = None,
) -> Swept:
    """Plays once for each write. AssertionError with all that does not hold.

    Args:
        play: the scenario, in a directory of its own.
        directory: has one for each time.
        disk_at: a disk that refuses its `at`-th write, from 1; none at 0.
        draw: takes a sample; None refuses every write.
    """
    whole = disk_at(0)
    assert (told := await _played(play, directory / "0", whole)) == "", told
    written = list(whole.seen)
    assert written
    sample = None if EVERY else draw
    chosen: Iterable[int] = count(1) if sample is None else drawn(written, sample)
    swept, failed = Swept(written), {}
    for place in chosen:
        at = place
        while True:
            disk = disk_at(at)
            told = await _played(play, directory / str(at), disk)
            if told:
                failed[f"{at}: {disk.refused[:1]}"] = told
            if disk.refused or sample is None or told:
                break
            at = sample.randint(1, len(disk.seen))  # this run had fewer writes than the first
        if not disk.refused:
            break  # there is no further write
        swept.refused.append(disk.refused[0])
    assert not failed, failed
    return swept


def drawn(written: list[str], draw: random.Random) -> list[int]:
    """A sample, as positions that begin at one: a write of each kind, or `COMMITS` where all are of one.

    Writers may share a commit or not, so that one run has fewer commits than another: the last ones are not drawn.
    """
    places: dict[str, list[int]] = {}
    for place, write in enumerate(written, 1):
        places.setdefault(write, []).append(place)
    if len(places) == 1:
        return sorted(draw.sample(range(1, len(written) * 3 // 4), min(COMMITS, len(written) // 2)))
    return sorted(draw.choice(of_one) for of_one in places.values())


async def _played(play: Callable[[Path, D], Awaitable[None]], directory: Path, disk: D) -> str:
    """What does not hold, or ""."""
    try:
        async with asyncio.timeout(HANGS_S):
            await play(directory, disk)
    except TimeoutError:
        return "it hangs"
    except Exception as error:  # noqa: BLE001 - reported, with the write that was refused
        return repr(error)
    shutil.rmtree(directory, ignore_errors=True)
    return ""
