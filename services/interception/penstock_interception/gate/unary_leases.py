"""Leases of single requests for calls: each lasts for its own time, over a restart too, since no session keeps it."""

from __future__ import annotations

from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call, Credits, Selector, SelectorQueue, Session, View
from penstock_interception.gate.context import DeadlineKind, GateContext


class UnaryLeases:
    """The calls that are leased to single requests, and when their leases end. Belongs to `Leasing`.

    Such a call has a `lease_s`; a lease without one lasts as long as its session, and is none of these.
    """

    def __init__(self, context: GateContext) -> None:
        self._clock = context.clock
        self._deadlines = context.deadlines
        # By lease id.
        self._calls: dict[str, Call] = {}
        # By the request that they are leased to (`Call.lease_request`), then by lease id; without those of no request.
        self._given: dict[str, dict[str, Call]] = {}

    def begin(self, call: Call) -> None:
        """Begins a call's lease, or begins it anew."""
        assert call.lease_s is not None
        self._add(call)
        self._deadlines.set((DeadlineKind.LEASE, call.id), self._clock.steady() + call.lease_s)

    def end(self, call: Call) -> None:
        """Ends a call's lease."""
        self._deadlines.drop((DeadlineKind.LEASE, call.id))
        self._calls.pop(call.lease_id, None)
        given = self._given.get(call.lease_request)
        if given is not None:
            given.pop(call.lease_id, None)
            if not given:
                del self._given[call.lease_request]

    def given(self, request: str) -> list[tuple[Call, str]]:
        """Returns the calls that are leased to a request, which is not "", each with the id of its lease."""
        return [
            (call, lease_id)
            for lease_id, call in self._given.get(request, {}).items()
            if call.state is CallState.LEASED
        ]

    def extend(self, lease_id: str, namespace: str | None, rollout_id: str = "") -> bool:
        """Begins a lease anew.

        Returns False if the lease does not exist in the namespace (None = any), or is of another rollout ("" = of any).
        """
        call = self._calls.get(lease_id)
        if call is None or namespace not in (None, call.rollout.spec.namespace):
            return False
        if rollout_id not in ("", call.rollout.id):
            return False
        self.begin(call)
        return True

    # After a restart -------------------------------------------------------------------------------------------------

    def restored(self, call: Call, session_id: str) -> Session:
        """Restores a lease, whose time is counted from `begin_restored` on; returns its session.

        That ended with its request. Nobody can resume it, so there is no window for that.
        """
        self._add(call)
        queue = SelectorQueue(Selector(namespace=call.rollout.spec.namespace))
        session = Session(session_id, queue, "", Credits(0), View())
        session.end()
        return session

    def begin_restored(self) -> None:
        """Begins all restored leases anew, by their whole length."""
        for call in tuple(self._calls.values()):
            self.begin(call)

    def _add(self, call: Call) -> None:
        self._calls[call.lease_id] = call
        if call.lease_request:
            self._given.setdefault(call.lease_request, {})[call.lease_id] = call
