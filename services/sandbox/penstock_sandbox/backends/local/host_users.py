"""The host users that sandboxes run as."""

from __future__ import annotations

from collections import Counter

from penstock_chassis.errors import ResourceExhausted


class UserPool:
    """The host users ``first`` to ``first + count - 1``; none if ``first`` is None: an ordinary user uses only itself.

    No two unrelated sandboxes share a user. Sandboxes from one snapshot share its user, because it owns the snapshot's
    files; a user is free again after its last release.
    """

    def __init__(self, first: int | None, count: int) -> None:
        self._first = first
        self._count = count
        self._holders: Counter[int] = Counter()
        self._next = 0

    def acquire(self) -> int | None:
        """Returns an unused user. Raises ResourceExhausted if all are in use."""
        if self._first is None:
            return None
        for step in range(self._count):
            candidate = self._first + (self._next + step) % self._count
            if not self._holders[candidate]:
                self._next = (candidate - self._first + 1) % self._count
                self._holders[candidate] = 1
                return candidate
        raise ResourceExhausted(
            "all sandbox users of this machine are in use", reason="SANDBOX_LIMIT", retry_after_s=1.0
        )

    def share(self, uid: int | None) -> None:
        """Adds a reference to a user that may have others."""
        if uid is not None:
            self._holders[uid] += 1

    def release(self, uid: int | None) -> None:
        """Drops one reference."""
        if uid is not None:
            self._holders[uid] -= 1
