"""Requests in flight at an endpoint, of every engine that calls one: their names, counts, events and aborts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, PenstockError
from penstock_inference.domain.engine_info import EngineStats
from penstock_inference.domain.generation import FinishReason, GenerateEvent, GenerateRequest, Started
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.in_flight import Flight

DELTA_INTERVAL_S = 0.05
"""Minimum interval between deltas of a stream: a message per token would cost more than the token."""

_log = structlog.get_logger("penstock.inference")


def check_fixed_version(request: GenerateRequest, version: int | None) -> None:
    """Check the required version where it is the operator's constant (None: unknown): no other will come.

    Raises FailedPrecondition (POLICY_VERSION_UNAVAILABLE).
    """
    exact, least = request.exact_policy_version, request.min_policy_version
    if exact is None and least is None:
        return
    if version is None or exact not in (None, version) or (least or 0) > version:
        known = "unknown" if version is None else str(version)
        raise FailedPrecondition(
            f"The policy version of the upstream's weights is {known}, and another was requested: set the option "
            "policy_version.",
            reason="POLICY_VERSION_UNAVAILABLE",
            metadata={"policy_version": known},
        )


class Calls:
    """The requests in flight at one endpoint.

    Args:
        failed: is called with every error of a request.
    """

    def __init__(self, failed: Callable[[PenstockError], None]) -> None:
        self._failed = failed
        self._names: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.running: dict[str, tuple[GenerateRequest, Callable[[], bool]]] = {}
        """By request id: a function that aborts it, and is False if it was over or is being aborted."""

    def stats(self, *, waiting: int, slots: int, policy_version: int, paused: bool) -> EngineStats:
        """Returns the engine's statistics, from these and what was counted."""
        counts = self.counts
        return EngineStats(
            running=len(self.running),
            waiting=waiting,
            slots=slots,
            policy_version=policy_version,
            paused=paused,
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            sampled_tokens=counts["sampled"],
            finished=counts["finished"],
            aborted=counts["aborted"],
            failed=counts["failed"],
        )

    @contextmanager
    def named(self, request_id: str) -> Iterator[None]:
        """Reserves the request's name. Raises AlreadyExists (REQUEST_IN_FLIGHT)."""
        if request_id in self._names:
            raise AlreadyExists(f"request {request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        self._names.add(request_id)
        try:
            yield
        finally:
            self._names.discard(request_id)

    def abort(self, chosen: Callable[[GenerateRequest], bool]) -> int:
        """Abort the requests for which `chosen` is true; return their number."""
        return sum(end() for request, end in list(self.running.values()) if chosen(request))

    def failure(self, error: PenstockError) -> None:
        """Count a failed request."""
        self.counts["failed"] += 1
        self._failed(error)

    async def fly(
        self, flight: Flight, follow: Callable[[], Awaitable[None]], end: Callable[[asyncio.Task[None]], bool]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """One request from admission to its end.

        Args:
            flight: the request.
            follow: reads the endpoint's events into it. Cancellation closes the connection.
            end: aborts it, given the task that runs `follow`.
        """
        request = flight.request
        follower = asyncio.create_task(self._follow(flight, follow))
        self.running[request.request_id] = (request, lambda: end(follower))
        try:
            started = False
            while not flight.ended.is_set():
                await flight.moved.wait()
                flight.moved.clear()
                if request.stream and flight.error is None and flight.token_ids:
                    if not started:
                        yield Started(flight.version, flight.cached)
                        started = True
                    for delta in flight.deltas():
                        yield delta
                    with suppress(TimeoutError):
                        async with asyncio.timeout(DELTA_INTERVAL_S):
                            await flight.ended.wait()
            if flight.error is not None:
                self.failure(flight.error)
                raise flight.error
            if request.stream:
                for delta in flight.deltas():
                    yield delta
            self.counts["aborted" if flight.finish is FinishReason.ABORT else "finished"] += 1
            yield flight.done()
        finally:
            follower.cancel()
            await asyncio.wait((follower,))
            del self.running[request.request_id]
            self.counts["prompt"] += request.prompt_token_ids.size - flight.cached
            self.counts["cached"] += flight.cached
            self.counts["sampled"] += len(flight.token_ids)

    @staticmethod
    async def _follow(flight: Flight, follow: Callable[[], Awaitable[None]]) -> None:
        try:
            await follow()
            flight.end()
        except PenstockError as error:
            flight.fail(error)
        except Exception as error:  # noqa: BLE001 - raised to the caller, and logged
            _log.exception("reading a completion failed")
            flight.fail(broken(f"it cannot be read ({type(error).__name__})"))
