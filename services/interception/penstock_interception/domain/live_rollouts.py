"""The rollouts, calls and sessions in memory. Only the gate changes it; everything above may read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock_chassis.errors import AlreadyExists, NotFound
from penstock_interception.domain.calls import RolloutSpec, RolloutState
from penstock_interception.domain.kept_captures import KeptCaptures
from penstock_interception.domain.state import Call, Rollout, Session


class Registry:
    """All rollouts, the calls that are not evicted, and the connected or lost sessions, by id."""

    def __init__(self) -> None:
        self.open_rollouts = 0
        self.open_in: Counter[str] = Counter()
        """How many rollouts are open in each namespace."""
        self.kept_captures = KeptCaptures()
        """Closed rollouts whose captures wait to be stored elsewhere."""
        # The service is stopping: no rollout is opened, no call admitted.
        self.draining = False
        # The service drains: only rollouts of runs that are counted here are opened.
        self.closed_to_new = False
        self._rollouts: dict[str, Rollout] = {}
        # By namespace and request id.
        self._by_request: dict[tuple[str, str], Rollout] = {}
        # By the id of the rollout whose verifier asks it.
        self._judges: dict[str, Rollout] = {}
        self._users: dict[str, Rollout] = {}
        self._calls: dict[str, Call] = {}
        self._sessions: dict[str, Session] = {}

    # Rollouts --------------------------------------------------------------------------------------------------------

    def find_opened(self, spec: RolloutSpec) -> Rollout | None:
        """Returns the rollout that an identical request opened before, or None.

        Raises AlreadyExists: REQUEST_ID_REUSED, ROLLOUT_EXISTS.
        """
        before = self._by_request.get((spec.namespace, spec.request_id))
        if before is not None:
            if before.spec != spec:
                raise AlreadyExists("The request id was used for another rollout.", reason="REQUEST_ID_REUSED")
            return before
        if spec.rollout_id in self._rollouts:
            raise AlreadyExists("A rollout with this id exists.", reason="ROLLOUT_EXISTS")
        return None

    def find(self, rollout_id: str) -> Rollout | None:
        """Returns the rollout, or None."""
        return self._rollouts.get(rollout_id)

    def rollout(self, rollout_id: str) -> Rollout:
        """Returns the rollout. Raises NotFound ROLLOUT_UNKNOWN."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")
        return rollout

    def judge_of(self, rollout_id: str) -> Rollout | None:
        """Returns the calls of a rollout's verifier to its judge, which are a rollout of their own, or None."""
        return self._judges.get(rollout_id)

    def user_of(self, rollout_id: str) -> Rollout | None:
        """Returns the calls to the model that plays the user of a rollout's agent, a rollout of their own, or None."""
        return self._users.get(rollout_id)

    def beside(self, rollout_id: str) -> list[Rollout]:
        """Returns a rollout's judge and user, where it has them: what becomes of it becomes of them."""
        return [one for one in (self.judge_of(rollout_id), self.user_of(rollout_id)) if one is not None]

    def rollouts(self) -> Iterable[Rollout]:
        """All rollouts, oldest first."""
        return self._rollouts.values()

    def held(self) -> int:
        """How many rollouts would lose something with this gate: open ones, and those not stored elsewhere yet."""
        return self.open_rollouts + len(self.kept_captures)

    def keep(self, rollout: Rollout) -> None:
        self._rollouts[rollout.id] = rollout
        self._by_request[rollout.spec.namespace, rollout.spec.request_id] = rollout
        if rollout.spec.judge_of:
            self._judges[rollout.spec.judge_of] = rollout
        if rollout.spec.user_of:
            self._users[rollout.spec.user_of] = rollout
        if rollout.state is not RolloutState.CLOSED:
            self.open_rollouts += 1
            self.open_in[rollout.spec.namespace] += 1
        self.kept_captures.add(rollout)

    def ended(self, rollout: Rollout) -> None:
        """Counts an open rollout as closed."""
        self.open_rollouts -= 1
        self.kept_captures.add(rollout)
        self.open_in[rollout.spec.namespace] -= 1
        if not self.open_in[rollout.spec.namespace]:
            del self.open_in[rollout.spec.namespace]

    def stored(self, rollout: Rollout) -> None:
        """Marks a rollout whose capture was stored elsewhere."""
        self.kept_captures.remove(rollout)
        rollout.stored = True

    def drop(self, rollout: Rollout) -> None:
        """Removes a rollout and its calls."""
        self._rollouts.pop(rollout.id, None)
        self.kept_captures.remove(rollout)
        self._by_request.pop((rollout.spec.namespace, rollout.spec.request_id), None)
        if self._judges.get(rollout.spec.judge_of) is rollout:
            del self._judges[rollout.spec.judge_of]
        if self._users.get(rollout.spec.user_of) is rollout:
            del self._users[rollout.spec.user_of]
        self.drop_calls(rollout)

    # Calls -----------------------------------------------------------------------------------------------------------

    def call(self, call_id: str) -> Call:
        """Returns the call. Raises NotFound CALL_UNKNOWN."""
        call = self._calls.get(call_id)
        if call is None:
            raise NotFound("No such call.", reason="CALL_UNKNOWN")
        return call

    def find_call(self, call_id: str) -> Call | None:
        """Returns the call, or None if it is unknown or evicted."""
        return self._calls.get(call_id)

    def open_calls(self) -> list[Call]:
        """Calls that have not ended."""
        return [call for rollout in self._rollouts.values() for call in rollout.open_calls()]

    def add_call(self, call: Call) -> None:
        self._calls[call.id] = call

    def drop_calls(self, rollout: Rollout) -> None:
        for call in rollout.calls:
            self._calls.pop(call.id, None)

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self, session_id: str) -> Session:
        """Returns the session. Raises NotFound SESSION_UNKNOWN."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound("No such session.", reason="SESSION_UNKNOWN")
        return session

    def find_session(self, session_id: str) -> Session | None:
        """Returns the session, or None."""
        return self._sessions.get(session_id)

    def sessions(self) -> list[Session]:
        """All sessions, those of unary requests included."""
        return list(self._sessions.values())

    def session_count(self) -> int:
        """How many sessions there are."""
        return len(self._sessions)

    def add_session(self, session: Session) -> None:
        self._sessions[session.id] = session

    def drop_session(self, session: Session) -> bool:
        """Removes a session; returns False if it was removed before."""
        return self._sessions.pop(session.id, None) is not None
