"""Watches the services during attacks: whether one ended, and how much memory each uses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, Self

from penstock.client.connection import Penstock
from penstock.client.errors import PenstockError
from penstock.client.operations import ServiceStatus
from penstock.client.transport.endpoints import SERVICES, ServiceName
from penstock.redteam.judging import Seen

_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 60.0
"""Seconds that a service may be silent after an attack before it counts as ended."""
_SAME_START_S: Final = 5.0
"""Tolerance: two readings of one start time differ by the duration of the answers."""


class Watch:
    """Watches the services while entered. Belongs to one event loop.

    It looks at them before and after each block, and meanwhile only in blocks whose growth of memory counts: a restart
    shows afterwards too.
    """

    def __init__(self, ps: Penstock) -> None:
        self._ps = ps
        self._names: list[ServiceName] = []
        self._task: asyncio.Task[None] | None = None
        self._now: dict[str, ServiceStatus] = {}
        self._started: dict[str, float] = {}
        self._ended: dict[str, int] = {}
        self._peaks: list[dict[str, int]] = []
        """Of the blocks whose growth counts."""
        self._is_polling = asyncio.Event()

    async def __aenter__(self) -> Self:
        names: list[ServiceName] = [name for name in SERVICES if self._ps.endpoints.address(name)]
        # One that does not answer now is down, or too old to report its status: it cannot be checked.
        self._names = [name for name in names if await self._look(name)]
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def during(self, seen: Seen, *, growth: bool) -> AsyncIterator[None]:
        """Records in `seen` what happened to the services during the block, and with `growth` how far they grew, which
        is exact for one block at a time.
        """
        await self._look_at_all()
        before = {name: status.resident_bytes for name, status in self._now.items()}
        ended, peaks = dict(self._ended), dict(before)
        if growth:
            self._peaks.append(peaks)
            self._is_polling.set()
        try:
            yield
            silent = [name for name in self._names if not await self._answers(name)]
        finally:
            self._peaks = [other for other in self._peaks if other is not peaks]
            if not self._peaks:
                self._is_polling.clear()
        if growth:
            seen.growth = {name: peaks[name] - before[name] for name in before}
        again = [name for name, count in self._ended.items() if count > ended.get(name, 0)]
        seen.restarted = sorted({*again, *silent})

    async def _run(self) -> None:
        while True:
            await self._is_polling.wait()
            await asyncio.sleep(_EVERY_S)
            await self._look_at_all()

    async def _look_at_all(self) -> None:
        await asyncio.gather(*map(self._look, self._names))

    async def _answers(self, name: ServiceName) -> bool:
        for _ in range(int(_PATIENCE_S / _EVERY_S)):
            if await self._look(name):
                return True
            await asyncio.sleep(_EVERY_S)
        return False

    async def _look(self, name: ServiceName) -> bool:
        """Whether the service reports its status."""
        try:
            status = await self._ps.operations.status(name)
        except PenstockError:
            return False
        started = asyncio.get_running_loop().time() - status.up
        if name in self._started and started > self._started[name] + _SAME_START_S:
            self._ended[name] = self._ended.get(name, 0) + 1
        self._started[name], self._now[name] = started, status
        for peaks in self._peaks:
            peaks[name] = max(peaks.get(name, 0), status.resident_bytes)
        return True
