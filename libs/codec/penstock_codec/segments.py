"""Tokenises each stretch of text once: text shared by many prompts is tokenised by the first.

A text is cut where a cut changes nothing: before a special token, which no merge crosses, and where the tokenizer's own
pre-tokenizer always ends a piece (`word_cache`). The ids of long blocks between two special tokens are kept in an LRU
cache: the system prompt and tools of a group of rollouts are tokenised once. The ids of words are cached too, so that a
new prompt of known words costs little.

Invariant: the ids are those of the whole text at once (`tests/unit/codec/test_segments.py` compares).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock_codec.cache import Caches
from penstock_codec.word_cache import Words, splits_at_words

IntArray = NDArray[np.int32]

SHORTEST: Final = 256
"""Length below which a text that is not cut into words is not cached: a look-up would cost as much. In characters."""

LONG_BLOCK: Final = 512
"""Characters from which a block between two special tokens is cached whole, where words are cached too."""

_ALONE: Final = 8 << 10
"""Characters of unknown text from which one thread tokenises while the others wait for its result."""


class Segments:
    """Tokenises for one codec. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        caches: Caches,
    ) -> None:
        """`special_tokens` are the added tokens that are searched for in the raw text.

        `encode` maps texts to ids without adding any; it raises for an invalid text.
        """
        specials = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        # An added token with a space in it, or one that absorbs spaces, would be cut in two.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        whole = added - set(specials) or any(map(str.isspace, "".join(added)))
        self._words = Words(encode, caches.words) if not whole and splits_at_words(tokenizer) else None
        self._encode = encode
        self._known = caches.blocks
        self._working = Lock()

    def encode(self, text: str) -> IntArray:
        """Returns the ids of a text, as int32. CPU work. Raises what `encode` raises."""
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
        found = self._known.find(stretches)
        if len(found) == len(stretches):
            return found
        unknown = list(dict.fromkeys(stretch for stretch in stretches if stretch not in found))
        if sum(map(len, unknown)) < _ALONE:
            found |= self._make(unknown)
        elif unknown:
            # Others that want the same (a group starts at once) find it cached when their turn comes.
            with self._working:
                found |= self._known.find(unknown)
                found |= self._make([stretch for stretch in unknown if stretch not in found])
        return found

    def blocks(self, text: str) -> list[str]:
        """Splits the text into pieces between which nothing merges, none of them empty unless the text is."""
        if self._special is None:
            return [text]
        cuts = [match.start() for match in self._special.finditer(text)]
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)]) if start < end] or [text]

    def _make(self, stretches: Sequence[str]) -> dict[str, IntArray]:
        if not stretches:
            return {}
        if self._words is not None:
            made = {stretch: self._words.ids([stretch]) for stretch in stretches}
        else:
            found = self._encode(stretches)
            made = {stretch: np.asarray(ids, dtype=np.int32) for stretch, ids in zip(stretches, found, strict=True)}
        self._known.keep(made)
        return made
