"""The difference of two texts as unified hunks, at a cost that has a bound whatever the texts are.

Myers' greedy algorithm ("An O(ND) Difference Algorithm and Its Variations", 1986), which compares few lines where few
changed. Invariant: what is spent on comparing is taken from `Effort`; when it is used up, what is left of a text is
told as removed and added as a whole, which is a true difference too, only a longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

CONTEXT: Final = 3
"""Equal lines that are shown around each change."""
MAX_EDITS: Final = 400
"""Changed lines of one text that are looked for; the memory that it takes grows with their square."""
_NO_NEWLINE: Final = "\\ No newline at end of file\n"


@dataclass(slots=True)
class Effort:
    """How many steps may still be taken, over all texts that share it."""

    steps: int = 4_000_000


@dataclass(frozen=True, slots=True)
class _Line:
    sign: str
    text: str


def hunks(before: str, after: str, effort: Effort) -> Iterator[str]:
    """The lines of the hunks, each with its line feed; nothing for equal texts."""
    old, new = _lines(before), _lines(after)
    script = _script(old, new, effort)
    changed = [index for index, line in enumerate(script) if line.sign != " "]
    start = at = before_at = after_at = 0
    while start < len(changed):
        end = start
        while end + 1 < len(changed) and changed[end + 1] - changed[end] <= 2 * CONTEXT + 1:
            end += 1
        first = max(0, changed[start] - CONTEXT)
        # Between hunks all lines are equal.
        before_at, after_at = before_at + first - at, after_at + first - at
        at = min(len(script), changed[end] + CONTEXT + 1)
        part = script[first:at]
        yield from _hunk(part, before_at, after_at)
        before_at += sum(line.sign != "+" for line in part)
        after_at += sum(line.sign != "-" for line in part)
        start = end + 1


def _lines(text: str) -> list[str]:
    """By line feed and nothing else: a form feed or U+2028 is a part of its line."""
    parts = text.split("\n")
    last = parts.pop()
    return [f"{part}\n" for part in parts] + ([last] if last else [])


def _hunk(part: Sequence[_Line], before: int, after: int) -> Iterator[str]:
    """A hunk behind that many lines of each text."""
    old = sum(line.sign != "+" for line in part)
    new = sum(line.sign != "-" for line in part)
    # A side without lines is named by the line before it, as POSIX says.
    yield f"@@ -{before + (old > 0)},{old} +{after + (new > 0)},{new} @@\n"
    for line in part:
        if line.text.endswith("\n"):
            yield f"{line.sign}{line.text}"
        else:
            yield f"{line.sign}{line.text}\n"
            yield _NO_NEWLINE


def _script(old: Sequence[str], new: Sequence[str], effort: Effort) -> list[_Line]:
    """Every line of both, in order, with its sign."""
    shared = min(len(old), len(new))
    head = 0
    while head < shared and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shared - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle_old, middle_new = old[head : len(old) - tail], new[head : len(new) - tail]
    middle = _edits(middle_old, middle_new, effort)
    if middle is None:
        middle = [_Line("-", line) for line in middle_old] + [_Line("+", line) for line in middle_new]
    return [
        *(_Line(" ", line) for line in old[:head]),
        *middle,
        *(_Line(" ", line) for line in old[len(old) - tail :]),
    ]


def _edits(old: Sequence[str], new: Sequence[str], effort: Effort) -> list[_Line] | None:
    """The shortest script; None beyond MAX_EDITS, or when the effort is used up."""
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(min(len(old) + len(new), MAX_EDITS) + 1):
        trace.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            start = x
            while x < len(old) and x - diagonal < len(new) and old[x] == new[x - diagonal]:
                x += 1
            effort.steps -= x - start + 1
            reach[diagonal] = x
            if x >= len(old) and x - diagonal >= len(new):
                return _walked_back(old, new, trace)
        if effort.steps < 0:
            return None
    return None


def _walked_back(old: Sequence[str], new: Sequence[str], trace: Sequence[dict[int, int]]) -> list[_Line]:
    x, y = len(old), len(new)
    found: list[_Line] = []
    for edits in range(len(trace) - 1, -1, -1):
        reach = trace[edits]
        diagonal = x - y
        down = diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
        last = diagonal + 1 if down else diagonal - 1
        from_x = reach[last] if edits else 0
        from_y = from_x - last if edits else 0
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            found.append(_Line(" ", old[x]))
        if edits:
            if down:
                y -= 1
                found.append(_Line("+", new[y]))
            else:
                x -= 1
                found.append(_Line("-", old[x]))
    found.reverse()
    return found
