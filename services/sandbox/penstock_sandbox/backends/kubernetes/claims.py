"""What the cluster says of this service's claims: one list and one watch for all of them.

Invariants
- A watch goes on at the version of its last event or bookmark. Where that is too old (410), and when it breaks, all
  claims are listed anew, and those that were known before the list began and are not in it are gone.
- Memory is bounded by the claims that are followed: others are not kept.
- An unanswered API server changes nothing that is known; it is asked again, with growing delays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.kubernetes.cluster import ClaimState, Cluster
from penstock_sandbox.backends.kubernetes.errors import Gone

_DELAYS: Final = Delays(0.2, 10.0, jitter=(0.5, 1.0))

_log = structlog.get_logger(__name__)


class Followed:
    """One claim that is followed. ``state`` is None before it is known; ``gone`` once it does not exist any more."""

    def __init__(self) -> None:
        self.state: ClaimState | None = None
        self.gone = False
        self.on_change: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def observe(self, state: ClaimState | None) -> None:
        """The claim is now like this; None: it is gone."""
        if state is None:
            self.gone = True
        else:
            self.state = state
        self._changed.set()
        self.on_change()

    async def change(self, within_s: float) -> None:
        """Waits for a change, at most so long."""
        if not self.gone:
            try:
                async with asyncio.timeout(within_s):
                    await self._changed.wait()
            except TimeoutError:
                return
            self._changed.clear()


class Claims:
    """See the module; `watch` runs as long as the backend does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._followed: dict[str, Followed] = {}

    @contextmanager
    def following(self, name: str) -> Iterator[Followed]:
        """Follows a claim that is about to be made, or is there."""
        followed = self.follow(name)
        try:
            yield followed
        finally:
            self.forget(name)

    def follow(self, name: str) -> Followed:
        """Follows a claim until `forget`; the same one for all who do."""
        return self._followed.setdefault(name, Followed())

    def forget(self, name: str) -> None:
        """Ends that."""
        self._followed.pop(name, None)

    async def watch(self) -> None:
        """Watches until cancelled."""
        backoff = Backoff(_DELAYS)
        version = ""
        while True:
            try:
                version = version or await self._list()
                received = False
                async with aclosing(self._cluster.watch_claims(version)) as events:
                    async for kind, claim, seen in events:
                        version, received = seen, True
                        backoff.reset()
                        if claim is not None:
                            self._observe(claim.name, None if kind == "DELETED" else claim)
                if not received:
                    await backoff.wait()  # something in between may end each watch at once
            except Gone:
                version = ""
                await backoff.wait()
            except PenstockError as error:
                _log.warning("claims are not watched for now", why=error.message)
                version = ""
                await backoff.wait(getattr(error, "retry_after_s", None))

    async def _list(self) -> str:
        before = [name for name, followed in self._followed.items() if followed.state is not None]
        found, version = await self._cluster.claims()
        there = {claim.name: claim for claim in found}
        for name in before:
            self._observe(name, there.get(name))
        for name, claim in there.items():
            if name not in before:
                self._observe(name, claim)
        return version

    def _observe(self, name: str, state: ClaimState | None) -> None:
        followed = self._followed.get(name)
        if followed is not None:
            followed.observe(state)
