"""Long-poll leases: unary requests lease calls. A lease expires unless it is answered or extended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call, SessionRequest
from penstock_interception.interceptor import Interceptor

REQUESTS_KEPT = 4096
CREDIT_BYTES = 12 << 20
"""Beyond this size no call is added. With a last one of up to `CALL_BYTES`, the calls fit into one response."""


class PollingLeases:
    """Leases calls to unary requests, and returns the same calls to a repeated request."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._given: OrderedDict[str, list[tuple[Call, str]]] = OrderedDict()

    async def lease(self, asked: SessionRequest, *, wait_s: float, request_id: str = "") -> list[Call]:
        """Waits until a call is available and leases as many as the credit allows; none if none comes within `wait_s`.

        Raises ResourceExhausted SESSION_LIMIT.
        """
        before = [call for call, lease in self._given.get(request_id, ()) if _leased(call, lease)]
        if before:
            return before
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
        if request_id and calls:
            self._given[request_id] = [(call, call.lease_id) for call in calls]
            while len(self._given) > REQUESTS_KEPT:
                self._given.popitem(last=False)
        return calls


def _leased(call: Call, lease_id: str) -> bool:
    return call.state is CallState.LEASED and call.lease_id == lease_id
