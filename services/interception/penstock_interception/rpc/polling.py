"""Long-poll leases: unary requests lease calls. A lease expires unless it is answered or extended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call, Selector, SessionRequest
from penstock_interception.interceptor import Interceptor

REQUESTS_KEPT = 4096
CREDIT_BYTES = 12 << 20
"""At most this many bytes of calls, or one larger call, are in a response."""


class PollingLeases:
    """Leases calls to unary requests, and returns the same calls to a repeated request."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        # By selector and request id: equal ids of trainers of different runs are different requests. Ids of calls and
        # leases only: what has ended, and what was deleted, is not kept in memory.
        self._given: OrderedDict[tuple[Selector, str], list[tuple[str, str]]] = OrderedDict()
        self._running: dict[tuple[Selector, str], asyncio.Future[None]] = {}

    async def lease(self, asked: SessionRequest, *, wait_s: float, request_id: str = "") -> list[tuple[Call, str]]:
        """Waits until a call is available and leases as many as the credit allows; none if none comes within `wait_s`.

        Returns each call with the id of its lease. Raises ResourceExhausted SESSION_LIMIT.
        """
        key = (asked.selector, request_id)
        if not request_id:
            return await self._lease(asked, wait_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (running := self._running.get(key)) is not None:
                    await asyncio.wait([running])
        if running is not None:
            return []  # the same request still waits, and gets the calls
        if before := self._still_leased(self._given.get(key, ())):
            return before
        done = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            calls = await self._lease(asked, wait_s)
        finally:
            del self._running[key]
            done.set_result(None)
        if calls:
            self._given[key] = [(call.id, lease_id) for call, lease_id in calls]
            while len(self._given) > REQUESTS_KEPT:
                self._given.popitem(last=False)
        return calls

    async def _lease(self, asked: SessionRequest, wait_s: float) -> list[tuple[Call, str]]:
        session = self._interceptor.join(asked)
        calls: list[Call] = []
        try:
            async with asyncio.timeout(wait_s):
                while not calls:
                    calls = session.drain().calls
                    if not calls:
                        await session.wait()
        except TimeoutError:
            calls = session.drain().calls
        except asyncio.CancelledError:
            self._interceptor.leave(session)
            raise
        self._interceptor.sessions.close_unary(session)
        return [(call, call.lease_id) for call in calls]

    def _still_leased(self, given: Iterable[tuple[str, str]]) -> list[tuple[Call, str]]:
        found = [(self._interceptor.registry.find_call(call_id), lease_id) for call_id, lease_id in given]
        return [
            (call, lease_id)
            for call, lease_id in found
            if call is not None and call.state is CallState.LEASED and call.lease_id == lease_id
        ]
