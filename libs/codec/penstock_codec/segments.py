"""Text to ids, each stretch of it once: what many prompts share is tokenised by the first.

A text is cut where a cut changes nothing: before a special token, which no merge crosses, and behind the end of a line
where the tokenizer's own pre-tokenizer always ends a piece. The ids of each stretch are kept, and those of a long block
between two special tokens in one piece too, the least used going first. So the system prompt and tools of a group of
rollouts cost their tokenising once, and a line in it that changes (a date, a directory) costs that line.

Invariant: the ids are those of the whole text at once (`tests/unit/codec/test_segments.py` compares).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

IntArray = NDArray[np.int32]

SHORTEST: Final = 256
"""Characters below which a text is tokenised as it is: it costs no more than looking it up."""

KEPT_BYTES: Final = 64 << 20
"""Of text and ids for each codec."""

_ALONE: Final = 8 << 10
"""Characters of unknown text from which on one thread works and others wait for what it finds."""

LONG_BLOCK: Final = 4 << 10
"""Characters from which on what stands between two special tokens is also kept in one piece."""

_OVERHEAD: Final = 256
# The end of a line before one that starts with no space. The slash is out: some vocabularies (o200k's kind) take one
# along behind a line's end.
_LINE_END: Final = re.compile(r"\n(?=[^\s/])")
# Lines that end as sentences and code do end a stretch, and long ones that end in no space: a stretch depends on its
# own text, so that a change of another line leaves it as it is.
_CUT_BEHIND: Final = frozenset(".:;,}>)]")
_LONG_LINE: Final = 256
# What may stand on both sides of a cut, by the classes that pre-tokenizers tell apart.
_BEFORE: Final = (".", ":", "}", "a.", "1.", " .", "a", "7", '"', "'", "a'", "*", "-", "é", "字", "/", "a/", "\u0301")
_AFTER: Final = ("a", "Z", "7", "77", ".", ",", "{", '"', "'", "'s", "(", "*", "-", "é", "字", "<", "#", "|", "\u0301")
_NORMALIZERS: Final = ("NoneType", "NFC")


class Segments:
    """Tokenises for one codec. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        *,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`encode` maps texts to ids without adding any; it raises for what is no text."""
        specials = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        self._by_line = _splits_at_lines(tokenizer)
        self._encode = encode
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, IntArray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._working = Lock()

    def encode(self, text: str) -> IntArray:
        """The ids of a text, as int32. CPU work. Raises what `encode` raises."""
        if len(text) < SHORTEST:
            return np.asarray(self._encode([text])[0], dtype=np.int32)
        pieces: list[str] = []
        whole: list[tuple[str, int, int]] = []  # long blocks that are new, and which of the pieces they are
        found: dict[str, IntArray] = {}
        for block in self._blocks(text):
            long = self._by_line and len(block) >= LONG_BLOCK
            if long and (known := self._find([block])):
                found |= known
            if block in found or not self._by_line:
                pieces.append(block)
                continue
            start = len(pieces)
            pieces += _at(block, self._line_ends(block))
            if long:
                whole.append((block, start, len(pieces)))
        found |= self._ids_of([piece for piece in pieces if piece not in found])
        arrays = [found[piece] for piece in pieces]
        self._keep({block: np.concatenate(arrays[start:end]) for block, start, end in whole})
        return np.concatenate(arrays)

    def _ids_of(self, stretches: Sequence[str]) -> dict[str, IntArray]:
        found = self._find(stretches)
        unknown = list(dict.fromkeys(stretch for stretch in stretches if stretch not in found))
        if sum(map(len, unknown)) < _ALONE:
            found |= self._make(unknown)
        elif unknown:
            # Others who want the same (a group starts at once) find it when their turn comes.
            with self._working:
                found |= self._find(unknown)
                found |= self._make([stretch for stretch in unknown if stretch not in found])
        return found

    def _blocks(self, text: str) -> list[str]:
        return [text] if self._special is None else _at(text, [match.start() for match in self._special.finditer(text)])

    def _line_ends(self, text: str) -> list[int]:
        cuts, line = [], 0
        for match in _LINE_END.finditer(text):
            end = match.start()
            last = text[end - 1 : end]
            if last in _CUT_BEHIND or (end - line >= _LONG_LINE and not last.isspace()):
                cuts.append(end + 1)
            line = end + 1
        return cuts

    def _find(self, stretches: Sequence[str]) -> dict[str, IntArray]:
        found: dict[str, IntArray] = {}
        with self._lock:
            for stretch in stretches:
                ids = self._kept.get(stretch)
                if ids is not None:
                    self._kept.move_to_end(stretch)
                    found[stretch] = ids
        return found

    def _make(self, stretches: Sequence[str]) -> dict[str, IntArray]:
        if not stretches:
            return {}
        made = {
            stretch: np.asarray(ids, dtype=np.int32)
            for stretch, ids in zip(stretches, self._encode(stretches), strict=True)
        }
        self._keep(made)
        return made

    def _keep(self, made: Mapping[str, IntArray]) -> None:
        with self._lock:
            for stretch, ids in made.items():
                if stretch not in self._kept:
                    self._kept[stretch] = ids
                    self._bytes += _size(stretch, ids)
            while self._bytes > self._kept_bytes:
                self._bytes -= _size(*self._kept.popitem(last=False))


def _at(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in pieces, none of them empty."""
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)]) if start < end]


def _size(stretch: str, ids: IntArray) -> int:
    return len(stretch) + int(ids.nbytes) + _OVERHEAD


def _splits_at_lines(tokenizer: Tokenizer) -> bool:
    """Whether a piece of this tokenizer always ends where `_LINE_END` cuts: asked of its pre-tokenizer, not assumed."""
    splitter = tokenizer.pre_tokenizer
    if splitter is None or type(tokenizer.normalizer).__name__ not in _NORMALIZERS:
        return False
    pieces = splitter.pre_tokenize_str
    for before in _BEFORE:
        for after in _AFTER:
            first, second = f"x{before}\n", f"{after}y z"
            # Both the pieces' ends and what they are: a piece may look ahead over the cut.
            together = [piece for piece, _ in pieces(first + second)]
            if together != [piece for text in (first, second) for piece, _ in pieces(text)]:
                return False
    # A tokenizer that marks the start of a text marks the start of every stretch.
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    return bool(tokenizer.encode(".\na", add_special_tokens=False).ids[-len(ids) :] == ids)
