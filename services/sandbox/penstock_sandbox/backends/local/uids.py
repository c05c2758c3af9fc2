"""Host users for sandboxes, when the service is root.

Invariants: no two unrelated sandboxes share a user. Sandboxes that stand on the same snapshot share its user, because
the snapshot's files belong to it; a user is free again when its last holder released it. A service that is an ordinary
user has one user for everything, itself, and hands out None.
"""

from __future__ import annotations

from collections import Counter

from penstock_chassis.errors import ResourceExhausted


class UserPool:
    """Users ``first`` to ``first + count - 1``; no users at all when ``first`` is None."""

    def __init__(self, first: int | None, count: int) -> None:
        self._first = first
        self._count = count
        self._holders: Counter[int] = Counter()
        self._next = 0

    def acquire(self) -> int | None:
        """A user that nobody holds. Raises ResourceExhausted when all are held."""
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
        """Hold a user that others may hold too."""
        if uid is not None:
            self._holders[uid] += 1

    def release(self, uid: int | None) -> None:
        """Give up one hold."""
        if uid is not None:
            self._holders[uid] -= 1
