"""Groups: handles stragglers and spare rollouts.

A rollout is a result when it has a reward or, without a verifier, completed. Invariants: once `size` results exist, the
remaining rollouts are cancelled; once `quorum` results exist, the others are cancelled after the grace period, if one
was set. A group cancels nothing for any other reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock_driver.domain.rollout import Cause, Failure, Phase


class Verdict(Enum):
    """What to do with the running rollouts of a group."""

    WAIT = auto()
    CANCEL_AFTER_GRACE = auto()
    CANCEL_REST = auto()


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`size` results are wanted; the group is complete with `quorum` of them. `grace_s` None waits for stragglers."""

    size: int
    quorum: int
    grace_s: float | None = None

    def verdict(self, results: int) -> Verdict:
        """What to do with the remaining rollouts after `results` results."""
        if results >= self.size:
            return Verdict.CANCEL_REST
        if results >= self.quorum and self.grace_s is not None:
            return Verdict.CANCEL_AFTER_GRACE
        return Verdict.WAIT


COMPLETE = Failure(Cause.CANCELLED, "GROUP_COMPLETE", "the group has its results", False, Phase.QUEUED)
STRAGGLER = Failure(Cause.CANCELLED, "STRAGGLER", "the group has its quorum and the grace is over", False, Phase.QUEUED)


@dataclass(slots=True)
class GroupWatch:
    """Applies a policy to the running rollouts of one group; `run()` returns when all have ended."""

    policy: GroupPolicy
    running: Callable[[], Collection[str]]
    cancel: Callable[[Collection[str], Failure], Awaitable[None]]
    is_paused: Callable[[], bool] = lambda: False
    """Whether a running rollout of the group is paused: the grace does not run then."""
    results: int = 0
    quorum_ago_s: float = 0.0
    """Of a group that an earlier process of the driver started: how long ago it had its quorum, in seconds."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, *, is_result: bool) -> None:
        """Count the end of a rollout of the group."""
        self.results += is_result
        self._changed.set()

    def paused_or_resumed(self) -> None:
        """Look again whether a rollout is paused."""
        self._changed.set()

    async def run(self) -> None:
        """Wait for rollouts to end and apply the policy."""
        left_s: float | None = None  # of the grace
        loop = asyncio.get_running_loop()
        while self.running():
            verdict = self.policy.verdict(self.results)
            if verdict is Verdict.CANCEL_REST:
                await self.cancel(self.running(), COMPLETE)
                return
            if verdict is Verdict.CANCEL_AFTER_GRACE and left_s is None:
                assert self.policy.grace_s is not None
                left_s = self.policy.grace_s - self.quorum_ago_s
            stands_still, begin = self.is_paused(), loop.time()
            try:
                async with asyncio.timeout(None if left_s is None or stands_still else max(0.0, left_s)):
                    await self._changed.wait()
                    self._changed.clear()
            except TimeoutError:
                await self.cancel(self.running(), STRAGGLER)
                return
            if left_s is not None and not stands_still:
                left_s -= loop.time() - begin
