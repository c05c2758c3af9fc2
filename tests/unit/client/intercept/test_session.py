"""The Intercept session against a gate that follows a script."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.unit.client.conftest import TOKEN, Fakes, Gate, Refusal

from penstock.client import (
    AlreadyDelivered,
    CallEnded,
    Completion,
    InvalidCompletion,
    ModelCall,
    Penstock,
    PenstockError,
    ResultRejected,
    Sampling,
    SessionLost,
    StalePolicy,
    Unauthenticated,
    Unavailable,
    Violation,
)
from penstock.client.transport.rpc import Backoff
from penstock.interception.v1 import intercept_service_pb2 as icpt

ANSWER = Completion.of_tokens([5, 6], [-0.5, -0.25], policy_version=3)


async def take(session: Any, count: int) -> list[ModelCall]:
    """The next calls of a session."""
    taken = []
    async for call in session.calls():
        taken.append(call)
        if len(taken) == count:
            break
    return taken


@pytest.mark.requirement("R82", "R87")
async def test_call_arrives_with_its_tokens_and_is_delivered_with_the_samples(fakes: Fakes, ps: Penstock) -> None:
    """What is delivered are the engine's own ids and logprobs, bit for bit; R87: with their policy version."""
    seen: dict[str, Any] = {}

    async def gate(stream: Gate) -> None:
        seen["hello"] = await stream.hello()
        call = icpt.ModelCall(call_id="c1", lease_id="l1", rollout_id="r1", group_index=0, prompt_count=3)
        call.prompt_token_ids = np.array([1, 2, 3], "<i4").tobytes()
        call.sampling.temperature = 0.0
        await stream.send(calls=icpt.Calls(calls=[call]))
        seen.update(await stream.results())
        await stream.accept("c1")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept(run_id="run", credits=7, policy_version=3, identity="me") as session:
        (call,) = await take(session, 1)
        assert call.prompt_token_ids.tolist() == [1, 2, 3]
        assert (call.sampling.temperature, call.sampling.top_p) == (0.0, None)
        assert (call.group_index, call.group_id) == (0, None)
        await call.deliver(ANSWER)
        assert call.ended

    hello = seen["hello"]
    assert (hello.selector.run_id, hello.credits.calls, hello.policy_version, hello.identity) == ("run", 7, 3, "me")
    assert not hello.HasField("resume_session_id")
    span = seen["c1"].completion.span
    assert seen["c1"].lease_id == "l1"
    assert np.frombuffer(span.token_ids, "<i4").tolist() == [5, 6]
    assert np.frombuffer(span.logprobs, "<f4").tolist() == [-0.5, -0.25]
    assert [(v.policy_version, v.start, v.end) for v in span.versions] == [(3, 0, 2)]
    assert fakes.metadata[0]["authorization"] == f"Bearer {TOKEN}"


async def test_results_that_are_ready_together_travel_in_one_frame(fakes: Fakes, ps: Penstock) -> None:
    """Frames carry what is ready: one message per call would cost several times as much."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("a", "b", "c")
        assert set(await stream.results()) == {"a", "b", "c"}
        await stream.accept("a", "b", "c")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        calls = await take(session, 3)
        await asyncio.gather(*(call.deliver(ANSWER) for call in calls))


@pytest.mark.requirement("R29")
@pytest.mark.parametrize(
    ("reason", "kind", "again"),
    [
        (icpt.ResultRejected.REASON_INVALID, InvalidCompletion, True),
        (icpt.ResultRejected.REASON_STALE_POLICY, StalePolicy, True),
        (icpt.ResultRejected.REASON_ALREADY_DELIVERED, AlreadyDelivered, False),
        (icpt.ResultRejected.REASON_CALL_ENDED, CallEnded, False),
    ],
)
async def test_rejected_result_raises_typed_and_may_be_answered_while_leased(
    fakes: Fakes, ps: Penstock, reason: Any, kind: type[ResultRejected], again: bool
) -> None:
    """A delivery is validated against its call, and the reason comes out as a type."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        await stream.results()
        rejected = icpt.ResultRejected(call_id="c1", reason=reason, message="no", violations=["logprobs: nan"])
        await stream.send(acknowledged=icpt.ResultsAcknowledged(rejected=[rejected]))
        if again:
            await stream.results()
            await stream.accept("c1")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        with pytest.raises(kind, match="logprobs: nan") as refused:
            await call.deliver(ANSWER)
        assert refused.value.violations == (Violation("logprobs", "nan"),)
        assert call.ended is not again
        if again:
            await call.deliver(ANSWER)
            with pytest.raises(AlreadyDelivered):
                await call.deliver(ANSWER)
        else:
            with pytest.raises(CallEnded):
                await call.deliver(ANSWER)


@pytest.mark.requirement("R34")
async def test_after_a_break_the_session_resumes_and_sends_unacknowledged_results_again(
    fakes: Fakes, ps: Penstock
) -> None:
    """A broken connection neither loses a result nor has a call answered twice."""
    seen: dict[str, Any] = {}

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("sent", "open", "lost")
        await stream.results()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def resumes(stream: Gate) -> None:
        seen["hello"] = await stream.hello(resumed=True, held=("open",))
        seen["again"] = await stream.results()
        await stream.accept("sent")
        seen["open"] = await stream.results()
        await stream.accept("open")
        await stream.goodbye()

    fakes.converse(breaks, resumes)
    async with ps.intercept() as session:
        calls = {call.call_id: call for call in await take(session, 3)}
        await calls["sent"].deliver(ANSWER)
        assert calls["lost"].ended and calls["lost"].end_reason == "LEASE_LOST"
        assert not calls["open"].ended
        await calls["open"].deliver(ANSWER)
    assert seen["hello"].resume_session_id == "s1"
    assert set(seen["again"]) == {"sent"}


@pytest.mark.requirement("R13", "R26")
async def test_a_session_that_was_not_read_in_time_is_taken_up_again(fakes: Fakes, ps: Penstock) -> None:
    """A trainer that stood still for long goes on with the calls that it has."""

    async def cut(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        await stream.fail(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"))

    async def again(stream: Gate) -> None:
        await stream.hello("s1", resumed=True, held=("c1",))
        assert set(await stream.results()) == {"c1"}
        await stream.accept("c1")
        await stream.goodbye()

    fakes.converse(cut, again)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        await call.deliver(ANSWER)


@pytest.mark.requirement("R34")
async def test_call_leased_anew_is_delivered_once_under_the_new_lease(fakes: Fakes, ps: Penstock) -> None:
    """One generation, one turn, although the gate had forgotten the session."""
    seen: dict[str, Any] = {}

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1", lease="old")
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def forgot(stream: Gate) -> None:
        await stream.hello("s2", resumed=False)
        await stream.calls("c1", lease="new")
        await stream.calls("c2", lease="other")
        seen.update(await stream.results())
        await stream.accept("c1")
        await stream.goodbye()

    fakes.converse(breaks, forgot)
    async with ps.intercept() as session:
        first, second = await take(session, 2)
        assert (first.call_id, second.call_id) == ("c1", "c2")
        await first.deliver(ANSWER)
        assert session.session_id == "s2"
    assert seen["c1"].lease_id == "new"


@pytest.mark.requirement("R26")
async def test_a_cancelled_call_ends_and_its_late_answer_says_so(fakes: Fakes, ps: Penstock) -> None:
    """That a call needs no answer any more is visible, so that its generation can be aborted."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1", "c2")
        await stream.send(cancelled=icpt.CallsCancelled(call_ids=["c1"], reason="AGENT_GONE"))
        await stream.send(rollouts_closed=icpt.RolloutsClosed(rollout_ids=["r1"]))
        await stream.calls("c3", rollout_id="r2")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        taken = []
        async for call in session.calls():
            if call.call_id == "c3":
                break
            taken.append(call)  # one that ended before it could be handed out is not handed out at all
        for call in taken:
            await call.wait_ended()
            assert call.end_reason in ("AGENT_GONE", "ROLLOUT_CLOSED")
            with pytest.raises(CallEnded):
                await call.deliver(ANSWER)


@pytest.mark.requirement("R26")
async def test_changed_credits_keep_the_byte_bound_when_none_is_given(fakes: Fakes, ps: Penstock) -> None:
    """Backpressure holds: a window that is changed for its calls does not lose its bytes."""
    seen: list[tuple[int, int | None]] = []

    async def gate(stream: Gate) -> None:
        await stream.hello()
        for _ in range(3):
            frame = await stream.read()
            assert frame is not None and frame.HasField("credits"), frame
            seen.append((frame.credits.calls, frame.credits.bytes))
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept(credits=2, credit_bytes=1000) as session:
        session.set_credits(0)
        session.set_credits(4, 500)
        session.set_credits(3)
    assert seen == [(0, 1000), (4, 500), (3, 500)]


async def test_pause_returns_when_the_gate_holds_calls_and_resume_when_they_flow(fakes: Fakes, ps: Penstock) -> None:
    """Decision 8: the agent never sees a weight sync."""
    seen: list[str] = []

    async def gate(stream: Gate) -> None:
        await stream.hello()
        for _ in range(3):
            frame = await stream.read()
            assert frame is not None
            seen.append(frame.WhichOneof("frame") or "")
            if frame.HasField("pause"):
                assert frame.pause.reason == "weight sync"
                await stream.send(paused=icpt.CallsPaused(open_calls=4))
            elif frame.HasField("resume"):
                await stream.send(resumed=icpt.CallsResumed())
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        assert await session.pause("weight sync") == 4
        session.announce(8)
        await session.resume()
    assert seen == ["pause", "policy", "resume"]


def pauses_until(broken: asyncio.Event) -> Callable[[Gate], Awaitable[None]]:
    """A stream that is paused, and breaks once that is set."""

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.read()
        await stream.send(paused=icpt.CallsPaused())
        await broken.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    return breaks


async def test_a_pause_is_asked_for_again_when_the_gate_forgot_the_session(fakes: Fakes, ps: Penstock) -> None:
    """Decision 8: calls stay held over a break."""
    broken = asyncio.Event()

    async def forgot(stream: Gate) -> None:
        await stream.hello("s2", resumed=False)
        frame = await stream.read()
        assert frame is not None and frame.HasField("pause")
        await stream.send(paused=icpt.CallsPaused())
        await stream.calls("c1")
        frame = await stream.read()
        assert frame is not None and frame.HasField("resume")
        await stream.send(resumed=icpt.CallsResumed())
        await stream.goodbye()

    fakes.converse(pauses_until(broken), forgot)
    async with ps.intercept() as session:
        await session.pause()
        broken.set()
        await take(session, 1)
        assert session.session_id == "s2"
        await session.resume()


@pytest.mark.requirement("R22", "R26")
async def test_a_pause_is_asked_for_again_of_a_gate_that_resumes_the_session(fakes: Fakes, ps: Penstock) -> None:
    """A gate that was killed knows the session from its journal, and not its pause: what it leases before it has read
    the pause is put back.
    """
    broken, put_back = asyncio.Event(), asyncio.Event()

    async def resumes(stream: Gate) -> None:
        await stream.hello(resumed=True)
        await stream.calls("leased in the pause")
        frame = await stream.read()
        assert frame is not None and frame.HasField("pause"), frame
        assert frame.pause.reason == "weights" and 0 < frame.pause.max_duration.ToMilliseconds() <= 90_000
        assert (await stream.results())["leased in the pause"].HasField("release")
        await stream.send(paused=icpt.CallsPaused())
        put_back.set()
        frame = await stream.read()
        assert frame is not None and frame.HasField("resume"), frame
        await stream.send(resumed=icpt.CallsResumed())
        await stream.calls("c1")
        await stream.goodbye()

    fakes.converse(pauses_until(broken), resumes)
    async with ps.intercept() as session:
        assert await session.pause("weights", max_duration=90.0) == 0
        broken.set()
        await put_back.wait()
        await session.resume()
        (call,) = await take(session, 1)
        assert call.call_id == "c1"


@pytest.mark.requirement("R26")
async def test_pause_after_an_unawaited_resume_is_requested_itself(fakes: Fakes, ps: Penstock) -> None:
    """Who is told that calls are held may rely on it: an older pause's answer is not the newest one's."""
    seen: list[str] = []

    async def gate(stream: Gate) -> None:
        await stream.hello()
        while "policy" not in seen:
            frame = await stream.read()
            assert frame is not None
            seen.append(frame.WhichOneof("frame") or "")
        for number, kind in enumerate(seen):
            if kind == "pause":
                await stream.send(paused=icpt.CallsPaused(open_calls=number))
            elif kind == "resume":
                await stream.send(resumed=icpt.CallsResumed())
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        asked = [
            session.pause(),
            session.resume(),
            session.pause(),
            session.pause(),
            session.resume(),
            session.resume(),
        ]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(item) for item in asked]
            await asyncio.sleep(0)
            session.announce(1)
    assert seen == ["pause", "resume", "pause", "resume", "policy"]
    assert [answer.result() for answer in answers] == [0, None, 2, 2, None, None]


async def test_late_answer_to_a_resume_does_not_end_a_newer_pause(fakes: Fakes, ps: Penstock) -> None:
    """Decision 8: calls stay held over a break, also where they had flowed in between."""
    asked = asyncio.Event()
    seen: list[str] = []

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await asked.wait()
        for _ in range(3):
            await stream.read()
        await stream.send(paused=icpt.CallsPaused())
        await stream.send(resumed=icpt.CallsResumed())
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def resumes(stream: Gate) -> None:
        await stream.hello(resumed=True)
        frame = await stream.read()
        assert frame is not None
        seen.append(frame.WhichOneof("frame") or "")
        await stream.send(paused=icpt.CallsPaused(open_calls=7))
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def forgot(stream: Gate) -> None:
        await stream.hello("s2", resumed=False)
        await stream.calls("c1")
        while "policy" not in seen:
            frame = await stream.read()
            assert frame is not None
            seen.append(frame.WhichOneof("frame") or "")
            if frame.HasField("results"):
                assert [item.HasField("release") for item in frame.results.results] == [True]
                await stream.send(paused=icpt.CallsPaused())
                await stream.calls("c2")
        await stream.goodbye()

    fakes.converse(breaks, resumes, forgot)
    async with ps.intercept() as session:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.pause())
            tasks.create_task(session.resume())
            newest = tasks.create_task(session.pause())
            await asyncio.sleep(0)
            asked.set()
        assert newest.result() == 7
        (call,) = await take(session, 1)
        assert call.call_id == "c2", "the one that came before the pause was in force is put back"
        session.announce(1)
    assert seen == ["pause", "pause", "results", "policy"]


async def test_a_pause_that_ran_out_is_not_wanted_any_more(fakes: Fakes, ps: Penstock) -> None:
    """Decision 8: a pause has an end, which a gate that comes back does not undo."""
    seen: list[str] = []

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.read()
        await stream.send(paused=icpt.CallsPaused())
        await stream.send(resumed=icpt.CallsResumed())
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def forgot(stream: Gate) -> None:
        await stream.hello("s2", resumed=False)
        await stream.calls("c1")
        frame = await stream.read()
        assert frame is not None
        seen.append(frame.WhichOneof("frame") or "")
        await stream.goodbye()

    fakes.converse(breaks, forgot)
    async with ps.intercept() as session:
        await session.pause(max_duration=0.001)
        await take(session, 1)
        session.announce(1)
    assert seen == ["policy"]


@pytest.mark.requirement("R24", "R148")
async def test_absent_gate_is_awaited_when_a_session_opens(fakes: Fakes, ps: Penstock) -> None:
    """A trainer that is started before the gate, or while it restarts, needs no loop of its own; also where the
    gate's core drops the call without a word, as it does with everybody's under a flood (R148)."""

    async def away(stream: Gate) -> None:
        await stream.read()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def drops(stream: Gate) -> None:
        await stream.read()
        await stream.fail(Refusal(grpc.StatusCode.CANCELLED, message=""))

    async def serves(stream: Gate) -> None:
        await stream.hello()
        await stream.goodbye()

    fakes.converse(away, drops, serves)
    async with ps.intercept() as session:
        assert session.session_id == "s1"


@pytest.mark.requirement("R27")
async def test_gate_that_stays_away_is_an_error_with_advice() -> None:
    """The wait is bounded, and a service that is not reachable is a clear error."""
    from penstock.client import connect

    target = {"interception": "127.0.0.1:1"}
    async with connect(target) as ps:
        with pytest.raises(Unavailable, match="penstock up"):
            async with ps.intercept(reconnect_timeout=0.0):
                raise AssertionError("entered without a gate")


@pytest.mark.requirement("R5")
async def test_a_refused_token_is_an_error_and_not_tried_again(fakes: Fakes, ps: Penstock) -> None:
    """What the gate refuses comes out as its type."""

    async def refuses(stream: Gate) -> None:
        await stream.read()
        await stream.fail(Refusal(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID"))

    fakes.converse(refuses)
    with pytest.raises(Unauthenticated) as caught:
        async with ps.intercept():
            raise AssertionError("entered without a token")
    assert caught.value.reason == "CREDENTIAL_INVALID"


@pytest.mark.requirement("R5")
async def test_a_refusal_that_grpc_forgot_is_asked_for_again(fakes: Fakes, ps: Penstock) -> None:
    """Where the gate ended the stream while Hello was written, the next attempt hears why; not forever."""

    async def forgotten(stream: Gate) -> None:
        await stream.fail(Refusal(grpc.StatusCode.INTERNAL, message="Internal error from Core"))

    async def refuses(stream: Gate) -> None:
        await stream.read()
        await stream.fail(Refusal(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID"))

    fakes.converse(forgotten, forgotten, refuses)
    with pytest.raises(Unauthenticated, match="says the interception service at"):
        async with ps.intercept():
            raise AssertionError("entered without a token")
    fakes.converse(forgotten, forgotten, forgotten)
    with pytest.raises(Unavailable) as caught:
        async with ps.intercept():
            raise AssertionError("entered without a gate")
    assert caught.value.reason == "STREAM_BROKEN"


@pytest.mark.requirement("R24")
async def test_permanent_error_ends_the_session_for_all_waiters(fakes: Fakes, ps: Penstock) -> None:
    """A typed end, no hang."""

    async def taken_over(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        await stream.results()
        await stream.fail(Refusal(grpc.StatusCode.ABORTED, "SESSION_TAKEN_OVER"))

    fakes.converse(taken_over)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        with pytest.raises(PenstockError) as delivered:
            await call.deliver(ANSWER)
        with pytest.raises(PenstockError) as iterated:
            await take(session, 1)
        assert delivered.value is iterated.value
        assert delivered.value.reason == "SESSION_TAKEN_OVER"


@pytest.mark.requirement("R24")
async def test_a_session_that_cannot_be_taken_up_again_is_lost(fakes: Fakes, ps: Penstock) -> None:
    """Reconnecting has an end."""

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    fakes.converse(breaks)
    async with ps.intercept(reconnect_timeout=0.0) as session:
        with pytest.raises(SessionLost):
            await take(session, 2)


@pytest.mark.requirement("R32")
async def test_cancelled_delivery_is_still_sent_and_harmless(fakes: Fakes, ps: Penstock) -> None:
    """A cancelled wait releases what it held."""
    got = asyncio.Event()
    go = asyncio.Event()

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1", "c2")
        await stream.results()
        got.set()
        await go.wait()
        await stream.accept("c1")
        await stream.results()
        await stream.accept("c2")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        one, two = await take(session, 2)
        delivery = asyncio.ensure_future(one.deliver(ANSWER))
        await got.wait()
        delivery.cancel()
        await asyncio.wait([delivery])
        go.set()
        await two.deliver(ANSWER)
        assert one.ended


async def test_leaving_the_block_sends_what_waits_and_says_goodbye(fakes: Fakes, ps: Penstock) -> None:
    """An end of stream alone would be ambiguous; Goodbye has unanswered calls queued again at once."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        frame = await stream.read()
        assert frame is not None and frame.HasField("policy")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        session.announce(2)
    assert call.ended
    assert [call async for call in session.calls()] == []


async def test_a_result_that_no_frame_can_carry_fails_alone(fakes: Fakes, ps: Penstock) -> None:
    """A bad or oversize item fails alone, the stream goes on."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        await stream.results()
        await stream.accept("c1")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        with pytest.raises(InvalidCompletion):
            await call.deliver(Completion.of_tokens(np.zeros(9_000_000, np.int32)))
        await call.fail("ENGINE_DOWN", "gave up", retriable=True)


@pytest.mark.requirement("R29")
async def test_a_result_that_cannot_be_sent_fails_alone(fakes: Fakes, ps: Penstock) -> None:
    """R29: its caller learns why and may answer again; other results and the session go on."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("bad", "good")
        assert set(await stream.results()) == {"good"}
        await stream.accept("good")
        assert set(await stream.results()) == {"bad"}
        await stream.accept("bad")
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        bad, good = await take(session, 2)
        for answer in (
            bad.deliver(Completion.of_text("half a character: \ud800")),
            bad.deliver(Completion.of_tokens([1], [-1.0], policy_version=1.5)),  # type: ignore[arg-type]
            bad.fail("ENGINE", "\ud800"),
            bad.delegate(Sampling(max_tokens=2**40)),
        ):
            with pytest.raises(InvalidCompletion) as caught:
                await answer
            assert caught.value.reason == "RESULT_NOT_SENDABLE"
        await good.deliver(ANSWER)
        await bad.deliver(ANSWER)


async def test_what_is_said_between_hello_and_welcome_reaches_the_gate(fakes: Fakes, ps: Penstock) -> None:
    """A policy version, credits and a pause of that moment arrive once, after Welcome."""
    broken, greeted, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await broken.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def forgot(stream: Gate) -> None:
        greeted.set()
        hello = await stream.hello("s2", answered=answered)
        assert not hello.HasField("policy_version")
        for _ in range(3):
            frame = await stream.read()
            assert frame is not None
            seen.append(frame.WhichOneof("frame") or "")
        await stream.send(paused=icpt.CallsPaused())
        await stream.goodbye()

    fakes.converse(breaks, forgot)
    async with ps.intercept() as session:
        broken.set()
        await greeted.wait()
        session.announce(7)
        session.set_credits(3)
        pausing = asyncio.create_task(session.pause())
        await asyncio.sleep(0)
        answered.set()
        await pausing
    assert seen == ["policy", "credits", "pause"]


async def test_version_that_is_no_integer_leaves_the_session_intact(fakes: Fakes, ps: Penstock) -> None:
    """It is refused where it is given, and no later Hello has it."""
    broken = asyncio.Event()

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await broken.wait()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    async def again(stream: Gate) -> None:
        assert (await stream.hello(resumed=True)).policy_version == 2
        await stream.calls("c1")
        await stream.goodbye()

    fakes.converse(breaks, again)
    async with ps.intercept(policy_version=2) as session:
        with pytest.raises(TypeError):
            session.announce(1.5)  # type: ignore[arg-type]
        broken.set()
        await take(session, 1)


async def test_silent_gate_is_noticed_while_a_result_is_written(fakes: Fakes, ps: Penstock) -> None:
    """A gate that neither reads nor speaks is left, and the result is sent to the next one."""
    over = asyncio.Event()

    async def stuck(stream: Gate) -> None:
        await stream.hello(interval=0.05)
        await stream.calls("c1")
        await over.wait()

    async def reads(stream: Gate) -> None:
        await stream.hello(resumed=True, held=("c1",))
        await stream.results()
        await stream.accept("c1")
        over.set()
        await stream.goodbye()

    fakes.converse(stuck, reads)
    async with ps.intercept() as session:
        (call,) = await take(session, 1)
        await call.deliver(Completion.of_tokens(np.zeros(4 << 20, np.int32)))


async def test_close_does_not_wait_to_reconnect(fakes: Fakes, ps: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that waits to reconnect is over at once: nothing has to time out."""
    waits = asyncio.Event()

    def an_hour(_: Backoff, __: object = None) -> float:
        waits.set()
        return 3600.0

    async def breaks(stream: Gate) -> None:
        await stream.hello()
        await stream.fail(Refusal(grpc.StatusCode.UNAVAILABLE))

    monkeypatch.setattr(Backoff, "next", an_hour)
    monkeypatch.setattr("penstock.client.intercept.stream._GOODBYE_S", 3600.0)
    fakes.converse(breaks)
    async with ps.intercept() as session:
        await waits.wait()
        await asyncio.sleep(0)
    assert await take(session, 1) == []
