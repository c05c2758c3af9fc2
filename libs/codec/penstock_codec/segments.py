"""Text to ids, each stretch of it once: what many prompts share is tokenised by the first.

A text is cut where a cut changes nothing: before a special token, which no merge crosses, and where the tokenizer's own
pre-tokenizer always ends a piece (`words`). The ids of long blocks between two special tokens are kept, the least used
going first: so the system prompt and tools of a group of rollouts cost their tokenising once. The ids of words are kept
too, so that a prompt that nobody has seen costs little where its words were seen.

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

from penstock_codec.words import Words, splits_at_words

IntArray = NDArray[np.int32]

SHORTEST: Final = 256
"""Characters below which a text that is not cut into words is tokenised as it is: to look it up would cost as much."""

LONG_BLOCK: Final = 512
"""Characters from which on what stands between two special tokens is kept in one piece, where words are kept too."""

KEPT_BYTES: Final = 64 << 20
"""Of text and ids for each codec."""

_ALONE: Final = 8 << 10
"""Characters of unknown text from which on one thread works and others wait for what it finds."""

_OVERHEAD: Final = 256


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
        """`special_tokens` are the added tokens that are looked for in the text as it is.

        `encode` maps texts to ids without adding any; it raises for what is no text.
        """
        specials = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        # An added token with a space in it, or one that takes spaces along, would be cut in two.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        whole = added - set(specials) or any(map(str.isspace, "".join(added)))
        self._words = Words(encode) if not whole and splits_at_words(tokenizer) else None
        self._encode = encode
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, IntArray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._working = Lock()

    def encode(self, text: str) -> IntArray:
        """The ids of a text, as int32. CPU work. Raises what `encode` raises."""
        if self._words is None and len(text) < SHORTEST:
            return np.asarray(self._encode([text])[0], dtype=np.int32)
        blocks = self.blocks(text)
        if self._words is None:
            found = self._ids_of(blocks)
            return np.concatenate([found[block] for block in blocks])
        arrays: list[IntArray] = []
        short: list[str] = []
        for block in blocks:
            if len(block) < LONG_BLOCK:
                short.append(block)
                continue
            if short:
                arrays.append(self._words.ids(short))
                short = []
            arrays.append(self._ids_of([block])[block])
        if short:
            arrays.append(self._words.ids(short))
        return np.concatenate(arrays)

    def _ids_of(self, stretches: Sequence[str]) -> dict[str, IntArray]:
        found = self._find(stretches)
        if len(found) == len(stretches):
            return found
        unknown = list(dict.fromkeys(stretch for stretch in stretches if stretch not in found))
        if sum(map(len, unknown)) < _ALONE:
            found |= self._make(unknown)
        elif unknown:
            # Others who want the same (a group starts at once) find it when their turn comes.
            with self._working:
                found |= self._find(unknown)
                found |= self._make([stretch for stretch in unknown if stretch not in found])
        return found

    def blocks(self, text: str) -> list[str]:
        """The text in pieces between which nothing merges, none of them empty but where the text is."""
        if self._special is None:
            return [text]
        cuts = [match.start() for match in self._special.finditer(text)]
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)]) if start < end] or [text]

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
        if self._words is not None:
            made = {stretch: self._words.ids([stretch]) for stretch in stretches}
        else:
            found = self._encode(stretches)
            made = {stretch: np.asarray(ids, dtype=np.int32) for stretch, ids in zip(stretches, found, strict=True)}
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


def _size(stretch: str, ids: IntArray) -> int:
    return len(stretch) + int(ids.nbytes) + _OVERHEAD
