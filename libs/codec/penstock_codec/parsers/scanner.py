"""Finds markup by text, for vocabularies without a token for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markup:
    """A piece of markup in the stream, as opposed to text."""

    text: str


class MarkupTexts:
    """The markup to search for, compiled once for all completions of a model."""

    __slots__ = ("all", "firsts", "found", "longest")

    def __init__(self, markup: Iterable[str]) -> None:
        self.all = sorted(markup, key=len, reverse=True)
        self.found = re.compile("|".join(map(re.escape, self.all)))
        self.longest = len(self.all[0]) if self.all else 0
        self.firsts = frozenset(text[0] for text in self.all)


class MarkupScanner:
    """Splits streamed text into markup and text; holds back text that may yet become markup."""

    __slots__ = ("_held", "_texts")

    def __init__(self, texts: MarkupTexts) -> None:
        self._texts = texts
        self._held = ""

    def push(self, text: str) -> Iterator[Markup | str]:
        """Yields what is certain after the next piece."""
        if not self._texts.all:
            if text:
                yield text
            return
        text = self._held + text
        at = 0
        for match in self._texts.found.finditer(text):
            if match.start() > at:
                yield text[at : match.start()]
            yield Markup(match.group())
            at = match.end()
        held = self._may_begin(text, at)
        if held > at:
            yield text[at:held]
        self._held = text[held:]

    def flush(self) -> Iterator[str]:
        """Yields the text that was held back."""
        held, self._held = self._held, ""
        if held:
            yield held

    def _may_begin(self, text: str, start: int) -> int:
        """Returns where a trailing beginning of markup may start."""
        texts = self._texts
        for at in range(max(start, len(text) - texts.longest + 1), len(text)):
            if text[at] in texts.firsts and any(item.startswith(text[at:]) for item in texts.all):
                return at
        return len(text)
