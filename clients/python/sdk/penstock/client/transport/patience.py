"""How long a broken watch or a long poll is repeated."""

import asyncio
from typing import Final

from penstock.client.errors import PenstockError
from penstock.client.transport.rpc import Backoff

LONG_POLL_S: Final = 30.0
"""Seconds of one long poll."""
_PATIENCE_S: Final = 60.0


class Patience:
    """Retry policy of a broken watch: retries for a minute from the first failure after the service's last answer.

    The caller's own time between two messages does not count.
    """

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._early = Backoff()
        self._broke: float | None = None

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
        now = asyncio.get_running_loop().time()
        if self._broke is None:
            self._broke = now
        if now - self._broke > _PATIENCE_S:
            raise error
        await asyncio.sleep(self._backoff.next(error))
