"""Every cache of the codec. All are bounded and thread-safe, and a miss gives the same result as a hit.

What is cached, its key, and its bounds:

- `Caches.words`: the ids of a word; the word. 65,536 words of at most 64 characters for each codec, 13 MiB.
- `Caches.blocks`: the ids of a text between two special tokens; the text. 64 MiB of texts and ids for each codec.
- `Caches.shapes`: how a shape of continuation is made; roles and counts of the new messages, and settings: templates
  treat all texts alike. 1,024 shapes of at most 64 messages for each codec, 8 MiB.
- `Caches.instructed`: the same after a system prompt; the shape, and a digest of the system prompt, whose text may
  change it. 16,384 pairs for each codec, 6 MiB.
- `TOOLS`: a tool as templates take it, with its JSON text; the tool. 1,024 tools with schemas of at most 16 KiB.
- `ARGUMENT_TYPES`: the types that a schema states; its text. 256 schemas of at most 16 KiB.

Larger values are computed each time. What is made once for a codec and stays (`cached_property`) is not listed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, Final, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")


class Memo:
    """Caches a pure function: a decorator. The least recently used result is evicted first."""

    def __init__(self, entries: int, longest: int = 0, size: Callable[[Any], int] = len) -> None:
        """`longest`: the largest `size` of a first argument whose result is cached; 0 for any."""
        self._entries = entries
        self._longest = longest
        self._size = size
        self._cached: list[Any] = []

    def __call__(self, function: Callable[P, V]) -> Callable[P, V]:
        """Returns the same function, cached. Its arguments are hashable."""
        cached: Callable[P, V] = lru_cache(maxsize=self._entries)(function)  # type: ignore[assignment]
        self._cached.append(cached)
        if not self._longest:
            return cached
        longest, size = self._longest, self._size

        def call(*args: P.args, **kwargs: P.kwargs) -> V:
            return (cached if size(args[0]) <= longest else function)(*args, **kwargs)

        return call

    def clear(self) -> None:
        """Evicts everything."""
        for cached in self._cached:
            cached.cache_clear()

    def __len__(self) -> int:
        return sum(cached.cache_info().currsize for cached in self._cached)


class Table(Generic[K, V]):
    """A table that is emptied when it is full: entries in use are soon back, and a lookup stays one of a dict."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._known: dict[K, V] = {}
        self._lock = Lock()
        self.get: Final = self._known.get
        """Returns a key's value, or None."""

    def __len__(self) -> int:
        return len(self._known)

    def keep(self, made: Mapping[K, V]) -> None:
        """Adds entries."""
        with self._lock:
            if len(self._known) + len(made) > self._entries:
                self._known.clear()
            if len(made) <= self._entries:
                self._known.update(made)

    def clear(self) -> None:
        """Evicts everything."""
        with self._lock:
            self._known.clear()


class Blocks:
    """Ids of texts, bounded in bytes, least recently used evicted first."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._known: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def find(self, texts: Iterable[str]) -> dict[str, NDArray[np.int32]]:
        """Returns the ids of those texts that are cached."""
        found: dict[str, NDArray[np.int32]] = {}
        with self._lock:
            for text in texts:
                ids = self._known.get(text)
                if ids is not None:
                    self._known.move_to_end(text)
                    found[text] = ids
        return found

    def keep(self, made: Mapping[str, NDArray[np.int32]]) -> None:
        """Adds texts and their ids."""
        with self._lock:
            for text, ids in made.items():
                if text not in self._known:
                    self._known[text] = ids
                    self._bytes += _size(text, ids)
            while self._bytes > self._kept_bytes:
                self._bytes -= _size(*self._known.popitem(last=False))

    def clear(self) -> None:
        """Evicts everything."""
        with self._lock:
            self._known.clear()
            self._bytes = 0


def _size(text: str, ids: NDArray[np.int32]) -> int:
    return len(text) + int(ids.nbytes) + 256


MOST_WORDS: Final = 1 << 16
LONGEST_WORD: Final = 64
"""In characters: longer ones are paths, digests, texts without spaces."""
BLOCK_BYTES: Final = 64 << 20
MOST_SHAPES: Final = 1024
MOST_INSTRUCTED: Final = 1 << 14
"""Enough for 400 rollouts at once with a system prompt and forty shapes each."""
LONGEST_SHAPE: Final = 64
"""In new messages."""


class Caches:
    def __init__(self, *, words: int = MOST_WORDS, block_bytes: int = BLOCK_BYTES) -> None:
        self.words: Final[Table[str, bytes]] = Table(words)
        self.blocks: Final = Blocks(block_bytes)
        self.shapes: Final[Table[Any, Any]] = Table(MOST_SHAPES)
        self.instructed: Final[Table[tuple[Any, bytes], Any]] = Table(MOST_INSTRUCTED)


_SCHEMA_CHARS: Final = 16 << 10
TOOLS: Final = Memo(1024, _SCHEMA_CHARS, lambda tool: len(tool.parameters_json_schema))
ARGUMENT_TYPES: Final = Memo(256, _SCHEMA_CHARS)
EVERY: Final = (TOOLS, ARGUMENT_TYPES)
"""Those that all codecs share."""
