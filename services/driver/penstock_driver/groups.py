"""Groups: what is done about rollouts that lag behind, and about spares that are not needed.

A rollout is a result when it has a reward or, without a verifier, completed. Invariants: once `size` results are
there, what still runs is not needed and is cancelled; once `quorum` results are there, the others get the grace, if one
was given, and are cancelled after it. Nothing is cancelled for any other reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock_driver.rollouts import Cause, Failure, Phase


class Verdict(Enum):
    """What to do with the rollouts of a group that still run."""

    WAIT = auto()
    CANCEL_AFTER_GRACE = auto()
    CANCEL_REST = auto()


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`size` results are wanted; with `quorum` of them the group is complete; `grace_s` None waits for stragglers."""

    size: int
    quorum: int
    grace_s: float | None = None

    def verdict(self, results: int) -> Verdict:
        """What `results` results mean for the rest."""
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
    results: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, *, is_result: bool) -> None:
        """A rollout of the group has ended."""
        self.results += is_result
        self._changed.set()

    async def run(self) -> None:
        """Wait for ends and act on them."""
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while self.running():
            verdict = self.policy.verdict(self.results)
            if verdict is Verdict.CANCEL_REST:
                await self.cancel(self.running(), COMPLETE)
                return
            if verdict is Verdict.CANCEL_AFTER_GRACE and deadline is None:
                assert self.policy.grace_s is not None
                deadline = loop.time() + self.policy.grace_s
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
                    self._changed.clear()
            except TimeoutError:
                await self.cancel(self.running(), STRAGGLER)
                return
