"""Holding a local sandbox still: paused by its caller, or for as long as its files are copied.

Invariants
- One thing at a time freezes or thaws. A paused sandbox stays so, but for the moments in which its door is asked.
- The door is frozen with the rest, so a freeze waits until it has answered what must not be cut in two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.local.cgroups import Group
from penstock_sandbox.backends.refusals import sandbox_lost

_FREEZE_DEADLINE_S = 10.0
_FREEZE_POLL_S = 0.001

T = TypeVar("T")


class Freezing:
    """Of one sandbox: ``group`` is what it runs in, ``ended`` says whether it is gone."""

    def __init__(self, group: Group | None, ended: Callable[[], bool]) -> None:
        self._group = group
        self._ended = ended
        self._paused = False
        self._changing = asyncio.Lock()
        """Held while something freezes or thaws, and while the door is asked for what must not meet a freeze."""
        self._unanswered = 0
        self._answered = asyncio.Event()
        """Set when the last of those is answered; whoever waits for that clears it."""

    async def pause(self) -> None:
        """Stand still from here on. Raises FailedPrecondition (CAPABILITY_MISSING), Unavailable (PAUSE_FAILED)."""
        async with self._changing:
            await self._freeze()
            self._paused = True

    async def resume(self) -> None:
        """Go on. Raises FailedPrecondition (CAPABILITY_MISSING)."""
        async with self._changing:
            self._paused = False
            self._freezer().thaw()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nothing in the sandbox runs in here. Raises as ``pause`` does."""
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
        """The door can be asked in here, also in a paused sandbox, which runs for that long."""
        async with self._changing:
            if not self._paused:
                yield
                return
            self._freezer().thaw()
            try:
                yield
            finally:
                if not self._ended():
                    # Not awaited: the kernel does it all the same, whatever becomes of this caller.
                    self._freezer().freeze()

    async def uncut(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the door answers to what must not meet a freeze half way; several may ask at once."""
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
        """Have everything of a frozen sandbox end: it would not by being killed alone."""
        if (self._paused or self._changing.locked()) and self._group is not None:
            # The kills come first, so that nothing of it runs.
            self._group.kill_and_thaw()

    async def _freeze(self) -> None:
        group = self._freezer()
        while self._unanswered:
            self._answered.clear()
            await self._answered.wait()
        # Who destroyed it meanwhile has thawed it for the last time.
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
                        f"the processes did not stand still within {_FREEZE_DEADLINE_S:g} s",
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
                "there is no usable freezer among this machine's control groups",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "pause"},
            )
        return self._group
