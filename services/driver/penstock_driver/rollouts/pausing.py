"""Pauses one rollout, in whatever phase it is.

Invariants: a pause is on disk before anything is held, and is over on disk only after everything goes on again, so
the next process of this driver finds what it has to hold or to let go. One task asks the services, while they have
something to do, so that pauses and resumptions that follow each other closely do not overtake each other; the last one
counts. An agent is never started while its rollout is paused. All pauses of a rollout together have a limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, Protocol

import structlog

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import FailedPrecondition, NotFound, PenstockError, ResourceExhausted
from penstock_driver.domain.pauses import Pause, PauseEnd, PauseLimits
from penstock_driver.domain.rollout import Phase
from penstock_driver.environments.throttle import patiently
from penstock_driver.rollouts.recorder import RolloutRecorder

RELEASE_S: Final = 60.0
"""How long the services are asked to let go what a pause holds, once the agent has ended."""
_DELAYS: Final = Delays(0.2, 5.0)
_log = structlog.get_logger("penstock.driver")


class Held(Protocol):
    """What a pause holds of an attempt with a sandbox. All is idempotent."""

    @property
    def lease_s(self) -> float:
        """How long the sandbox's lease is, from each `hold`, `keep` and `release` on."""

    async def hold(self) -> bool:
        """Hold the calls, and freeze the sandbox; return whether it is frozen."""

    async def keep(self) -> None:
        """Renew the sandbox's lease."""

    async def release(self) -> None:
        """Let everything go on."""


class Pausing:
    """Whether one rollout is paused, also since an earlier process of this driver. `close` it at the rollout's end.

    `released` is called with the rollout's id whenever a pause is over.
    """

    __slots__ = (
        "_changed",
        "_closed",
        "_context",
        "_ending",
        "_following",
        "_held_s",
        "_held_since",
        "_is_held",
        "_is_left",
        "_limits",
        "_lock",
        "_may_hold",
        "_may_run",
        "_recorder",
        "_released",
        "_target",
        "_timer",
    )

    def __init__(self, recorder: RolloutRecorder, limits: PauseLimits, released: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._limits = limits
        self._ending: PauseEnd | None = None
        """Why the present pause ends, as soon as nothing holds the rollout any more."""
        self._target: Held | None = None
        self._following: asyncio.Task[None] | None = None
        self._context: contextvars.Context | None = None
        self._is_held = False
        """Whether the services have said that they hold it."""
        self._may_hold = recorder.pause is not None and recorder.progress.phase is Phase.RUNNING
        """Whether they may hold it, also for an earlier process of this driver."""
        self._may_run = recorder.progress.phase is Phase.RUNNING
        """Whether an agent may run that an earlier process of this driver started, and that no attempt watches yet."""
        self._held_since: float | None = None
        self._held_s = 0.0
        self._lock: asyncio.Lock | None = None  # a rollout that waits in the queue has none
        self._changed = Signal()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._is_left = False
        self._released = released
        if recorder.pause is not None:
            self._set_timer(recorder.pause)

    @property
    def _starting(self) -> asyncio.Lock:
        """Held while an agent is started, and while the services hold it or let it go."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    @property
    def pause(self) -> Pause | None:
        """The present pause, until nothing is held any more."""
        return self._recorder.pause

    @property
    def is_closed(self) -> bool:
        """Whether the rollout has ended."""
        return self._closed

    @property
    def is_wanted(self) -> bool:
        """Whether the rollout is to be held."""
        return self.pause is not None and self._ending is None

    def held_s(self) -> float:
        """For how many seconds altogether time limits stood still, since this process has the rollout."""
        now = asyncio.get_running_loop().time()
        return self._held_s + (0.0 if self._held_since is None else now - self._held_since)

    # Requests ---------------------------------------------------------------------------------------------------------

    def begin(self, reason: str, duration_s: float | None) -> None:
        """Pause, for at most `duration_s` (None: as long as is allowed). Raises ResourceExhausted (PAUSE_LIMIT)."""
        now, recorder = time.time(), self._recorder
        before = self.pause
        used = recorder.paused_s + (0.0 if before is None else now - before.start_time)
        left = self._limits.most_s - used
        if before is None and (left <= 0 or recorder.pauses >= self._limits.most):
            raise ResourceExhausted(
                f"the rollout has been paused {recorder.pauses} times, for {recorder.paused_s:.0f} s: the operator "
                f"allows {self._limits.most} pauses of {self._limits.most_s:g} s together (max_pause_s); resume it, or "
                "cancel it",
                reason="PAUSE_LIMIT",
            )
        end = now + max(0.0, left if duration_s is None else min(duration_s, left))
        self._ending = None
        if before is None:
            pause = Pause(reason, now, end)
            recorder.begin_pause(pause)
        else:
            pause = replace(before, reason=reason, end_time=end)
            recorder.set_pause(pause)
        self._set_timer(pause)
        self._look()
        self._changed.notify()

    def end(self, why: PauseEnd = PauseEnd.RESUMED) -> None:
        """End the pause, if there is one: as soon as the services that hold the rollout let it go."""
        if self.pause is None or self._closed:
            return
        self._ending = self._ending or why
        if not self._may_hold:
            self._over()
        self._changed.notify()

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the services hold the rollout, or nothing does, as was last asked; False if they do not yet."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not (self._closed or self._is_left or self._is_settled):
            if not await self._changed.wait(self._changed.number, max(0.0, until - loop.time())):
                return False
        return True

    @property
    def _is_settled(self) -> bool:
        if self.is_wanted:
            return self._is_held or (self._target is None and not self._may_run)
        return not self._may_hold

    def close(self) -> None:
        """The rollout has ended: nothing is paused any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._changed.notify()

    def leave(self) -> None:
        """The next process of this driver goes on with the rollout: what is on disk of its pause stays as it is."""
        self._is_left = True
        if self._timer is not None:
            self._timer.cancel()
        self._changed.notify()

    # Of the attempt ---------------------------------------------------------------------------------------------------

    async def passed(self) -> None:
        """Wait until the rollout is not paused."""
        while self.pause is not None:
            await self._changed.wait(self._changed.number)

    async def start(self, start: Callable[[], Awaitable[None]]) -> None:
        """Run `start` once the rollout is not paused, and let no pause hold the sandbox meanwhile."""
        while True:
            await self.passed()
            async with self._starting:
                if self.pause is None:
                    return await start()

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Let no pause, and no end of one, change the sandbox inside the block."""
        async with self._starting:
            yield

    @asynccontextmanager
    async def holding(self, target: Held) -> AsyncIterator[None]:
        """A pause holds `target` inside the block. After it, if nothing was raised, nothing holds it."""
        self._target, self._context, self._may_run = target, contextvars.copy_context(), False
        self._look()
        try:
            yield
            await self._stop()
            if self._may_hold:
                with suppress(PenstockError):  # the next step finds out what is wrong with it
                    await patiently(target.release, full_s=RELEASE_S, absent_s=RELEASE_S)
        finally:
            await self._stop()
            self.attempt_over()

    def attempt_over(self) -> None:
        """Records that the attempt is over: none of its calls can be paused any more."""
        self._target, self._is_held, self._may_hold, self._may_run = None, False, False, False
        self._count_held(is_held=False)
        if self._is_left:
            return
        if self._ending is not None:
            self._over()
        elif self.pause is not None and self.pause.sandbox_frozen and not self._closed:
            self._recorder.set_pause(replace(self.pause, sandbox_frozen=False))
        self._changed.notify()

    # Private ----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin to follow, if the services have something to do, in the attempt's context."""
        if self._target is None or not (self.is_wanted or self._may_hold):
            return
        if self._following is not None and not self._following.done():
            return
        work = self._follow(self._target)
        self._following = asyncio.get_running_loop().create_task(work, context=self._context)

    async def _stop(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled():
                following.result()

    async def _follow(self, target: Held) -> None:
        """Make the services hold `target` until the pause is over."""
        backoff, rollout_id = Backoff(_DELAYS), self._recorder.record.rollout_id
        while self._may_hold or self.is_wanted:
            try:
                async with self._starting:
                    if self._is_held and self.is_wanted:
                        await target.keep()
                    else:
                        await self._switch(target)
                backoff.reset()
                await self._while_held(target.lease_s / 3)
            except (NotFound, FailedPrecondition) as error:
                # Its sandbox or its place at the gate is gone: what watches the agent reports that.
                _log.info("nothing of a paused rollout is left to hold", rollout_id=rollout_id, reason=error.reason)
                self._is_held = self._may_hold = self.is_wanted
                self._settle()
                await self._while_held(None)
            except PenstockError as error:
                _log.warning("a pause, or its end, is not in force yet", rollout_id=rollout_id, error=repr(error))
                await backoff.wait()

    async def _switch(self, target: Held) -> None:
        if self.is_wanted:
            await self._recorder.secure()
            if self._ending is not None or self.pause is None:
                return  # resumed meanwhile
            self._may_hold = True
            self._count_held(is_held=True)
            is_frozen = await target.hold()
            self._is_held = True
            if self.pause.sandbox_frozen != is_frozen:
                self._recorder.set_pause(replace(self.pause, sandbox_frozen=is_frozen))
        elif self._may_hold:
            self._is_held = False
            await target.release()
            self._may_hold = False
            self._count_held(is_held=False)
        self._settle()

    def _settle(self) -> None:
        if self._ending is not None and not self._may_hold:
            self._over()
        self._changed.notify()

    async def _while_held(self, timeout_s: float | None) -> None:
        """Wait as long as it is held and shall be, at most for `timeout_s`."""
        while self._is_held and self.is_wanted:
            if not await self._changed.wait(self._changed.number, timeout_s):
                return

    def _count_held(self, *, is_held: bool) -> None:
        now = asyncio.get_running_loop().time()
        if is_held and self._held_since is None:
            self._held_since = now
        elif not is_held and self._held_since is not None:
            self._held_s += now - self._held_since
            self._held_since = None

    def _over(self) -> None:
        """Record that the pause is over."""
        why, self._ending = self._ending, None
        if self.pause is None or why is None:
            return
        self._recorder.end_pause(why)
        if self._timer is not None:
            self._timer.cancel()
        self._released(self._recorder.record.rollout_id)

    def _set_timer(self, pause: Pause) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = max(0.0, pause.end_time - time.time())
        self._timer = asyncio.get_running_loop().call_later(left_s, self.end, PauseEnd.EXPIRED)
