"""The gate's gauges and health checks. Read-only.

A waiting call is no problem by itself. It becomes one after a wait limit, and each check then names the component at
fault: no trainer matches the rollout, matching trainers have no credit left, a session with calls is silent, calls are
paused, the model source does not answer, or only weights that no trainer has may answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import Read, Reader
from penstock_interception import metrics
from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.kept_captures import CAPTURE_LIMITS, CaptureLimits, Discarded
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.state import HOLD, Call, Session

_CONNECTED: Final = ("connected",)
_LOST: Final = ("lost",)
KEPT_S: Final = 3600.0
"""How old a capture that waits for its driver's export must be to be reported."""
DISCARDED_S: Final = 24 * 3600.0
"""How long the loss of captures is reported."""
MOST_NAMED: Final = 100
"""Discarded captures whose ids are reported."""


class Health:
    """Checks one gate."""

    def __init__(self, registry: Registry, clock: Clock, captures: CaptureLimits = CAPTURE_LIMITS) -> None:
        self._registry = registry
        self._captures = captures
        self._clock = clock

    @contextmanager
    def gauges(self) -> Iterator[None]:
        """While the context is open, supplies the gauges' values."""
        with ExitStack() as stack:
            reading: list[tuple[Read, Reader]] = [
                (metrics.OPEN_CALLS, self._open_calls),
                (metrics.HELD_CALLS, lambda: sum(bool(call.rollout.paused_by) for call in self._registry.open_calls())),
                (metrics.OLDEST_CALL, lambda: max(map(self._age, self._registry.open_calls()), default=0.0)),
                (metrics.ROLLOUTS, self._rollouts),
                (metrics.KEPT_CAPTURES, lambda: len(self._registry.kept_captures)),
                (metrics.KEPT_CAPTURE_BYTES, lambda: self._registry.kept_captures.size_bytes),
                (metrics.SESSIONS, self._sessions),
                (metrics.CREDITS, lambda: sum(session.credit.calls for session in self._connected())),
                (metrics.CREDITS_USED, lambda: sum(len(session.held) for session in self._connected())),
                (metrics.NEEDED_POLICY, self._needed_policy),
                (metrics.NEWEST_POLICY, self._newest_policy),
            ]
            for gauge, read in reading:
                stack.enter_context(gauge.supplied_by(read))
            yield

    def troubles(self, patience_s: float) -> Iterator[Trouble]:
        """Yields the problems of calls that have waited longer than `patience_s`, by component at fault.

        Also captures that wait for an export, after KEPT_S, and those that were discarded in the last DISCARDED_S.
        """
        yield from self._kept()
        waiting = [call for call in self._registry.open_calls() if self._age(call) >= patience_s]
        # What the driver holds is a rollout that somebody paused, and it shows who and until when.
        held = [call for call in waiting if call.rollout.paused_by - {HOLD}]
        if held:
            yield _trouble(
                "CALLS_HELD_BACK",
                held,
                "are paused: a trainer paused its calls, for example for a weight update, and has not resumed them",
                "resume the trainer's session (session.resume()), or end it; a pause also ends after its max_duration",
            )
        flowing = [call for call in waiting if not call.rollout.paused_by and not call.claimed]
        stuck = [call for call in flowing if self._wants_newer_policy(call, patience_s)]
        if stuck:
            least = max(call.min_policy_version or 0 for call in stuck)
            yield _trouble(
                "POLICY_STUCK",
                stuck,
                f"wait for policy version {least}: an older one was refused, and no answer had this version since",
                "push that version to the engine, or announce only versions that the engine has, or raise the "
                "rollouts' max_staleness",
            )
        named = set(stuck)
        flowing = [call for call in flowing if call not in named]
        queued = [call for call in flowing if call.state is CallState.QUEUED and call.offered]
        absent = [call for call in queued if not _sessions_for(call)]
        if absent:
            yield _trouble(
                "TRAINER_ABSENT",
                absent,
                "wait for a trainer, but no connected session's selector matches their rollouts",
                "start the trainer, or check why it disconnected; its selector must match these rollouts' run, "
                "group or labels, and their policies",
            )
        stalled = dict(self._stalled(flowing, patience_s))
        for session, calls in stalled.items():
            who = f" ({session.identity})" if session.identity else ""
            yield _trouble(
                "TRAINER_STALLED",
                calls,
                f"are with session {session.id}{who}, which has answered nothing for {patience_s:g} s",
                "check the trainer: it is connected but neither answers nor releases calls; ending it queues them "
                "again at once",
            )
        starved = [
            call
            for call in queued
            if (ours := _sessions_for(call)) and not any(s.takes(call) or s in stalled for s in ours)
        ]
        if starved:
            yield _trouble(
                "CREDITS_USED_UP",
                starved,
                "wait for a trainer's credit: every session that matches their rollouts has used its credits",
                "give the session more credits (ps.intercept(credits=...), set_credits), or answer faster, or add a"
                " trainer",
                grave=False,
            )
        slow = [call for call in flowing if call.state is CallState.DISPATCHED]
        if slow:
            yield _trouble(
                "SOURCE_SLOW",
                slow,
                "are with the model source (the inference service or an upstream), without an answer yet",
                "check the engine with `penstock doctor`: it is paused, dead or overloaded",
                grave=False,
            )

    def _kept(self) -> Iterator[Trouble]:
        kept, now = self._registry.kept_captures, self._clock.wall()
        if kept.is_full(self._captures):
            yield Trouble(
                "CAPTURES_FULL",
                f"{len(kept)} captures, {kept.size_bytes >> 20} MiB, wait for their drivers' export, and this gate"
                " keeps no more: it refuses the rollouts of drivers that export",
                "check the drivers' export (doctor names it as EXPORT_FAILING), or raise max_kept_captures or"
                " max_kept_bytes of this gate",
            )
        lost = kept.discarded_since(now - DISCARDED_S)
        if lost:
            limits = ", ".join(sorted({one.why.value for one in lost}))
            yield Trouble(
                "CAPTURES_DISCARDED",
                f"{len(lost)} capture{'s' * (len(lost) > 1)} that no driver had exported {_are(lost)} deleted in"
                f" the last day, beyond this gate's limits of {limits}",
                "bring the lost driver back within max_kept_s, or raise the limits (max_kept_captures, max_kept_bytes,"
                " max_kept_s); the rollouts' rows keep what the driver knows",
                subjects=tuple(one.rollout_id for one in lost[:MOST_NAMED]),
                owners=tuple(one.namespace for one in lost[:MOST_NAMED]),
            )
        before = now - KEPT_S
        old = [rollout for rollout in kept if (rollout.closed or before) < before]
        if old:
            yield Trouble(
                "CAPTURES_KEPT",
                f"{len(old)} ended rollout{'s' * (len(old) > 1)} have waited an hour or more for their driver's"
                " export, and take disk until then",
                "check the driver's export (doctor names it as EXPORT_FAILING); if that driver is gone for good,"
                " delete these rollouts at this gate, or leave it to max_kept_s",
                grave=False,
                subjects=tuple(rollout.id for rollout in old),
                owners=tuple(rollout.spec.namespace for rollout in old),
            )

    def _stalled(self, calls: list[Call], patience_s: float) -> Iterator[tuple[Session, list[Call]]]:
        now = self._clock.wall()
        by_session: dict[Session, list[Call]] = {}
        for call in calls:
            if call.holder is not None and now - (call.leased_at or now) >= patience_s:
                by_session.setdefault(call.holder, []).append(call)
        for session, held in by_session.items():
            if session.answered_at is None or now - session.answered_at >= patience_s:
                yield session, held

    def _wants_newer_policy(self, call: Call, patience_s: float) -> bool:
        """Returns whether a call's connected holder has long had only too old weights. False without such a holder."""
        if call.stale_since is None or call.state is not CallState.LEASED:
            return False
        lost = call.holder is not None and call.holder.lost
        return not lost and self._clock.wall() - call.stale_since >= patience_s

    def _age(self, call: Call) -> float:
        return self._clock.wall() - call.received

    def _open_calls(self) -> dict[tuple[str, ...], float]:
        counted = Counter(call.state for call in self._registry.open_calls())
        return {(state.value,): counted[state] for state in CallState if not state.terminal}

    def _rollouts(self) -> dict[tuple[str, ...], float]:
        counted = Counter(
            rollout.spec.mode.value for rollout in self._registry.rollouts() if rollout.state is not RolloutState.CLOSED
        )
        return {(mode,): count for mode, count in counted.items()}

    def _sessions(self) -> dict[tuple[str, ...], float]:
        lost = sum(session.lost for session in self._registry.sessions())
        return {_CONNECTED: self._registry.session_count() - lost, _LOST: lost}

    def _connected(self) -> list[Session]:
        return [session for session in self._registry.sessions() if not session.lost]

    def _needed_policy(self) -> dict[tuple[str, ...], float]:
        needed = [
            call.min_policy_version for call in self._registry.open_calls() if call.min_policy_version is not None
        ]
        return {(): max(needed)} if needed else {}

    def _newest_policy(self) -> dict[tuple[str, ...], float]:
        queues = [session.queue for session in self._registry.sessions()]
        announced = [queue.newest_version for queue in queues if queue.newest_version is not None]
        return {(): max(announced)} if announced else {}


def _sessions_for(call: Call) -> list[Session]:
    return [
        session
        for queue in call.rollout.queues
        for session in queue.sessions.values()
        if queue.selector.wants(call) and not session.lost and not session.ended
    ]


def _are(lost: list[Discarded]) -> str:
    return "was" if len(lost) == 1 else "were"


def _trouble(reason: str, calls: list[Call], finding: str, advice: str, *, grave: bool = True) -> Trouble:
    rollouts = {call.rollout.id: call.rollout.spec.namespace for call in calls}
    of_calls = f"{len(calls)} model call{'s' * (len(calls) > 1)}"
    of_rollouts = f"{len(rollouts)} rollout{'s' * (len(rollouts) > 1)}"
    return Trouble(
        reason, f"{of_calls} of {of_rollouts} {finding}", advice, grave, tuple(rollouts), tuple(rollouts.values())
    )
