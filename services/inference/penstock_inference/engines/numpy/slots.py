"""Slots of the KV cache and their cached prefixes.

A slot belongs to one running sequence or to none. Either way its tokens stay usable as a prefix for later requests,
until another sequence takes the slot. A prefix may be reused only under the policy version that computed all of it.
Invariant: `written` tokens of row `ids` have keys and values in the cache; `planned` >= `written` is how far a prefill
in progress will get.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_inference.engines.numpy.decoder import KVCache

WORTH_WAITING_TOKENS = 16
"""A request waits for a prefill in progress that will hold at least this many more of its tokens than any slot."""

_MIXED = -1
_EMPTY = -2


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence's slot, whose first `reused` tokens are in place."""

    slot: int
    reused: int


class Slots:
    """Bookkeeping for all slots of one `KVCache`."""

    def __init__(self, cache: KVCache, count: int, max_tokens: int) -> None:
        self._cache = cache
        self.ids: NDArray[np.int32] = np.full((count, max_tokens), -1, np.int32)
        self.written: NDArray[np.int64] = np.zeros(count, np.int64)
        self._planned: NDArray[np.int64] = np.zeros(count, np.int64)
        self._version: NDArray[np.int64] = np.full(count, _EMPTY, np.int64)
        self._busy: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._last_used: NDArray[np.int64] = np.zeros(count, np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        """Number of slots without a sequence."""
        return int((~self._busy).sum())

    def use(self) -> float:
        """Share of the cache that running sequences have written, 0 to 1."""
        return float(self.written[self._busy].sum()) / self.ids.size

    def place(self, prompt: NDArray[np.int32], version: int, reuse: bool = True) -> Placement | None:
        """Take a slot for a prompt, with the longest known prefix in it; None when it is better to wait.

        Always leaves the prompt's last token to compute, whose logits are needed. Some slot must be free.
        """
        reused, donor = 0, -1
        if reuse and prompt.size > 1:
            usable = prompt.size - 1
            differs = self.ids[:, :usable] != prompt[:usable]
            common = np.where(differs.any(axis=1), differs.argmax(axis=1), usable)
            common[self._version != version] = 0
            ready = np.minimum(common, self.written)
            donor = int(ready.argmax())
            reused = int(ready[donor])
            if int(np.minimum(common, self._planned).max()) - reused >= WORTH_WAITING_TOKENS:
                return None
        if reused and not self._busy[donor] and reused == self.written[donor]:
            slot = donor
        else:
            # The least recently used; among never used ones the lowest, which keeps busy slots adjacent.
            slot = int(np.where(self._busy, np.iinfo(np.int64).max, self._last_used).argmin())
            if reused and slot != donor:
                self._cache.copy_prefix(donor, slot, reused)
        self._busy[slot] = True
        self._version[slot] = version
        self.written[slot] = reused
        self._planned[slot] = prompt.size
        self.ids[slot, : prompt.size] = prompt
        self.ids[slot, prompt.size :] = -1
        return Placement(slot, reused)

    def release(self, slot: int) -> None:
        """End a sequence; its tokens stay as a prefix."""
        self._clock += 1
        self._busy[slot] = False
        self._planned[slot] = self.written[slot]
        self._last_used[slot] = self._clock

    def discard(self, slot: int) -> None:
        """Release a slot whose numbers must not be used again."""
        self._cache.clear(slot)
        self.release(slot)
        self._version[slot] = _EMPTY
        self.written[slot] = self._planned[slot] = self._last_used[slot] = 0

    def restart(self, slot: int, version: int) -> None:
        """Compute a busy slot's prompt again from its first token."""
        self._version[slot] = version
        self.written[slot] = 0

    def weights_changed(self) -> None:
        """Exclude all computed prefixes from reuse; running sequences keep theirs, now of mixed origin."""
        self._version[self._busy] = _MIXED
        self._version[~self._busy] = _EMPTY
        self._last_used[~self._busy] = 0
