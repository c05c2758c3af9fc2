"""Freezes a local sandbox: paused by its caller, or while its files are copied.

Invariants
- Freezes and thaws are serialized. A paused sandbox stays so, except while its helper handles a request.
- The helper is frozen with the rest, so a freeze waits until it has answered requests that must not be interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.host.cgroups import Group
from penstock_sandbox.domain.errno import sandbox_lost

_FREEZE_DEADLINE_S = 10.0
_FREEZE_POLL_S = 0.001

T = TypeVar("T")


class Freezing:
    """The freezer of one sandbox: ``group`` is its control group, ``ended`` returns whether it is gone."""

    def __init__(self, group: Group | None, ended: Callable[[], bool]) -> None:
        self._group = group
        self._ended = ended
        self._paused = False
        self._changing = asyncio.Lock()
        """Held while freezing or thawing, and while an uninterruptible request is sent to the helper."""
        self._unanswered = 0
        self._answered = asyncio.Event()
        """Set when the last of those is answered; a waiter clears it."""

    async def pause(self) -> None:
        """Freezes it. Raises FailedPrecondition (CAPABILITY_MISSING), Unavailable (PAUSE_FAILED)."""
        async with self._changing:
            await self._freeze()
            self._paused = True

    async def resume(self) -> None:
        """Thaws it. Raises FailedPrecondition (CAPABILITY_MISSING)."""
        async with self._changing:
            self._paused = False
            self._freezer().thaw()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Keeps the sandbox frozen inside the context. Raises as ``pause`` does."""
        async with self._changing:
            if self._paused:
                yield
                return
            await self._freeze()
            try:
                yield
            finally:
                self._freezer().thaw()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Keeps the helper running inside the context; a paused sandbox runs for that long."""
        async with self._changing:
            if not self._paused:
                yield
                return
            self._freezer().thaw()
            try:
                yield
            finally:
                if not self._ended():
                    # Not awaited: the kernel finishes it even if this caller is cancelled.
                    self._freezer().freeze()

    async def uncut(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Returns the helper's reply to a request that no freeze may interrupt; several may run at once."""
        if self._paused or self._changing.locked():
            async with self.awake():
                return await ask()
        self._unanswered += 1
        try:
            return await ask()
        finally:
            self._unanswered -= 1
            if self._unanswered == 0:
                self._answered.set()

    def let_die(self) -> None:
        """Makes the processes of a frozen sandbox die: killing alone would not end them."""
        if (self._paused or self._changing.locked()) and self._group is not None:
            # The kills come first, so that nothing of it runs.
            self._group.kill_and_thaw()

    async def _freeze(self) -> None:
        group = self._freezer()
        while self._unanswered:
            self._answered.clear()
            await self._answered.wait()
        # A concurrent destroy has thawed it for the last time.
        if self._ended():
            raise sandbox_lost("")
        deadline = time.monotonic() + _FREEZE_DEADLINE_S
        group.freeze()
        try:
            while not group.frozen():
                if self._ended():
                    raise sandbox_lost("")
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"the processes did not freeze within {_FREEZE_DEADLINE_S:g} s",
                        reason="PAUSE_FAILED",
                        retry_after_s=1.0,
                    )
                await asyncio.sleep(_FREEZE_POLL_S)
        except BaseException:
            group.thaw()
            raise

    def _freezer(self) -> Group:
        if self._group is None or not self._group.can_freeze:
            raise FailedPrecondition(
                "this machine's control groups have no usable freezer",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "pause"},
            )
        return self._group
