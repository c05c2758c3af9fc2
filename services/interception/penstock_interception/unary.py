"""Calls leased by unary requests: a long poll takes some; a lease ends by itself unless it is answered or extended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from penstock_interception.calls import Call, CallState
from penstock_interception.dispatch import Dispatcher
from penstock_interception.sessions import Credits, Selector, View

REQUESTS_KEPT = 4096
CREDIT_BYTES = 12 << 20
"""From so many on no further call is added: with the last one, of up to `CALL_BYTES`, they fit into one response."""


class UnaryLeases:
    """Remembers what each request got, so that a repeated one gets the same."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._given: OrderedDict[str, list[tuple[Call, str]]] = OrderedDict()

    async def lease(
        self,
        selector: Selector,
        count: int,
        *,
        identity: str,
        view: View,
        lease_s: float,
        wait_s: float,
        request_id: str = "",
        policy_version: int | None = None,
    ) -> list[Call]:
        """Waits until a call is there and leases up to `count` of them; empty when none came within `wait_s`.

        Raises ResourceExhausted SESSION_LIMIT.
        """
        before = [call for call, lease in self._given.get(request_id, ()) if _leased(call, lease)]
        if before:
            return before
        session = self._dispatcher.join(
            selector,
            Credits(count, CREDIT_BYTES),
            identity=identity,
            view=view,
            policy_version=policy_version,
            lease_s=lease_s,
        )
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
            self._dispatcher.leave(session)
            raise
        self._dispatcher.close_unary(session)
        if request_id and calls:
            self._given[request_id] = [(call, call.lease_id) for call in calls]
            while len(self._given) > REQUESTS_KEPT:
                self._given.popitem(last=False)
        return calls


def _leased(call: Call, lease_id: str) -> bool:
    return call.state is CallState.LEASED and call.lease_id == lease_id
