"""Orders of events at the gate that nobody plans: each is one that once lost or kept too much (R146)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import GUARD_S

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_interception import interceptor
from penstock_interception.domain.budgets import Budgets
from penstock_interception.domain.calls import CallState, Dialect, PolicyBounds, RolloutState
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.folded_bodies import FoldedBody
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import Call, Selector, View
from penstock_interception.graph import LogprobsMode, Plan
from penstock_interception.rollouts.answers import INLINE_TOKENS
from penstock_interception.rollouts.conversations import Conversation
from penstock_interception.rollouts.trajectory import Grade, capture
from penstock_interception.rpc import frames
from penstock_interception.rpc.frames import CallWriter, frames_of
from penstock_interception.rpc.intercept_stream import InterceptStream
from penstock_interception.testing import OpenGate, parse

LONG = completion("a", times=INLINE_TOKENS + 1)


class Gatekeeper:
    """Holds up the reading of long answers until it is told to go on."""

    def __init__(self, gate: OpenGate, patch: pytest.MonkeyPatch) -> None:
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        answers = gate.interceptor._answers
        elsewhere = answers._in_thread

        async def held(work: Any) -> Any:
            self.arrived.set()
            await self.go_on.wait()
            return await elsewhere(work)

        patch.setattr(answers, "_in_thread", held)


async def deliver(gate: OpenGate, call: Call, answer: Completion) -> Accepted | Rejection:
    return await gate.interceptor.deliver(call.id, call.lease_id, answer)


@pytest.mark.requirement("R31", "R146")
async def test_deadline_during_a_long_answers_read_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3. No deadline is lost: the call is over, its rollout can be closed, the answer comes too late."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open(budgets=Budgets(call_timeout_s=10.0))
        gate.join()
        call = await gate.ask(rollout, "a")
        held = Gatekeeper(gate, monkeypatch)
        answer = asyncio.ensure_future(deliver(gate, call, LONG))
        await held.arrived.wait()
        await gate.passes(11.0)
        assert call.state is CallState.EXPIRED
        held.go_on.set()
        verdict = await answer
        assert isinstance(verdict, Rejection) and verdict.reason is RejectionReason.CALL_ENDED
        await gate.interceptor.rollouts.close("r1", "DONE")
        assert not (await gate.interceptor.conversations.of(rollout)).graph.calls


@pytest.mark.requirement("R22", "R146")
@pytest.mark.parametrize("good", [True, False])
async def test_session_leaving_during_its_long_answers_read_releases_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    """B3. Nobody who is gone holds a call; what he brought is taken if it holds its rules."""
    answer = LONG if good else replace(LONG, finish_reason=None)
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        session = gate.join()
        call = await gate.ask(rollout, "a")
        held = Gatekeeper(gate, monkeypatch)
        under_way = asyncio.ensure_future(deliver(gate, call, answer))
        await held.arrived.wait()
        gate.interceptor.leave(session)
        assert call.holder is None and call.id in rollout.queued
        held.go_on.set()
        verdict = await under_way
        if isinstance(verdict, Accepted):
            await verdict.committed
            await call.ended
            assert good and call.state is CallState.DELIVERED
        else:
            assert not good and verdict.reason is RejectionReason.INVALID
            other = gate.join()
            assert call.holder is other


@pytest.mark.requirement("R29", "R146")
async def test_long_answer_sent_twice_at_once_is_accepted_twice_and_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3. A repeat is a repeat while the first is still being read, too."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        call = await gate.ask(rollout, "a")
        held = Gatekeeper(gate, monkeypatch)
        both = [asyncio.ensure_future(deliver(gate, call, LONG)) for _ in range(2)]
        await held.arrived.wait()
        held.go_on.set()
        first, second = await asyncio.gather(*both)
        assert isinstance(first, Accepted) and isinstance(second, Accepted)
        assert first.committed is second.committed
        await first.committed
        assert list((await gate.interceptor.conversations.of(rollout)).graph.calls) == [call.id]


@pytest.mark.requirement("R29", "R146")
async def test_a_good_answer_wins_while_a_bad_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B3. The first that holds its rules counts, and not the first that comes."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        call = await gate.ask(rollout, "a")
        held = Gatekeeper(gate, monkeypatch)
        bad = asyncio.ensure_future(deliver(gate, call, replace(LONG, finish_reason=None)))
        await held.arrived.wait()
        good = await deliver(gate, call, completion("bb"))
        assert isinstance(good, Accepted)
        held.go_on.set()
        assert isinstance(await bad, Rejection)
        await call.ended
        assert call.state is CallState.DELIVERED and call.message is not None and call.message.text == "bb"


@pytest.mark.requirement("R22", "R146")
async def test_returned_call_goes_to_another_session_with_room(tmp_path: Path) -> None:
    """B4. However few calls the one who released it holds."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        busy = gate.join(10)
        for text in ("a", "bb", "ccc"):
            await gate.ask(rollout, text)
        idle = gate.join(10)
        call = await gate.ask(rollout, "aa")
        assert call.holder is idle
        await gate.interceptor.release(call.id, call.lease_id)
        assert call.holder is busy
        await gate.interceptor.release(call.id, call.lease_id)
        assert call.holder is idle  # it stayed ready meanwhile


@pytest.mark.requirement("R31", "R35", "R146")
async def test_a_pause_takes_no_time_of_a_call_after_a_restart(tmp_path: Path) -> None:
    """B8. 590 s of a call's 600 were paused: it has most of them left, and so has its rollout."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open(budgets=Budgets(call_timeout_s=600.0, wall_time_s=600.0))
        trainer = gate.join()
        call = await gate.ask(rollout, "a")
        gate.interceptor.sessions.pause(trainer, 1000.0)
        await gate.passes(590.0)
        gate.interceptor.resume(trainer)
        at, age = gate.now[0], rollout.age_s(gate.now[0])
    async with inner_gate(tmp_path, began=at) as gate:
        rollout = gate.interceptor.registry.rollout("r1")
        gate.interceptor.rejoin(rollout.calls[0])
        assert rollout.age_s(at) == age == 0.0
        assert [restored.expires for restored in rollout.calls] == [call.expires] == [at + 600.0]
        trainer = gate.join()
        gate.interceptor.sessions.pause(trainer, 1000.0)
        await gate.passes(500.0)
        at = gate.now[0]
    async with inner_gate(tmp_path, began=at) as gate:  # killed while it was paused
        rollout = gate.interceptor.registry.rollout("r1")
        assert rollout.age_s(at) == 0.0 and [restored.expires for restored in rollout.calls] == [at + 600.0]


@pytest.mark.requirement("R83", "R85", "R146")
async def test_a_sample_whose_turns_have_logprobs_of_two_modes_says_so(tmp_path: Path) -> None:
    """G2. Its mode is none, and the trajectory is USABLE with a finding, not EXACT."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        gate.join()
        said = ["a"]
        for text, mode in (("bb", LogprobsMode.RAW), ("ccc", LogprobsMode.PROCESSED)):
            call = await gate.ask(rollout, *said)
            await deliver(gate, call, completion(text, mode=mode))
            await call.ended
            said += [text, "a"]
        await gate.interceptor.rollouts.close("r1", "DONE")
        got = capture(rollout, await gate.interceptor.conversations.of(rollout))
        assert [(len(sample.turns), sample.logprobs_mode) for sample in got.samples] == [(2, None)]
        assert got.grade is Grade.USABLE
        assert [finding.reason for finding in got.findings if finding.severity == "warning"] == ["LOGPROBS_MODES_MIXED"]


@pytest.mark.requirement("R146")
async def test_rollout_deleted_and_reopened_during_a_read_keeps_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the old one hears that it is gone; the new one's graph is its own."""
    async with inner_gate(tmp_path, closed_kept=1) as gate:
        old = await gate.open()
        gate.join()
        call = await gate.ask(old, "a")
        await deliver(gate, call, completion("bb"))
        await call.ended
        for name in ("r1", "r2"):
            if name != "r1":
                await gate.open(request_id=name, rollout_id=name)
            await gate.interceptor.rollouts.close(name, "DONE")
        assert old.evicted
        loaded, go_on = asyncio.Event(), asyncio.Event()
        load = gate.store.load

        async def held(rollout: Any) -> Any:
            stored = await load(rollout)
            loaded.set()
            await go_on.wait()
            return stored

        monkeypatch.setattr(gate.store, "load", held)
        reading = asyncio.ensure_future(gate.interceptor.conversations.of(old))
        await loaded.wait()
        await gate.interceptor.rollouts.delete("r1")
        new = await gate.open()
        go_on.set()
        with pytest.raises(NotFound):
            await reading
        assert not (await gate.interceptor.conversations.of(new)).graph.calls
        assert not gate.interceptor.registry.find_call(call.id)


@pytest.mark.requirement("R146")
async def test_two_deletions_at_once_do_not_delete_what_is_opened_after_them(tmp_path: Path) -> None:
    """The second one is over with the first; the new rollout of that id stays, after a restart too."""
    async with inner_gate(tmp_path) as gate:
        await gate.interceptor.rollouts.close((await gate.open()).id, "DONE")
        first, second = (asyncio.ensure_future(gate.interceptor.rollouts.delete("r1")) for _ in range(2))
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        new = await gate.open()
        await asyncio.gather(first, second)
        assert gate.interceptor.registry.find("r1") is new
    async with inner_gate(tmp_path) as gate:
        assert gate.interceptor.registry.rollout("r1").state is RolloutState.OPEN


@pytest.mark.requirement("R22", "R32", "R146")
async def test_a_prompt_that_no_message_carries_fails_its_call_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1. It is never leased, whatever the model's context; the trainer gets the next call."""
    monkeypatch.setattr(interceptor, "MAX_PROMPT_TOKENS", 64)
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        session = gate.join()
        long, short = await gate.ask(rollout, "b" * 200), await gate.ask(rollout, "a")
        assert (long.state, long.end_reason, long.leases) == (CallState.FAILED, "CONTEXT_EXCEEDED", 0)
        assert list(session.held) == [short.id]


@pytest.mark.requirement("R22", "R146")
async def test_a_call_that_cannot_be_written_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1. Ids and body are counted together; one bad item does not end the session of whoever gets it."""
    monkeypatch.setattr(frames, "CALL_BYTES", 2000)
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        session = gate.join()
        text_too = await gate.ask(rollout, "b" * 400)
        good = await gate.ask(rollout, "a")
        huge = await gate.ask(rollout, "a" * 900)
        bad = await gate.ask(rollout, "ccc")

        def read(dialect: Dialect, body: bytes) -> ChatRequest:
            if b"ccc" in body:
                raise ValueError("no such text")
            return parse(dialect, body)

        writer = CallWriter(read, gate.interceptor.fail)
        sent = [
            (call.call_id, call.view_truncated)
            for frame in frames_of(session.drain(), writer, View(messages=True))
            for call in frame.calls.calls
        ]
        assert sent == [(text_too.id, True), (good.id, False)]
        assert (huge.state, huge.end_reason) == (CallState.FAILED, "CALL_TOO_LARGE")
        assert (bad.state, bad.end_reason) == (CallState.FAILED, "INTERNAL")


@pytest.mark.requirement("R41", "R146")
async def test_another_trainers_announcement_makes_no_answer_stale_where_there_is_no_run(tmp_path: Path) -> None:
    """Rollouts without a run share no newest version; what is closed leaves none behind."""
    async with inner_gate(tmp_path) as gate:
        bounds = PolicyBounds(max_staleness=0)
        mine = await gate.open(policy=bounds)
        await gate.open(request_id="r2", rollout_id="r2", policy=bounds)
        leasing = gate.interceptor.sessions
        for name, version in (("r2", 9), ("r1", 3)):
            selector = Selector(rollout_ids=frozenset({name}))
            gate.join(4, selector, policy_version=version)
        call = await gate.ask(mine, "a")
        assert call.min_policy_version == 3
        for name in ("r1", "r2"):
            await gate.interceptor.rollouts.close(name, "DONE")
        assert not leasing._newest and not leasing._in_run


@pytest.mark.requirement("R8", "R146")
async def test_a_call_with_what_the_journal_cannot_hold_is_nobodys(tmp_path: Path) -> None:
    """B2. Its agent hears of an error; no trainer keeps it, and no answer to it counts."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        session = gate.join()
        with pytest.raises(TypeError):
            await gate.ask(rollout, "a", model_requested="\ud83d")
        assert not session.held and rollout.totals.open == 0
        unbound = await gate.ask(rollout, "a", key="\ud83d")
        await unbound.ended
        assert unbound.end_reason == "JOURNAL_FAILED" and not session.held


@pytest.mark.requirement("R146")
async def test_a_rollout_closed_during_its_deletion_leaves_its_ids_next_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deleted one stood among the closed ones, and its eviction took the conversation of the living one."""
    async with inner_gate(tmp_path, closed_kept=1) as gate:
        await gate.open()
        await gate.interceptor.rollouts.close("r1", "DONE")
        under_way, delete = asyncio.Event(), gate.store.delete_rollout

        def deleted(*given: Any) -> asyncio.Future[list[int]]:
            under_way.set()
            return delete(*given)

        monkeypatch.setattr(gate.store, "delete_rollout", deleted)
        deleting = asyncio.ensure_future(gate.interceptor.rollouts.delete("r1"))
        await under_way.wait()
        await asyncio.gather(deleting, gate.interceptor.rollouts.close("r1", "DONE"))
        new = await gate.open(request_id="again")
        for name in ("r2", "r3"):
            await gate.open(rollout_id=name, request_id=name)
            await gate.interceptor.rollouts.close(name, "DONE")
        gate.join()
        assert (await gate.ask(new, "a")).state is CallState.LEASED


@pytest.mark.requirement("R29", "R146")
async def test_a_long_prompt_without_its_conversation_fails_alone(tmp_path: Path) -> None:
    """Its conversation may be gone before the thread begins: that call fails, and the service goes on."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        call = await gate.ask(rollout, "a " * interceptor.INLINE_BYTES)
        gate.interceptor.conversations.forget(rollout.id)
        await asyncio.wait_for(call.ended, GUARD_S)
        assert call.state is CallState.FAILED and call.end_reason == "INTERNAL"
        assert (await gate.open(rollout_id="r2", request_id="q2")).state is RolloutState.OPEN


@pytest.mark.requirement("R32", "R137")
async def test_a_prompt_with_images_is_made_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short its new text is: small files can have long headers, and all of them are looked at."""
    on_loop, made = threading.get_ident(), list[bool]()
    plan = Conversation.plan

    def noted(conversation: Conversation, *given: Any) -> Plan:
        made.append(threading.get_ident() == on_loop)
        return plan(conversation, *given)

    monkeypatch.setattr(Conversation, "plan", noted)
    async with inner_gate(tmp_path) as gate:
        rollout, session = await gate.open(), gate.join()
        call = await gate.ask(rollout, "a", folded=FoldedBody(b"{}", (), {}))
        async with asyncio.timeout(GUARD_S):
            while call.state is not CallState.LEASED:
                await session.wait()
                session.drain()
        await gate.ask(rollout, "b")
    assert made == [False, True]


@pytest.mark.requirement("R22", "R146")
async def test_a_session_that_resumes_keeps_the_end_of_its_pause(tmp_path: Path) -> None:
    """A trainer that does not ask again would find its calls held for longer than it asked."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        old = gate.join()
        gate.interceptor.sessions.pause(old, 50.0)
        await gate.passes(20.0)
        new = gate.join(resume=old.id)
        await gate.passes(29.0)
        assert rollout.paused_by == {new.id}
        await gate.passes(1.0)
        assert not rollout.paused_by


@pytest.mark.requirement("R31", "R146")
async def test_a_replaced_session_begins_no_pause(tmp_path: Path) -> None:
    """Its stream may still be read for a while; nothing would end such a pause."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open()
        old = gate.join()
        gate.join(resume=old.id)

        async def late() -> AsyncIterator[pb.InterceptRequest]:
            yield pb.InterceptRequest(pause=pb.PauseCalls())

        await InterceptStream(old, gate.interceptor, 15.0, asyncio.Event()).read(late())
        assert old.taken_over and not rollout.paused_by


@pytest.mark.requirement("R60", "R146")
async def test_a_closed_rollout_admits_no_call_that_was_on_its_way(tmp_path: Path) -> None:
    """Its key was good when the request began; meanwhile the id may be another rollout's."""
    async with inner_gate(tmp_path) as gate:
        closed = await gate.open()
        await gate.interceptor.rollouts.close(closed.id, "AGENT_EXITED")
        await gate.interceptor.rollouts.delete(closed.id)
        again = await gate.open(request_id="again")
        with pytest.raises(FailedPrecondition, match="closed"):
            await gate.ask(closed, "from the old agent")
        assert not closed.calls and not again.calls
        assert (await gate.ask(again, "from the new one")).index == 0
