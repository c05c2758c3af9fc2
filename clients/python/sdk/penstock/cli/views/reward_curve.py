"""Rewards drawn with characters: the curve of their means with the spread around it, and a group's rewards on a line.

Braille patterns have two by four dots a character, so that a curve of 60 characters shows 120 groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_BLANK: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille pattern, by column and row."""
_MOST_DOTS: Final = 8
"""Maximum dots between two points: a curve of three points does not stretch across the screen."""


@dataclass(frozen=True, slots=True)
class Point:
    """The rewards of a group, or of rollouts that ended one after another."""

    low: float
    mean: float
    high: float


def condensed(points: Sequence[Point], most: int) -> list[Point]:
    """Returns at most `most` points; neighbours are merged."""
    if len(points) <= most:
        return list(points)
    parts = [points[len(points) * i // most : len(points) * (i + 1) // most] for i in range(most)]
    return [
        Point(min(p.low for p in part), sum(p.mean for p in part) / len(part), max(p.high for p in part))
        for part in parts
    ]


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of the given height, as wide as there is room."""

    points: Sequence[Point]
    bottom: float
    top: float
    height: int
    caption: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bottom, top = (self.bottom, self.top) if self.top > self.bottom else (self.bottom - 0.5, self.bottom + 0.5)
        labels = [f"{value:.4g}" for value in (top, (top + bottom) / 2, bottom)]
        margin = max(map(len, labels))
        width = max(1, options.max_width - margin - 2)
        mean, spread = self._dots(width, bottom, top)
        for row in range(self.height):
            at = {0: 0, self.height // 2: 1, self.height - 1: 2}.get(row)
            line = Text(f"{labels[at] if at is not None else '':>{margin}} ", style="dim", no_wrap=True, end="")
            line.append(
                "\N{BOX DRAWINGS LIGHT VERTICAL AND LEFT}" if at is not None else "\N{BOX DRAWINGS LIGHT VERTICAL}"
            )
            used = 1 + max((column for column, at_row in (*mean, *spread) if at_row == row), default=-1)
            for column in range(used):
                own, around = mean.get((column, row), 0), spread.get((column, row), 0)
                # A character has one style: the mean's where it passes, so that the spread never hides it.
                line.append(chr(_BLANK + own) if own else chr(_BLANK + around), style="bold cyan" if own else "blue")
            yield line
            yield Text()
        yield Text(f"{'':>{margin}}  {self.caption}", style="dim", no_wrap=True, overflow="ellipsis")

    def _dots(self, width: int, bottom: float, top: float) -> tuple[dict[tuple[int, int], int], ...]:
        """Returns the patterns of the mean and of the spread, by column and row of characters."""
        mean: dict[tuple[int, int], int] = {}
        spread: dict[tuple[int, int], int] = {}
        columns, rows = width * 2, self.height * 4
        points = condensed(self.points, columns)
        if not points:
            return mean, spread

        def level(value: float) -> int:
            share = (min(max(value, bottom), top) - bottom) / (top - bottom)
            return round((rows - 1) * (1 - share))

        def dot(onto: dict[tuple[int, int], int], x: int, y: int) -> None:
            place = (x // 2, y // 4)
            onto[place] = onto.get(place, 0) | _DOTS[x % 2][y % 4]

        step = 0.0 if len(points) < 2 else min(float(_MOST_DOTS), (columns - 1) / (len(points) - 1))
        former: int | None = None
        for x in range(round(step * (len(points) - 1)) + 1):
            place = x / step if step else 0.0
            index = min(int(place), len(points) - 1)
            after = points[min(index + 1, len(points) - 1)]
            share = place - index
            here = points[index]
            low, middle, high = (
                one + (other - one) * share
                for one, other in ((here.low, after.low), (here.mean, after.mean), (here.high, after.high))
            )
            y = level(middle)
            start = y if former is None or former == y else former + (1 if y > former else -1)
            for passed in range(min(start, y), max(start, y) + 1):
                dot(mean, x, passed)
            former = y
            for edge in range(level(high), level(low) + 1):
                if not (x % 2 or edge % 2):  # a light screen of dots
                    dot(spread, x, edge)
        return mean, spread


def strip(values: Sequence[float], bottom: float, top: float, width: int) -> Text:
    """Draws rewards on a line from bottom to top: positions, counts, and the mean."""
    counts = [0] * width
    span = (top - bottom) or 1.0

    def place(value: float) -> int:
        return min(width - 1, max(0, round((width - 1) * (value - bottom) / span)))

    for value in values:
        counts[place(value)] += 1
    drawn = Text(no_wrap=True)
    middle = place(sum(values) / len(values)) if values else None
    for at, count in enumerate(counts):
        letter = "\N{MIDDLE DOT}" if not count else str(count) if count < 10 else "#"
        drawn.append(letter, style="bold cyan" if at == middle else "" if count else "dim")
    return drawn
