"""The gate as a state machine: any interleaving of agents, trainers, time and crashes keeps its invariants (R22)."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.services.inner_gate import completion, tokenizer

from penstock_chassis.errors import PenstockError
from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.domain.agent_keys import ALL
from penstock_interception.domain.budgets import Budgets, RunBudgets
from penstock_interception.domain.calls import (
    CallRequest,
    CallState,
    Dialect,
    Mode,
    RolloutSpec,
    RolloutState,
    TokenizerRef,
)
from penstock_interception.domain.completions import Completion, Failure, Tokens
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Call, Credits, Selector, Session, SessionRequest
from penstock_interception.gate.context import GateLimits, LeasingLimits
from penstock_interception.rollouts.agent_keys import Refusal
from penstock_interception.testing import open_interceptor, parse

ROLLOUTS = ["r0", "r1", "r2"]
SELECTORS = [
    Selector(),
    Selector(group_id="even"),
    Selector(group_id="odd"),
    Selector(rollout_ids=frozenset({"r1"})),
    Selector(labels=frozenset({("n", "2")})),
]
TEXTS = ["a", "bb", "ccc"]
RUN = RunBudgets(max_calls=12)
LIMITS = GateLimits(
    max_open_calls_per_rollout=4,
    rejoin_grace_s=5.0,
    retention_s=500.0,
    leasing=LeasingLimits(resume_window_s=20.0),
)


class Machine(RuleBasedStateMachine):
    """Agents ask and leave, trainers come, hold, answer, break off; time passes; the service is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-gate-"))
        self.now = 1_000_000.0
        self.clock = Clock(lambda: self.now, lambda: self.now)
        self.serial = 0
        self.sessions: list[Session] = []
        self.leases: list[tuple[str, str]] = []
        self.accepted: dict[str, bytes] = {}
        self.ended: dict[str, CallState] = {}
        self.attached: dict[str, int] = {}

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        self.run(self._start())

    async def _start(self) -> None:
        self.opened = open_interceptor(self.directory, tokenizer(), clock=self.clock, limits=LIMITS, closed_kept=1)
        self.interceptor = await self.opened.__aenter__()
        self.registry = self.interceptor.registry

    async def _stop(self) -> None:
        await self.opened.__aexit__(None, None, None)

    def teardown(self) -> None:
        if hasattr(self, "interceptor"):
            self.run(self._stop())
        self.loop.close()
        shutil.rmtree(self.directory)

    def calls(self) -> list[Call]:
        return [call for rollout in self.registry.rollouts() for call in rollout.calls]

    # Agents and their driver -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(ROLLOUTS), calls=st.sampled_from([None, 3]))
    def open_rollout(self, name: str, calls: int | None) -> None:
        number = name[1:]
        opening = RolloutSpec(
            request_id=f"open-{name}",
            rollout_id=name,
            mode=Mode.INTERCEPTION_GATE,
            source=TokenizerRef("test"),
            group_id="even" if int(number) % 2 == 0 else "odd",
            labels=(("n", number),),
            budgets=Budgets(max_calls=calls, call_timeout_s=100.0),
            run_id="run",
            run_budgets=RUN if name != "r2" else None,
        )
        try:
            rollout = self.run(self.interceptor.rollouts.open(opening, None))
        except PenstockError as error:
            assert error.reason in ("REQUEST_ID_REUSED", "BUDGET_EXHAUSTED")
        else:
            if rollout.state is not RolloutState.CLOSED:
                known = self.interceptor.agent_keys.check(name, self.interceptor.agent_keys.first_text(rollout))
                assert known == (rollout, ALL)

    @rule(name=st.sampled_from(ROLLOUTS))
    def close_rollout(self, name: str) -> None:
        if self.registry.find(name) is not None:
            rollout = self.run(self.interceptor.rollouts.close(name, "AGENT_EXITED"))
            assert rollout.totals.open == 0
            known = self.interceptor.agent_keys.check(name, self.interceptor.agent_keys.first_text(rollout))
            assert known is Refusal.CLOSED
            self.forget_evicted()

    @rule(name=st.sampled_from(ROLLOUTS))
    def delete_rollout(self, name: str) -> None:
        self.run(self.interceptor.rollouts.delete(name))
        assert self.registry.find(name) is None
        self.forget_evicted()

    @rule(name=st.sampled_from(ROLLOUTS), question=st.sampled_from(TEXTS))
    def ask(self, name: str, question: str) -> None:
        rollout = self.registry.find(name)
        if rollout is None or rollout.state is RolloutState.CLOSED:
            return
        body = orjson.dumps({"messages": [{"role": "user", "content": question}]})
        parsed = parse(Dialect.CHAT_COMPLETIONS, body)
        self.serial += 1
        digest = hashlib.sha256(body).digest()
        request = CallRequest(Dialect.CHAT_COMPLETIONS, body, digest, f"k{self.serial}", False, Sampling(), "m")
        try:
            call = self.run(self.interceptor.begin(rollout, request, parsed))
        except PenstockError as error:
            assert error.reason in ("BUDGET_EXHAUSTED", "CALL_LIMIT")
            return
        self.attached[call.id] = 1

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def agent_leaves(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.attached)))
        self.interceptor.detach(self.registry.call(call_id))
        self.attached[call_id] -= 1
        if not self.attached[call_id]:
            del self.attached[call_id]

    @rule(data=st.data())
    def agent_rejoins(self, data: st.DataObject) -> None:
        calls = [call for call in self.calls() if not call.state.terminal]
        if calls:
            call = data.draw(st.sampled_from(calls))
            self.interceptor.rejoin(call)
            self.attached[call.id] = self.attached.get(call.id, 0) + 1

    # Trainers --------------------------------------------------------------------------------------------------------

    @rule(selector=st.sampled_from(SELECTORS), calls=st.integers(1, 3), size=st.sampled_from([1, 1200, 1 << 20]))
    def trainer_comes(self, selector: Selector, calls: int, size: int) -> None:
        self.sessions.append(self.interceptor.join(SessionRequest(selector, Credits(calls, size))))

    @rule(data=st.data(), selector=st.sampled_from(SELECTORS))
    def trainer_resumes(self, data: st.DataObject, selector: Selector) -> None:
        if self.sessions:
            old = data.draw(st.sampled_from(self.sessions))
            held = set(old.held) if old.id in {s.id for s in self.registry.sessions()} else set()
            new = self.interceptor.join(SessionRequest(selector, Credits(2)), resume=old.id)
            assert held <= set(new.held)
            self.sessions.append(new)

    def some_session(self, data: st.DataObject) -> Session | None:
        alive = [s for s in self.registry.sessions() if not s.lost]
        return data.draw(st.sampled_from(alive)) if alive else None

    @rule(data=st.data(), how=st.sampled_from(["leave", "lose"]))
    def trainer_goes(self, data: st.DataObject, how: str) -> None:
        session = self.some_session(data)
        if session is not None:
            if how == "leave":
                self.interceptor.leave(session)
            else:
                self.interceptor.sessions.lose(session)

    @rule(data=st.data(), calls=st.integers(0, 3))
    def credit_changes(self, data: st.DataObject, calls: int) -> None:
        session = self.some_session(data)
        if session is not None:
            self.interceptor.sessions.set_credit(session, Credits(calls))

    @rule(data=st.data(), pause=st.booleans())
    def pause_or_resume(self, data: st.DataObject, pause: bool) -> None:
        session = self.some_session(data)
        if session is not None:
            if pause:
                self.interceptor.sessions.pause(session, 50.0)
            else:
                self.interceptor.resume(session)

    @rule(data=st.data(), text=st.sampled_from(TEXTS), kind=st.sampled_from(["text", "text", "text", "fail", "bad"]))
    def deliver(self, data: st.DataObject, text: str, kind: str) -> None:
        if not self.leases:
            return
        call_id, lease_id = data.draw(st.sampled_from(self.leases))
        answer: Completion | Failure = completion(text)
        if kind == "fail":
            answer = Failure("TRAINER_FAILED")
        elif kind == "bad":
            answer = Completion(Tokens(np.asarray([-1], np.int32)), finish_reason=FinishReason.STOP)
        verdict = self.run(self._deliver(call_id, lease_id, answer))
        if isinstance(verdict, Accepted):
            assert kind != "bad"
            assert self.accepted.setdefault(call_id, answer.digest()) == answer.digest()

    async def _deliver(self, call_id: str, lease_id: str, answer: Completion | Failure) -> Any:
        verdict = await self.interceptor.deliver(call_id, lease_id, answer)
        if isinstance(verdict, Accepted):
            await verdict.committed
            await self.registry.call(call_id).ended
        return verdict

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            call_id, lease_id = data.draw(st.sampled_from(self.leases))
            self.run(self._release(call_id, lease_id))

    async def _release(self, call_id: str, lease_id: str) -> None:
        await self.interceptor.release(call_id, lease_id)

    # Time and crashes ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 120.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.interceptor.tick())
        self.forget_evicted()

    @rule()
    def crash(self) -> None:
        for rollout in self.registry.rollouts():
            if rollout.state is RolloutState.CLOSED:
                self.run(self.interceptor.conversations.of(rollout))  # from the shelf, or to it
        self.forget_evicted()
        kept = [call for call in self.calls() if call.rollout.state is not RolloutState.CLOSED]
        before = {call.id: (call.state, call.accepted_digest) for call in kept}
        used = {
            name: (running.spent, running.run.exhausted)
            for name, running in self.interceptor.gate.budgets._runs.items()
        }
        self.run(self._stop())
        self.attached.clear()
        self.run(self._start())
        self.forget_evicted()
        after = {call.id: (call.state, call.accepted_digest) for call in self.calls()}
        kept_runs = {
            name: (running.spent, running.run.exhausted)
            for name, running in self.interceptor.gate.budgets._runs.items()
        }
        assert kept_runs == used
        assert before.keys() == after.keys()
        for call_id, (state, digest) in before.items():
            assert after[call_id][1] == digest
            if state.terminal:
                assert after[call_id][0] is state
            else:
                assert not after[call_id][0].terminal

    def runs(self) -> dict[str, Any]:
        budgets = self.interceptor.gate.budgets
        return {name: (replace(running.spent), running.run.exhausted) for name, running in budgets._runs.items()}

    def forget_evicted(self) -> None:
        known = {call.id for call in self.calls()}
        self.attached = {key: count for key, count in self.attached.items() if key in known}
        self.leases = [lease for lease in self.leases if lease[0] in known]
        self.accepted = {key: value for key, value in self.accepted.items() if key in known}
        self.ended = {key: value for key, value in self.ended.items() if key in known}

    # Invariants ------------------------------------------------------------------------------------------------------

    @invariant()
    def what_has_ended_stays_as_it_is(self) -> None:
        if not hasattr(self, "interceptor"):
            return
        for call in self.calls():
            if call.state.terminal:
                assert self.ended.setdefault(call.id, call.state) is call.state
                assert call.ended.done() and call.holder is None and call.plan is None and not call.request.body
            else:
                assert not call.ended.done()
                lease = (call.id, call.lease_id)
                if call.state is CallState.LEASED and lease not in self.leases:
                    self.leases.append(lease)
            if call.id in self.accepted:
                assert call.accepted_digest == self.accepted[call.id]

    @invariant()
    def a_call_is_where_its_state_says(self) -> None:
        if not hasattr(self, "interceptor"):
            return
        held = {call_id: s for s in self.registry.sessions() for call_id in s.held}
        for call in self.calls():
            assert (call.state is CallState.LEASED) == (call.holder is not None)
            assert held.get(call.id) is call.holder
            waits = call.state is CallState.QUEUED and call.rollout.state is not RolloutState.CLOSED
            assert (call.id in call.rollout.queued) == waits
            for queue in call.rollout.queues:
                assert (call.id in queue._queue) == (waits and not call.rollout.paused_by)
        for session in self.registry.sessions():
            assert session.held_bytes == sum(call.size for call in session.held.values())

    @invariant()
    def nobody_with_credit_waits_beside_a_call(self) -> None:
        if not hasattr(self, "interceptor"):
            return
        for rollout in self.registry.rollouts():
            for queue in rollout.queues:
                # A call that was just given back waits a moment for another session.
                given_back = {key for kind, key in self.interceptor.gate._deadlines._at if kind == "offer"}
                head = queue.next_call()
                if head is not None and head.id not in given_back:
                    assert not any(session.takes(head) for session in queue.sessions.values())
                    assert queue.next_session(head, first=True) is None

    @invariant()
    def a_run_has_used_what_its_rollouts_have_and_had(self) -> None:
        if not hasattr(self, "interceptor"):
            return
        for running in self.interceptor.gate.budgets._runs.values():
            whole = replace(running.run.gone)
            for rollout in self.registry.rollouts():
                whole.add(rollout.totals.spent)
            assert running.spent == whole
            assert whole.calls <= (RUN.max_calls or 0) or not running.run.exhausted

    @invariant()
    def totals_add_up(self) -> None:
        if not hasattr(self, "interceptor"):
            return
        for rollout in self.registry.rollouts():
            totals = rollout.totals
            if rollout.evicted:
                assert totals.open == 0 and not rollout.calls
                continue
            assert totals.calls == len(rollout.calls)
            assert totals.open == sum(1 for call in rollout.calls if not call.state.terminal)
            assert totals.delivered == sum(1 for call in rollout.calls if call.state is CallState.DELIVERED)


Machine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGate = Machine.TestCase
