"""Computes the difference of two texts as unified hunks, at a bounded cost for any texts.

`difflib` finds the matches. Invariant: all comparing is charged to `Effort`. Once that is exhausted, what is not yet
matched is reported as removed and added, which is a correct but longer difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import Final

CONTEXT: Final = 3
"""Equal lines shown around each change."""
_NO_NEWLINE: Final = "\\ No newline at end of file\n"


@dataclass(slots=True)
class Effort:
    """Remaining number of steps, shared by several texts: lines looked at, and pairs of equal lines."""

    steps: int = 4_000_000


class _Matcher(SequenceMatcher[str]):
    """Matches the ends of a range first, which is linear; between them difflib searches while there is effort."""

    a: Sequence[str]
    b: Sequence[str]
    b2j: dict[str, list[int]]

    def __init__(self, old: Sequence[str], new: Sequence[str], effort: Effort) -> None:
        counts = Counter(new)
        # Lines that are frequent in a long text start no match if there would be too many pairs of them to look at.
        super().__init__(None, old, new, autojunk=sum(counts[line] for line in old) > effort.steps // 4)
        self._effort = effort

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        ahi = len(self.a) if ahi is None else ahi
        bhi = len(self.b) if bhi is None else bhi
        shared = min(ahi - alo, bhi - blo)
        head = 0
        while head < shared and self.a[alo + head] == self.b[blo + head]:
            head += 1
        if head:
            return Match(alo, blo, head)
        tail = 0
        while tail < shared and self.a[ahi - 1 - tail] == self.b[bhi - 1 - tail]:
            tail += 1
        if tail:
            return Match(ahi - tail, bhi - tail, tail)
        if self._effort.steps:
            # What difflib's search costs at most: each line, and its equals in all of the other text.
            cost = sum(1 + len(self.b2j.get(line, ())) for line in self.a[alo:ahi])
            left, self._effort.steps = self._effort.steps, max(0, self._effort.steps - cost)
            if cost <= left:
                return super().find_longest_match(alo, ahi, blo, bhi)
        return Match(alo, blo, 0)


def hunks(before: str, after: str, effort: Effort) -> Iterator[str]:
    """The lines of the hunks, each with its line feed; nothing for equal texts."""
    old, new = _lines(before), _lines(after)
    for group in _Matcher(old, new, effort).get_grouped_opcodes(CONTEXT):
        (_, old_start, _, new_start, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        yield f"@@ -{_range(old_start, old_end)} +{_range(new_start, new_end)} @@\n"
        for kind, i, j, k, m in group:
            if kind == "equal":
                yield from _signed(" ", old[i:j])
            else:
                yield from _signed("-", old[i:j])
                yield from _signed("+", new[k:m])


def _lines(text: str) -> list[str]:
    """Split at line feeds only: a form feed or U+2028 is part of its line."""
    parts = text.split("\n")
    last = parts.pop()
    return [f"{part}\n" for part in parts] + ([last] if last else [])


def _range(start: int, end: int) -> str:
    """POSIX: a side without lines is numbered by the line before it."""
    return f"{start + (end > start)},{end - start}"


def _signed(sign: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n"
        if not line.endswith("\n"):
            yield _NO_NEWLINE
