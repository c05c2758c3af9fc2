"""Long-poll leases: unary requests lease calls. A lease expires unless it is answered or extended."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress
from dataclasses import replace

from penstock_interception.domain.state import Call, Selector, SessionRequest
from penstock_interception.interceptor import Interceptor

CREDIT_BYTES = 12 << 20
"""At most this many bytes of calls, or one larger call, are in a response."""


class PollingLeases:
    """Leases calls to unary requests, and returns the same calls to a repeated request."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._running: dict[str, asyncio.Future[None]] = {}

    async def lease(self, asked: SessionRequest, *, wait_s: float, request_id: str = "") -> list[tuple[Call, str]]:
        """Waits until a call is available and leases as many as the credit allows; none if none comes within `wait_s`.

        Returns each call with the id of its lease. Raises ResourceExhausted SESSION_LIMIT.
        """
        if not request_id:
            return await self._lease(asked, wait_s)
        key = _key(asked.selector, request_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (running := self._running.get(key)) is not None:
                    await asyncio.wait([running])
        if running is not None:
            return []  # the same request still waits, and gets the calls
        if before := self._interceptor.sessions.unary.given(key):
            return before
        done = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            return await self._lease(replace(asked, lease_request=key), wait_s)
        finally:
            del self._running[key]
            done.set_result(None)

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


def _key(selector: Selector, request_id: str) -> str:
    """Identifies a request over a restart. Equal ids of trainers of different runs are different requests."""
    fields = (
        selector.run_id,
        selector.group_id,
        sorted(selector.rollout_ids),
        sorted(selector.labels),
        selector.namespace,
        sorted(selector.policy_ids),
        request_id,
    )
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
