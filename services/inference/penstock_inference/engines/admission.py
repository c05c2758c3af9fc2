"""Admission control: requests queue here, outside the engine, so that a pause holds them before a version is assigned.

Belongs to one event loop. First come, first served, except for requests that wait for a policy version. A request that
has to be alone in the engine waits for those before it, and those behind it wait for it: neither starves the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock_chassis.errors import FailedPrecondition, PenstockError, ResourceExhausted
from penstock_inference.domain.generation import GenerateRequest


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in the queue; the answer is whether it may run (False: it was aborted)."""

    request: GenerateRequest
    alone: bool
    answer: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Admits requests while it is open.

    Args:
        limit: how many may run at once.
        max_waiting: how many more may wait.
        version_of: the policy version in force for a request's adapter ("" for the base weights); it may raise.
    """

    def __init__(self, limit: int, max_waiting: int, version_of: Callable[[str], int]) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._version_of = version_of
        self._waiting: list[Place] = []
        self._holds = 0
        self._held_adapters: list[str] = []
        self._idle: list[asyncio.Future[None]] = []
        self._in_engine = 0
        """Those of the running requests that are not at rest."""
        self._one_is_alone = False
        self.running = 0

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def hold(self) -> None:
        """Admit nothing until `release` was called once per call of this."""
        self._holds += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        self.look()

    @contextmanager
    def holding(self, adapter: str) -> Iterator[None]:
        """While the context is open, admit no request with this adapter; others do not wait for them."""
        self._held_adapters.append(adapter)
        try:
            yield
        finally:
            self._held_adapters.remove(adapter)
            self.look()

    def check_version(self, request: GenerateRequest) -> None:
        """Raise what `enter` would, now: another version may come between an admission and its caller's next turn."""
        self._version_fits(request)

    async def enter(self, request: GenerateRequest, *, alone: bool = False) -> bool:
        """Wait for admission; False when aborted meanwhile. An admitted caller must call `leave`.

        Args:
            request: what waits.
            alone: it is admitted when no other request runs in the engine, and none is admitted until it left.

        Raises ResourceExhausted (QUEUE_FULL), FailedPrecondition (POLICY_VERSION_UNAVAILABLE), errors of `version_of`.
        """
        if self.running + len(self._waiting) >= self._limit + self._max_waiting:
            raise ResourceExhausted(
                f"{self.running} requests run and {len(self._waiting)} wait, which is the maximum",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        place = Place(request, alone)
        self._waiting.append(place)
        self.look()
        try:
            return await place.answer
        except asyncio.CancelledError:
            if place.answer.done() and not place.answer.cancelled() and not place.answer.exception():
                if place.answer.result():
                    self.leave()
            elif place in self._waiting:  # a request refused just before is already removed
                self._waiting.remove(place)
                self.look()  # if it had to be alone, others waited for it
            raise

    def rest(self) -> None:
        """Report that an admitted request is no more in the engine. It keeps its place: its caller still reads."""
        self._in_engine -= 1
        self._one_is_alone = self._one_is_alone and self._in_engine > 0
        self.look()

    def leave(self, *, rested: bool = False) -> None:
        """Report the end of an admitted request; `rested` says whether `rest` was called for it."""
        self.running -= 1
        if not self.running:
            self.wake_idle()
        if rested:
            self.look()
        else:
            self.rest()

    def look(self) -> None:
        """Admit requests while there is room, and refuse those whose exact version is not in force.

        Call it when versions change.
        """
        if self._holds or self._one_is_alone:
            return
        kept: list[Place] = []
        for n, place in enumerate(self._waiting):
            if self.running >= self._limit:
                kept += self._waiting[n:]
                break
            if place.answer.done():  # cancelled; `enter` will remove it
                kept.append(place)
                continue
            if place.request.adapter in self._held_adapters:
                kept.append(place)
                continue
            try:
                may_run = self._version_fits(place.request)
            except PenstockError as error:
                place.answer.set_exception(error)
                continue
            if not may_run:
                kept.append(place)
                continue
            if place.alone and self._in_engine:
                kept += self._waiting[n:]
                break
            self.running += 1
            self._in_engine += 1
            place.answer.set_result(True)
            if place.alone:
                self._one_is_alone = True
                kept += self._waiting[n + 1 :]
                break
        self._waiting = kept

    def abort(self, chosen: Callable[[GenerateRequest], bool]) -> int:
        """Abort the waiting requests for which `chosen` is true; return their number."""
        ended = [place for place in self._waiting if chosen(place.request) and not place.answer.done()]
        self._waiting = [place for place in self._waiting if place not in ended]
        for place in ended:
            place.answer.set_result(False)
        self.look()
        return len(ended)

    def fail(self, error: Callable[[], PenstockError]) -> None:
        """Fail all waiting requests, each with its own error."""
        ended = [place for place in self._waiting if not place.answer.done()]
        self._waiting = [place for place in self._waiting if place.answer.done()]
        for place in ended:
            place.answer.set_exception(error())

    async def idle(self) -> None:
        """Wait until nothing runs, or until `wake_idle`."""
        if self.running:
            await self.woken()

    async def woken(self) -> None:
        """Wait until `wake_idle`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        await future

    def wake_idle(self) -> None:
        """End all waits for idleness: those who wait look again."""
        waits, self._idle = self._idle, []
        for future in waits:
            if not future.done():
                future.set_result(None)

    def _version_fits(self, request: GenerateRequest) -> bool:
        version = self._version_of(request.adapter)
        if request.exact_policy_version not in (None, version):
            raise FailedPrecondition(
                f"policy version {request.exact_policy_version} was requested, but {version} is in force",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(version)},
            )
        return request.min_policy_version is None or request.min_policy_version <= version
