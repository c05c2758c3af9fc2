"""Word-by-word tokenising: known words are looked up, and only new ones are tokenised.

A text is cut where the tokenizer's own pre-tokenizer ends a piece in any context: before a space that something visible
follows, and after a line's end that follows something visible. The pre-tokenizer is probed when a codec is made
(`splits_at_words`), not assumed; one that merges over spaces, or marks the start of a text, is not cut.

Each step runs as one C call for all words: a 63 KB prompt is 10,000 words.

Invariant: the ids are those of the whole text at once (`tests/unit/codec/test_segments.py` compares).
"""

from __future__ import annotations

import re
import string
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock_codec.cache import LONGEST_WORD, Table

IntArray = NDArray[np.int32]

MOST_NEW: Final = 1 << 14
"""New words of one text from which it is tokenised whole: each costs memory of its own while it is tokenised."""

_START: Final = "\0"
"""Marks a word without a space before it. A text that contains it is not cut."""

# A cut is followed only by what no Unicode version classifies as a space or as a combining mark. Among spaces there is
# no cut before a digit: some vocabularies (DeepSeek's) take numbers out first, and the spaces stay together.
_WORD: Final = re.compile(rf" (?=[{_START}!-/:-~]|(?<=\S )[!-~\w])")
# No slash: some vocabularies (o200k's kind) absorb one after a line's end.
_LINE_END: Final = re.compile(r"\n(?<=\S\n)(?=[!-.0-~\w])")
_LINE_BREAK: Final = f"\n {_START}"

# Characters allowed on both sides of a cut, by the classes that pre-tokenizers distinguish.
_VISIBLE: Final = (*"aZ7.:}\"'*-/", "77", "a.", "1.", " .", "a'", "a/", "é", "字", "e\u0301", "\u0301")
_SPACES: Final = ("\n", "\n\n", "\r\n", " \n", "\n ", " ", "  ", "\t", "\t\t", "\xa0", "\u3000")
_ANYWHERE: Final = (*"aZ.({'", "..", "'s", "'ll")
_RIGHT: Final = (*_ANYWHERE, "7", "77", "é", "字", "ß", "Я", "٣", "Ⅷ", "½", "ª", "ʰ", "ǅ")
_NORMALIZERS: Final = ("NoneType", "NFC")


class Words:
    """Tokenises for one codec. Thread-safe."""

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]], known: Table[str, bytes]) -> None:
        """`encode` maps texts to ids without adding any; it raises for an invalid text. `known` caches words."""
        self._encode = encode
        self._known = known

    def ids(self, blocks: Sequence[str]) -> IntArray:
        """Returns the ids of a text given in blocks between which nothing merges. CPU work."""
        text = _START + f" {_START}".join(blocks)
        if text.count(_START) != len(blocks):
            return self._whole(blocks)
        text = _LINE_END.sub(_LINE_BREAK, text)
        words = _WORD.split(text)
        known, places = self._find(words)
        if places:
            new = {words[place] for place in places}
            if len(new) > MOST_NEW:
                return self._whole(blocks)
            made = self._make(new)
            for place in places:
                known[place] = made[words[place]]
        return np.frombuffer(bytearray().join(known), dtype=np.int32)

    def _whole(self, blocks: Sequence[str]) -> IntArray:
        return np.concatenate([np.asarray(ids, dtype=np.int32) for ids in self._encode(blocks)])

    def _find(self, words: Sequence[str]) -> tuple[list[bytes], list[int]]:
        """Returns the ids of words, and the positions of the new ones."""
        known: list[Any] = list(map(self._known.get, words))
        places: list[int] = []
        if None in known:
            at = -1
            for _ in range(known.count(None)):
                at = known.index(None, at + 1)
                places.append(at)
        return known, places

    def _make(self, words: Iterable[str]) -> dict[str, bytes]:
        new = list(words)
        found = self._encode([word[1:] if word[0] == _START else f" {word}" for word in new])
        made = {word: array("i", ids).tobytes() for word, ids in zip(new, found, strict=True)}
        self._known.keep({word: ids for word, ids in made.items() if len(word) <= LONGEST_WORD})
        return made


def splits_at_words(tokenizer: Tokenizer) -> bool:
    """Whether a piece of this tokenizer always ends where `Words` cuts: probed, not assumed."""
    splitter = tokenizer.pre_tokenizer
    if splitter is None or type(tokenizer.normalizer).__name__ not in _NORMALIZERS:
        return False

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in splitter.pre_tokenize_str(text)]

    sides = [
        *product(_VISIBLE, (f" {right}" for right in _RIGHT)),
        *product(_SPACES, (f" {right}" for right in _ANYWHERE)),
        *product(("a", ".", "\n", "  "), (f" {right}" for right in string.punctuation)),
        *product((f"{left}\n" for left in _VISIBLE), _RIGHT),
        *product(("a\n", ".\n", "7\n"), string.punctuation.replace("/", "")),
    ]
    # Both the pieces' ends and their content: a piece may look ahead over the cut.
    parts = [part for left, right in sides for part in (f" x{left}", f"{right}y z")]
    alone = {part: pieces(part) for part in set(parts)}
    if pieces("".join(parts)) != [piece for part in parts for piece in alone[part]]:
        return False
    # A tokenizer that marks the start of a text marks the start of every word.
    ids = tokenizer.encode_batch(["a", ".\na", " a", ". a"], add_special_tokens=False)
    line, second_line, word, second_word = (item.ids for item in ids)
    return second_line[-len(line) :] == line and second_word[-len(word) :] == word
