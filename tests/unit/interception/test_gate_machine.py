"""The gate as a state machine: any interleaving of agents, trainers, time and crashes keeps its invariants (R22)."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock_chassis.errors import PenstockError
from penstock_codec import Codec, tiny
from penstock_codec.chat import FinishReason, Sampling
from penstock_codec.files import TokenizerFiles
from penstock_interception.budgets import Budgets, RunBudgets
from penstock_interception.calls import Arrival, Call, CallState, Dialect, Mode, Opening, RolloutState, TokenizerRef
from penstock_interception.clock import Clock
from penstock_interception.codecs import CodecCache
from penstock_interception.completions import Completion, Failure, Tokens
from penstock_interception.credentials import Refusal
from penstock_interception.dispatch import DispatchLimits
from penstock_interception.graph import LogprobsMode
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import Ask, Route
from penstock_interception.limits import GateLimits
from penstock_interception.ports import Accepted
from penstock_interception.requests import ChatRequest
from penstock_interception.sessions import Credits, Selector, Session, View
from penstock_interception.sources.registry import Sources
from penstock_interception.store import CallStore
from penstock_interception.tokens import ALL
from penstock_interception.turns import Turns

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
    dispatch=DispatchLimits(resume_window_s=20.0),
)


@cache
def tokenizer() -> Path:
    """The tiny tokenizer's files, made once."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-tiny-"))
    tiny.build(["list the files"]).write(directory)
    return directory


@cache
def tiny_codec() -> Codec:
    """Its codec."""
    return Codec.load(TokenizerFiles.from_directory(tokenizer()))


def completion(text: str) -> Completion:
    """Tokens as an engine would sample them."""
    codec = tiny_codec()
    ids = np.asarray([*codec.encode(text), codec.end_of_turn_id], np.int32)
    logprobs = np.full(ids.size, -0.5, np.float32)
    return Completion(Tokens(ids, logprobs, LogprobsMode.PROCESSED), finish_reason=FinishReason.STOP)


class Machine(RuleBasedStateMachine):
    """Agents ask and leave, trainers come, hold, answer, break off; time passes; the service is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-gate-"))
        self.now = 1_000_000.0
        self.clock = Clock(lambda: self.now, lambda: self.now)
        self.pool = ThreadPoolExecutor(1)
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
        self.http = aiohttp.ClientSession()
        self.store = await CallStore.open(self.directory)
        codecs = CodecCache(self.directory / "tokenizers", self.pool)
        self.tasks = asyncio.TaskGroup()
        await self.tasks.__aenter__()
        dialect = ChatCompletions()

        def parse(_: Dialect, body: bytes) -> ChatRequest:
            return dialect.parse(body, Route(Ask.COMPLETION))

        sources = Sources(
            codecs,
            self.http,
            parse,
            inference={},
            upstreams={},
            tokenizers={"tiny": tokenizer()},
            caller_endpoints=False,
        )
        self.turns = Turns(
            self.store,
            sources,
            self.tasks,
            self.pool,
            parse=parse,
            limits=LIMITS,
            clock=self.clock,
            closed_kept=1,
        )
        self.gate = self.turns.gate
        await self.turns.restore()

    async def _stop(self) -> None:
        await self.store.aclose()
        await self.http.close()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self._stop())
        self.loop.close()
        self.pool.shutdown()
        shutil.rmtree(self.directory)

    def calls(self) -> list[Call]:
        return [call for rollout in self.gate.rollouts() for call in rollout.calls]

    # Agents and their driver -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(ROLLOUTS), calls=st.sampled_from([None, 3]))
    def open_rollout(self, name: str, calls: int | None) -> None:
        number = name[1:]
        opening = Opening(
            request_id=f"open-{name}",
            rollout_id=name,
            mode=Mode.INTERCEPTION_GATE,
            source=TokenizerRef("tiny"),
            group_id="even" if int(number) % 2 == 0 else "odd",
            labels=(("n", number),),
            budgets=Budgets(max_calls=calls, call_timeout_s=100.0),
            run_id="run",
            run_budgets=RUN if name != "r2" else None,
        )
        try:
            rollout = self.run(self.turns.open(opening, None))
        except PenstockError as error:
            assert error.reason in ("REQUEST_ID_REUSED", "BUDGET_EXHAUSTED")
        else:
            if rollout.state is not RolloutState.CLOSED:
                known = self.gate.credentials.check(name, self.gate.credentials.token(rollout))
                assert known == (rollout, ALL)

    @rule(name=st.sampled_from(ROLLOUTS))
    def close_rollout(self, name: str) -> None:
        if self.gate.find(name) is not None:
            rollout = self.run(self.turns.close(name, "AGENT_EXITED"))
            assert rollout.totals.open == 0
            known = self.gate.credentials.check(name, self.gate.credentials.token(rollout))
            assert known is Refusal.CLOSED
            self.forget_shelved()

    @rule(name=st.sampled_from(ROLLOUTS))
    def delete_rollout(self, name: str) -> None:
        self.run(self.gate.delete(name))
        assert self.gate.find(name) is None
        self.forget_shelved()

    @rule(name=st.sampled_from(ROLLOUTS), question=st.sampled_from(TEXTS))
    def ask(self, name: str, question: str) -> None:
        rollout = self.gate.find(name)
        if rollout is None or rollout.state is RolloutState.CLOSED:
            return
        body = orjson.dumps({"messages": [{"role": "user", "content": question}]})
        request = ChatCompletions().parse(body, Route(Ask.COMPLETION))
        self.serial += 1
        digest = hashlib.sha256(body).digest()
        arrival = Arrival(Dialect.CHAT_COMPLETIONS, body, digest, f"k{self.serial}", False, Sampling(), "m")
        try:
            call = self.run(self.turns.begin(rollout, arrival, request))
        except PenstockError as error:
            assert error.reason in ("BUDGET_EXHAUSTED", "CALL_LIMIT")
            return
        self.gate.attach(call)
        self.attached[call.id] = 1

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def agent_leaves(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.attached)))
        self.gate.detach(self.gate.call(call_id))
        self.attached[call_id] -= 1
        if not self.attached[call_id]:
            del self.attached[call_id]

    @rule(data=st.data())
    def agent_rejoins(self, data: st.DataObject) -> None:
        calls = [call for call in self.calls() if not call.state.terminal]
        if calls:
            call = data.draw(st.sampled_from(calls))
            self.gate.attach(call)
            self.attached[call.id] = self.attached.get(call.id, 0) + 1

    # Trainers --------------------------------------------------------------------------------------------------------

    @rule(selector=st.sampled_from(SELECTORS), calls=st.integers(1, 3), size=st.sampled_from([1, 1 << 20]))
    def trainer_comes(self, selector: Selector, calls: int, size: int) -> None:
        self.sessions.append(self.gate.dispatcher.join(selector, Credits(calls, size), identity="t", view=View()))

    @rule(data=st.data(), selector=st.sampled_from(SELECTORS))
    def trainer_resumes(self, data: st.DataObject, selector: Selector) -> None:
        if self.sessions:
            old = data.draw(st.sampled_from(self.sessions))
            held = set(old.held) if old.id in {s.id for s in self.gate.dispatcher.sessions()} else set()
            new = self.gate.dispatcher.join(selector, Credits(2), identity="t", view=View(), resume=old.id)
            assert held <= set(new.held)
            self.sessions.append(new)

    def some_session(self, data: st.DataObject) -> Session | None:
        alive = [s for s in self.gate.dispatcher.sessions() if not s.lost]
        return data.draw(st.sampled_from(alive)) if alive else None

    @rule(data=st.data(), how=st.sampled_from(["leave", "lose"]))
    def trainer_goes(self, data: st.DataObject, how: str) -> None:
        session = self.some_session(data)
        if session is not None:
            getattr(self.gate.dispatcher, how)(session)

    @rule(data=st.data(), calls=st.integers(0, 3))
    def credit_changes(self, data: st.DataObject, calls: int) -> None:
        session = self.some_session(data)
        if session is not None:
            self.gate.dispatcher.set_credit(session, Credits(calls))

    @rule(data=st.data(), pause=st.booleans())
    def pause_or_resume(self, data: st.DataObject, pause: bool) -> None:
        session = self.some_session(data)
        if session is not None:
            if pause:
                self.gate.dispatcher.pause(session, 50.0)
            else:
                self.gate.dispatcher.resume(session)

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
        verdict = await self.gate.answers.accept(call_id, lease_id, answer)
        if isinstance(verdict, Accepted):
            await verdict.committed
            await self.gate.call(call_id).ended
        return verdict

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            call_id, lease_id = data.draw(st.sampled_from(self.leases))
            self.run(self._release(call_id, lease_id))

    async def _release(self, call_id: str, lease_id: str) -> None:
        self.gate.answers.release(call_id, lease_id)

    # Time and crashes ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 120.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.gate.tick())
        self.forget_shelved()

    @rule()
    def crash(self) -> None:
        for rollout in self.gate.rollouts():
            if rollout.state is RolloutState.CLOSED:
                self.run(self.turns.conversation(rollout))  # from the shelf, or to it
        self.forget_shelved()
        kept = [call for call in self.calls() if call.rollout.state is not RolloutState.CLOSED]
        before = {call.id: (call.state, call.accepted_digest) for call in kept}
        used = {name: (running.spent, running.run.exhausted) for name, running in self.gate.metering._runs.items()}
        self.run(self._stop())
        self.attached.clear()
        self.run(self._start())
        self.forget_shelved()
        after = {call.id: (call.state, call.accepted_digest) for call in self.calls()}
        kept_runs = {name: (running.spent, running.run.exhausted) for name, running in self.gate.metering._runs.items()}
        assert kept_runs == used
        assert before.keys() == after.keys()
        for call_id, (state, digest) in before.items():
            assert after[call_id][1] == digest
            if state.terminal:
                assert after[call_id][0] is state
            else:
                assert not after[call_id][0].terminal

    def forget_shelved(self) -> None:
        known = {call.id for call in self.calls()}
        self.attached = {key: count for key, count in self.attached.items() if key in known}
        self.leases = [lease for lease in self.leases if lease[0] in known]
        self.accepted = {key: value for key, value in self.accepted.items() if key in known}
        self.ended = {key: value for key, value in self.ended.items() if key in known}

    # Invariants ------------------------------------------------------------------------------------------------------

    @invariant()
    def what_has_ended_stays_as_it_is(self) -> None:
        if not hasattr(self, "turns"):
            return
        for call in self.calls():
            if call.state.terminal:
                assert self.ended.setdefault(call.id, call.state) is call.state
                assert call.ended.done() and call.holder is None and call.plan is None and not call.arrival.body
            else:
                assert not call.ended.done()
                lease = (call.id, call.lease_id)
                if call.state is CallState.LEASED and lease not in self.leases:
                    self.leases.append(lease)
            if call.id in self.accepted:
                assert call.accepted_digest == self.accepted[call.id]

    @invariant()
    def a_call_is_where_its_state_says(self) -> None:
        if not hasattr(self, "turns"):
            return
        held = {call_id: s for s in self.gate.dispatcher.sessions() for call_id in s.held}
        for call in self.calls():
            assert (call.state is CallState.LEASED) == (call.holder is not None)
            assert held.get(call.id) is call.holder
            waits = call.state is CallState.QUEUED and call.rollout.state is not RolloutState.CLOSED
            assert (call.id in call.rollout.queued) == waits
            for lane in call.rollout.lanes:
                assert (call.id in lane._queue) == (waits and not call.rollout.holds)
        for session in self.gate.dispatcher.sessions():
            assert session.held_bytes == sum(call.size for call in session.held.values())

    @invariant()
    def nobody_with_credit_waits_beside_a_call(self) -> None:
        if not hasattr(self, "turns"):
            return
        for rollout in self.gate.rollouts():
            for lane in rollout.lanes:
                # A call that was just given back waits a moment for another session.
                given_back = {key for kind, key in self.gate._deadlines._at if kind == "offer"}
                if set(lane._queue) - given_back:
                    assert not any(session.has_credit for session in lane.sessions.values())
                    assert lane.next_session() is None

    @invariant()
    def a_run_has_used_what_its_rollouts_have_and_had(self) -> None:
        if not hasattr(self, "turns"):
            return
        for running in self.gate.metering._runs.values():
            whole = replace(running.run.gone)
            for rollout in self.gate.rollouts():
                whole.add(rollout.totals.spent)
            assert running.spent == whole
            assert whole.calls <= (RUN.max_calls or 0) or not running.run.exhausted

    @invariant()
    def totals_add_up(self) -> None:
        if not hasattr(self, "turns"):
            return
        for rollout in self.gate.rollouts():
            totals = rollout.totals
            if rollout.shelved:
                assert totals.open == 0 and not rollout.calls
                continue
            assert totals.calls == len(rollout.calls)
            assert totals.open == sum(1 for call in rollout.calls if not call.state.terminal)
            assert totals.delivered == sum(1 for call in rollout.calls if call.state is CallState.DELIVERED)


Machine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGate = Machine.TestCase
