"""How long a broken watch or a long poll is repeated."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.client.errors import NotFound, PenstockError
from penstock.client.transport.rpc import Backoff

LONG_POLL_S: Final = 30.0
"""Seconds of one long poll."""
_PATIENCE_S: Final = 60.0
_UNKNOWN: Final = ("ROLLOUT_UNKNOWN", "GROUP_UNKNOWN")


class Patience:
    """Retry policy of a broken watch: retries for a minute from the first failure after the service's last answer.

    The caller's own time between two messages does not count.
    """

    def __init__(self, follow: Callable[[], Awaitable[None]] | None = None) -> None:
        """`follow` is awaited before each further attempt: the service may be at another address by now."""
        self._follow = follow
        self._backoff = Backoff()
        self._early = Backoff()
        self._broke: float | None = None
        self._was_away = False

    def sign(self) -> None:
        """Records that the service answered."""
        self._backoff.reset()
        self._broke = None

    async def ask_again(self, asked: float) -> None:
        """Waits before repeating the long poll sent at time `asked`: not at all if the service held it as long as it
        should, and longer each time if it answers at once."""
        if asyncio.get_running_loop().time() - asked > LONG_POLL_S / 2:
            self._early.reset()
        else:
            await asyncio.sleep(self._early.next())

    async def pause(self, error: PenstockError) -> None:
        """Waits before the next attempt; raises `error` when the limit is reached."""
        self._was_away = True
        now = asyncio.get_running_loop().time()
        if self._broke is None:
            self._broke = now
        if now - self._broke > _PATIENCE_S:
            raise error
        await asyncio.sleep(self._backoff.next(error))
        if self._follow is not None:
            await self._follow()

    def explained(self, error: PenstockError) -> PenstockError:
        """Returns HOME_LOST instead of an error by which a driver that was away does not know what it had before.

        Running rollouts are never deleted, so its state is gone: its disk is a new one.
        """
        if not (self._was_away and error.reason in _UNKNOWN):
            return error
        return NotFound(
            f"{error.message}, which it had before it was away: its state is lost. Create it again",
            reason="HOME_LOST",
            metadata=error.metadata,
        )
