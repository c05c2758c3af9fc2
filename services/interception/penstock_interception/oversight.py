"""What the gate tells operators of now: its gauges, and what it takes for trouble. It only looks.

A call that waits is no trouble by itself. It is one when it has waited longer than somebody is ready to, and then
there is one party to look at: nobody answers this rollout, those who do have no credit left, one who holds calls says
nothing, somebody holds calls back, the model source does not answer, or only weights may answer that nobody has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock_chassis.metrics import Read, Reader
from penstock_chassis.operations import Trouble
from penstock_interception import metrics
from penstock_interception.calls import Call, CallState, Rollout, RolloutState
from penstock_interception.gate import Gate
from penstock_interception.sessions import Session

_CONNECTED: Final = ("connected",)
_LOST: Final = ("lost",)


class Oversight:
    """Looks at one gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, the gauges tell of this gate."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.OPEN_CALLS, self._open_calls),
                (metrics.HELD_CALLS, lambda: sum(bool(call.rollout.holds) for call in self._gate.open_calls())),
                (metrics.OLDEST_CALL, lambda: max(map(self._age, self._gate.open_calls()), default=0.0)),
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.SESSIONS, self._sessions),
                (metrics.CREDITS, lambda: sum(session.credit.calls for session in self._connected())),
                (metrics.CREDITS_USED, lambda: sum(len(session.held) for session in self._connected())),
                (metrics.NEEDED_POLICY, self._needed_policy),
                (metrics.NEWEST_POLICY, self._newest_policy),
            ]
            for told, read in reading:
                stack.enter_context(told.told_by(read))
            yield

    def troubles(self, patience_s: float) -> Iterator[Trouble]:
        """What has waited longer than `patience_s`, by who is to look at."""
        waiting = [call for call in self._gate.open_calls() if self._age(call) >= patience_s]
        held = [call for call in waiting if call.rollout.holds]
        if held:
            yield _trouble(
                "CALLS_HELD_BACK",
                held,
                "are held back: a trainer has paused its calls, as for a weight update, and has not resumed them",
                "let the trainer resume (session.resume()), or end its session; a pause ends by itself after its time",
            )
        flowing = [call for call in waiting if not call.rollout.holds and not call.claimed]
        stuck = [call for call in flowing if self._wants_newer_policy(call, patience_s)]
        if stuck:
            least = max(call.min_policy_version or 0 for call in stuck)
            yield _trouble(
                "POLICY_STUCK",
                stuck,
                f"wait for policy version {least}, and nobody has answered with it since an older one was refused",
                "push that version to the engine, or announce only versions that it has; else widen the rollouts'"
                " max_staleness",
            )
        named = set(stuck)
        flowing = [call for call in flowing if call not in named]
        queued = [call for call in flowing if call.state is CallState.QUEUED and call.offered]
        absent = [call for call in queued if not _sessions_for(call.rollout)]
        if absent:
            yield _trouble(
                "TRAINER_ABSENT",
                absent,
                "wait for a trainer, and none is connected whose selector matches their rollouts",
                "start the trainer, or look why it left; its selector must name these rollouts' run, group or labels",
            )
        stalled = dict(self._stalled(flowing, patience_s))
        for session, calls in stalled.items():
            who = f" ({session.identity})" if session.identity else ""
            yield _trouble(
                "TRAINER_STALLED",
                calls,
                f"are with session {session.id}{who}, which has answered nothing for {patience_s:g} s",
                "look at the trainer: it is attached and neither answers nor gives calls back; ending it queues them"
                " again at once",
            )
        starved = [
            call
            for call in queued
            if (ours := _sessions_for(call.rollout)) and not any(s.has_credit or s in stalled for s in ours)
        ]
        if starved:
            yield _trouble(
                "CREDITS_USED_UP",
                starved,
                "wait for a trainer's credit: every session that answers their rollouts holds as many calls as it may",
                "give the session more credits (ps.intercept(credits=...), set_credits), or answer faster, or add a"
                " trainer",
                grave=False,
            )
        slow = [call for call in flowing if call.state is CallState.DISPATCHED]
        if slow:
            yield _trouble(
                "SOURCE_SLOW",
                slow,
                "are with the model source (the inference service, or an upstream) and have no answer yet",
                "look at the engine: it is paused, dead, or has more to do than it can (penstock doctor tells)",
                grave=False,
            )

    def _stalled(self, calls: list[Call], patience_s: float) -> Iterator[tuple[Session, list[Call]]]:
        now = self._gate.clock.wall()
        by_session: dict[Session, list[Call]] = {}
        for call in calls:
            if call.holder is not None and now - (call.leased_at or now) >= patience_s:
                by_session.setdefault(call.holder, []).append(call)
        for session, held in by_session.items():
            if session.answered_at is None or now - session.answered_at >= patience_s:
                yield session, held

    def _wants_newer_policy(self, call: Call, patience_s: float) -> bool:
        """Whether who has the call has long had none but old weights for it. One whom nobody has waits for somebody."""
        if call.stale_since is None or call.state is not CallState.LEASED:
            return False
        lost = call.holder is not None and call.holder.lost
        return not lost and self._gate.clock.wall() - call.stale_since >= patience_s

    def _age(self, call: Call) -> float:
        return self._gate.clock.wall() - call.received

    def _open_calls(self) -> dict[tuple[str, ...], float]:
        counted = Counter(call.state for call in self._gate.open_calls())
        return {(state.value,): counted[state] for state in CallState if not state.terminal}

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        counted = Counter(
            rollout.opening.mode.value for rollout in self._gate.rollouts() if rollout.state is not RolloutState.CLOSED
        )
        return {(mode,): count for mode, count in counted.items()}

    def _sessions(self) -> dict[tuple[str, ...], float]:
        lost = sum(session.lost for session in self._gate.dispatcher.sessions())
        return {_CONNECTED: len(list(self._gate.dispatcher.sessions())) - lost, _LOST: lost}

    def _connected(self) -> list[Session]:
        return [session for session in self._gate.dispatcher.sessions() if not session.lost]

    def _needed_policy(self) -> dict[tuple[str, ...], float]:
        needed = [call.min_policy_version for call in self._gate.open_calls() if call.min_policy_version is not None]
        return {(): max(needed)} if needed else {}

    def _newest_policy(self) -> dict[tuple[str, ...], float]:
        lanes = [session.lane for session in self._gate.dispatcher.sessions()]
        announced = [lane.newest_version for lane in lanes if lane.newest_version is not None]
        return {(): max(announced)} if announced else {}


def _sessions_for(rollout: Rollout) -> list[Session]:
    return [
        session
        for lane in rollout.lanes
        for session in lane.sessions.values()
        if not session.lost and not session.ended
    ]


def _trouble(reason: str, calls: list[Call], told: str, advice: str, *, grave: bool = True) -> Trouble:
    rollouts = tuple(dict.fromkeys(call.rollout.id for call in calls))
    of_calls = f"{len(calls)} model call{'s' * (len(calls) > 1)}"
    of_rollouts = f"{len(rollouts)} rollout{'s' * (len(rollouts) > 1)}"
    return Trouble(reason, f"{of_calls} of {of_rollouts} {told}", advice, grave, rollouts)
