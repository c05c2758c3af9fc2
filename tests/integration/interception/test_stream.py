"""The trainer's stream: credits, pauses, lost sessions, rejections, budgets; and its unary twin."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support.waiting import limits

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.rpc_status import from_rpc_error

ASK: list[Any] = [{"role": "user", "content": "list the files"}]


def asking(rollout: Any, text: str = "list the files", **options: Any) -> asyncio.Task[Any]:
    messages: list[Any] = [{"role": "user", "content": text}]
    return asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=messages, **options))


async def wait_for_calls(service: Any, rollout: Any, count: int, state: int = trajectory_pb2.CALL_STATE_QUEUED) -> None:
    """Returns when `count` calls of the rollout are in a state, by watching."""
    seen: dict[str, int] = {}
    async for event in service.gate.WatchCalls(
        gate.WatchCallsRequest(rollout_ids=[rollout.rollout_id], after_sequence=rollout.sequence)
    ):
        if event.HasField("changed"):
            seen[event.changed.call.call_id] = event.changed.call.state
        if sum(1 for value in seen.values() if value == state) >= count:
            return


async def opened(service: Any, *arguments: Any, **options: Any) -> Any:
    """An open rollout, with the position of the watch before its first call."""
    rollout = await service.open(*arguments, **options)
    async for event in service.gate.WatchCalls(gate.WatchCallsRequest(rollout_ids=[rollout.rollout_id])):
        rollout.sequence = event.started.sequence
        break
    return rollout


@pytest.mark.requirement("R26")
async def test_credits_bound_what_a_session_holds(service: Any) -> None:
    """Two credits are two calls; the third comes when one is answered."""
    rollout = await opened(service)
    trainer = await service.trainer(credits=pb.Credits(calls=2))
    tasks = [asking(rollout, f"question {n}") for n in range(3)]
    first, second = await trainer.call(), await trainer.call()
    await wait_for_calls(service, rollout, 2, trajectory_pb2.CALL_STATE_LEASED)
    assert sum(len(frame.calls.calls) for frame in trainer.frames) == 2
    await trainer.deliver(trainer.result(first, "one"))
    third = await trainer.call()
    await trainer.deliver(trainer.result(second, "two"), trainer.result(third, "three"))
    answers = await asyncio.gather(*tasks)
    assert sorted(a.choices[0].message.content for a in answers) == ["one", "three", "two"]


async def test_selectors_bring_each_trainer_its_own_groups_calls(service: Any) -> None:
    """A session gets the calls that match every condition that it set, and no others."""
    one = await service.open(group_id="g1", labels={"kind": "a"})
    two = await service.open(group_id="g2", labels={"kind": "a"})
    first = await service.trainer(selector=pb.CallSelector(group_id="g1"))
    second = await service.trainer(selector=pb.CallSelector(group_id="g2", labels={"kind": "a"}))
    nobody = await service.trainer(selector=pb.CallSelector(group_id="g1", labels={"kind": "b"}))
    tasks = [asking(one), asking(two)]
    assert (await first.answer("one")).rollout_id == one.rollout_id
    assert (await second.answer("two")).rollout_id == two.rollout_id
    await asyncio.gather(*tasks)
    assert not [frame for frame in nobody.frames if frame.HasField("calls")]


async def test_a_pause_holds_every_call_until_resume(service: Any) -> None:
    """Decision 8: nothing is leased during a weight sync; a streaming agent sees keep-alives only."""
    rollout, trainer = await opened(service), await service.trainer()
    await trainer.send(pause=pb.PauseCalls(reason="weight sync"))
    assert (await trainer.frame("paused")).open_calls == 0
    task = asking(rollout)
    await wait_for_calls(service, rollout, 1)
    assert not [frame for frame in trainer.frames if frame.HasField("calls")]
    await trainer.send(resume=pb.ResumeCalls())
    await trainer.frame("resumed")
    await trainer.answer("after the sync")
    assert (await task).choices[0].message.content == "after the sync"


async def test_a_pause_that_runs_out_lets_the_calls_flow(service: Any) -> None:
    """A trainer that died in its pause holds nobody for ever."""
    rollout, trainer = await service.open(), await service.trainer()
    await trainer.send(pause=pb.PauseCalls(max_duration=Duration(nanos=1_000_000)))
    await trainer.frame("resumed")
    task = asking(rollout)
    await trainer.answer("ok")
    await task


@pytest.mark.requirement("R22")
async def test_goodbye_gives_unanswered_calls_to_another_session_at_once(service: Any) -> None:
    """Nothing waits for a trainer that left in order."""
    rollout, leaving = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await leaving.call()
    staying = await service.trainer()
    await leaving.goodbye()
    assert leaving.error is None
    again = await staying.answer("from the other")
    assert (again.call_id, again.lease_attempt) == (call.call_id, 2)
    await task


@pytest.mark.requirement("R22")
async def test_a_lost_sessions_calls_are_queued_again_after_the_window(start: Any) -> None:
    """The stream breaks without Goodbye; the calls go to whoever is there when nobody resumed."""
    service = await start(resume_window_s=0.0)
    rollout, lost = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await lost.call()
    lost.cut()
    other = await service.trainer()
    again = await other.answer("ok")
    assert again.call_id == call.call_id and again.lease_id != call.lease_id
    await task


async def test_a_broken_stream_is_resumed_with_its_leases(service: Any) -> None:
    """A resumed session keeps its calls under the same leases; they are not sent again."""
    rollout, lost = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await lost.call()
    lost.cut()
    await lost.over.wait()
    back = await service.trainer(resume_session_id=lost.session_id)
    welcome = back.frames[0].welcome
    assert welcome.resumed and list(welcome.held_call_ids) == [call.call_id]
    acknowledged = await back.deliver(back.result(call, "ok"))
    assert list(acknowledged.accepted_call_ids) == [call.call_id]
    await task
    assert not [frame for frame in back.frames if frame.HasField("calls")]


@pytest.mark.requirement("R26", "R34")
async def test_resumed_session_gets_again_what_it_lacks(service: Any) -> None:
    """A call whose frame was lost with the stream is sent again under its lease, the others are not."""
    rollout, lost = await service.open(), await service.trainer()
    first = asking(rollout)
    had = await lost.call()
    second = asking(rollout, "something else")
    missed = await lost.call()
    lost.cut()
    await lost.over.wait()
    back = await service.trainer(resume_session_id=lost.session_id, held=pb.HeldCalls(call_ids=[had.call_id]))
    assert set(back.frames[0].welcome.held_call_ids) == {had.call_id, missed.call_id}
    again = await back.call()
    assert (again.call_id, again.lease_id, again.lease_attempt) == (missed.call_id, missed.lease_id, 1)
    await back.deliver(back.result(again, "two"), back.result(had, "one"))
    assert [(await task).choices[0].message.content for task in (first, second)] == ["one", "two"]


async def test_a_half_open_stream_is_taken_over(service: Any) -> None:
    """The old stream ends with ABORTED SESSION_TAKEN_OVER, the new one has its calls."""
    rollout, old = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await old.call()
    new = await service.trainer(resume_session_id=old.session_id)
    await old.over.wait()
    assert old.error is not None and from_rpc_error(old.error).reason == "SESSION_TAKEN_OVER"
    await new.deliver(new.result(call, "ok"))
    await task


@pytest.mark.requirement("R29")
async def test_the_first_result_wins_and_a_different_one_is_rejected_by_type(service: Any) -> None:
    """An equal repeat is accepted again, another result is ALREADY_DELIVERED, nonsense is UNKNOWN_CALL."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.answer("one")
    equal = trainer.result(call, "one")
    other = trainer.result(call, "two")
    unknown = pb.CallResult(call_id="no-such", lease_id="x", completion=equal.completion)
    acknowledged = await trainer.deliver(equal, other, unknown)
    assert list(acknowledged.accepted_call_ids) == [call.call_id]
    assert [r.reason for r in acknowledged.rejected] == [
        pb.ResultRejected.REASON_ALREADY_DELIVERED,
        pb.ResultRejected.REASON_UNKNOWN_CALL,
    ]
    assert (await task).choices[0].message.content == "one"


@pytest.mark.requirement("R83")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": [0.5]}, "logprobs"),
        ({"logprobs": [float("nan")]}, "logprobs"),
        ({"ids": [10**6]}, "token_ids"),
        ({"ids": [-1]}, "token_ids"),
        ({"count": 3}, "token_ids"),
        ({"finish": 4}, "finish_reason"),
        ({"finish": 0}, "finish_reason"),
        ({"empty": True}, "completion"),
        ({"part": {"image": {"media_type": "image/png", "data": b"png"}}}, "completion.message.parts[1]"),
        ({"part": {"tool_result": {"tool_call_id": "c1"}}}, "completion.message.parts[1]"),
    ],
)
async def test_rule_breaking_completion_is_rejected_alone_and_stays_leased(
    service: Any, change: dict[str, Any], field: str
) -> None:
    """Equal lengths, ids in the vocabulary, logprobs finite and <= 0, and only what an assistant says; the item fails,
    the stream goes on.
    """
    import numpy as np

    from penstock.chat.v1 import chat_pb2, completion_pb2

    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    ids = np.asarray(change.get("ids", [20]), "<i4")
    logprobs = np.asarray(change.get("logprobs", [-0.5]), "<f4")
    span = completion_pb2.TokenSpan(
        token_ids=ids.tobytes(),
        count=change.get("count", 1),
        logprobs=logprobs.tobytes(),
        logprobs_mode=completion_pb2.LogprobsMode.LOGPROBS_MODE_PROCESSED,
    )
    bad = completion_pb2.Completion(
        span=span, finish_reason=change.get("finish", chat_pb2.FinishReason.FINISH_REASON_STOP)
    )
    if change.get("empty"):
        bad = completion_pb2.Completion(finish_reason=chat_pb2.FinishReason.FINISH_REASON_STOP)
    if "part" in change:
        parts = [chat_pb2.Part(text=chat_pb2.Text(text="see")), chat_pb2.Part(**change["part"])]
        bad.message.CopyFrom(chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=parts))
    result = pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=bad)
    acknowledged = await trainer.deliver(result)
    assert [r.reason for r in acknowledged.rejected] == [pb.ResultRejected.REASON_INVALID]
    assert any(field in violation for violation in acknowledged.rejected[0].violations)
    await trainer.deliver(trainer.result(call, "good"))
    assert (await task).choices[0].message.content == "good"


async def test_weights_that_are_too_old_are_refused(service: Any) -> None:
    """Decision 8: max_staleness is fixed when the call is leased; an older completion is STALE_POLICY."""
    policy = interception_pb2.PolicyVersionConstraint(max_staleness=1)
    rollout = await service.open(run_id="run", policy=policy)
    trainer = await service.trainer(policy_version=5)
    task = asking(rollout)
    call = await trainer.call()
    assert call.min_policy_version == 4
    stale = await trainer.deliver(trainer.result(call, "old", version=3))
    assert [r.reason for r in stale.rejected] == [pb.ResultRejected.REASON_STALE_POLICY]
    await trainer.deliver(trainer.result(call, "new", version=4))
    assert (await task).choices[0].message.content == "new"


@pytest.mark.requirement("R8")
async def test_failure_reaches_the_agent_as_retriable_or_not(service: Any) -> None:
    """The agent hears that the model failed, not why; 503 may be retried, 400 may not."""
    rollout, trainer = await service.open(), await service.trainer()
    for retriable, status in ((True, 503), (False, 400)):
        task = asking(rollout)
        call = await trainer.call()
        failure = pb.CallFailure(reason="GPU_ON_FIRE", message="host 10.0.0.7", retriable=retriable)
        await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
        with pytest.raises(openai.APIStatusError) as caught:
            await task
        assert caught.value.status_code == status
        assert "FIRE" not in caught.value.response.text and "10.0.0.7" not in caught.value.response.text
    totals = (await service.close(rollout.rollout_id)).totals
    assert (totals.failed, totals.last_failure_reason, totals.last_failure_retriable) == (2, "GPU_ON_FIRE", False)


@pytest.mark.requirement("R59")
async def test_closed_rollout_reports_whether_its_last_call_was_answered(service: Any) -> None:
    """Of an agent that gave up, whatever it says of its end, and not of one that asked again."""
    trainer = await service.trainer()
    for answered_later in (False, True):
        rollout = await service.open()
        task = asking(rollout)
        call = await trainer.call()
        failure = pb.CallFailure(reason="GPU_ON_FIRE", retriable=True)
        await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, failure=failure))
        with pytest.raises(openai.APIStatusError):
            await task
        if answered_later:
            task = asking(rollout)
            await trainer.deliver(trainer.result(await trainer.call(), "good"))
            await task
        totals = (await service.close(rollout.rollout_id)).totals
        assert totals.last_unanswered is not answered_later


@pytest.mark.requirement("R24", "R70")
async def test_closing_a_rollout_ends_its_calls_and_notifies_all_parties(service: Any) -> None:
    """The trainer gets CallsCancelled and RolloutsClosed, the agent 401, a second close is the same."""
    rollout, trainer = await service.open(), await service.trainer()
    task = asking(rollout)
    call = await trainer.call()
    await service.close(rollout.rollout_id)
    cancelled, closed = await trainer.frame("cancelled"), await trainer.frame("rollouts_closed")
    assert (list(cancelled.call_ids), cancelled.reason) == ([call.call_id], "ROLLOUT_CLOSED")
    assert list(closed.rollout_ids) == [rollout.rollout_id]
    with pytest.raises(openai.AuthenticationError):
        await task
    again = await service.close(rollout.rollout_id)
    assert again.state == gate.GATE_ROLLOUT_STATE_CLOSED and again.totals.cancelled == 1
    with pytest.raises(openai.AuthenticationError):
        await asking(rollout)


@pytest.mark.requirement("R35", "R88")
async def test_a_budget_refuses_the_next_call_and_lets_the_admitted_one_finish(service: Any) -> None:
    """403 that no SDK repeats, the rollout is EXHAUSTED, the admitted turn ends well."""
    rollout = await service.open(budgets=interception_pb2.Budgets(max_calls=1, max_tokens_per_call=7))
    trainer = await service.trainer()
    task = asking(rollout, max_tokens=100)
    call = await trainer.call()
    assert call.sampling.max_tokens == 7
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await asking(rollout, "another")
    assert caught.value.code == "budget_exhausted"
    await trainer.deliver(trainer.result(call, "fine"))
    assert (await task).choices[0].message.content == "fine"
    seen = await service.gate.GetRollout(gate.GetRolloutRequest(rollout_id=rollout.rollout_id))
    assert seen.rollout.state == gate.GATE_ROLLOUT_STATE_EXHAUSTED
    assert seen.rollout.exhausted_budget == "max_calls"


async def test_the_unary_twin_leases_extends_and_completes(service: Any) -> None:
    """LeaseCalls waits and leases; a repeated request gets the same calls; CompleteCalls judges each by itself."""
    rollout = await service.open()
    request = pb.LeaseCallsRequest(max_calls=4, identity="simple", request_id="lease-1", wait=Duration(seconds=20))
    leasing = service.intercept.LeaseCalls(request)
    task = asking(rollout)
    calls = (await leasing).calls
    again = (await service.intercept.LeaseCalls(request)).calls
    assert [c.lease_id for c in again] == [c.lease_id for c in calls] and len(calls) == 1
    completing = pb.CompleteCallsRequest(extend_lease_ids=[calls[0].lease_id, "gone"])
    extended = await service.intercept.CompleteCalls(completing)
    assert list(extended.lost_lease_ids) == ["gone"]
    trainer = await service.trainer()
    done = await service.intercept.CompleteCalls(pb.CompleteCallsRequest(results=[trainer.result(calls[0], "unary")]))
    assert list(done.acknowledged.accepted_call_ids) == [calls[0].call_id]
    assert (await task).choices[0].message.content == "unary"


@pytest.mark.requirement("R32")
async def test_a_unary_lease_leaves_out_the_prompts_that_its_request_names(service: Any) -> None:
    """Without a session the trainer states what it keeps; without that, each prompt is whole."""
    rollout, trainer = await service.open(), await service.trainer()
    await trainer.goodbye()
    wait, view = Duration(seconds=20), pb.CallView(suffix_only=True)
    first_turn = asking(rollout)
    (first,) = (await service.intercept.LeaseCalls(pb.LeaseCallsRequest(view=view, wait=wait))).calls
    assert first.omitted_prefix_count == 0
    await service.intercept.CompleteCalls(pb.CompleteCallsRequest(results=[trainer.result(first, "yes")]))
    said = [*ASK, {"role": "assistant", "content": (await first_turn).choices[0].message.content}, *ASK]
    for known, omitted in (([], 0), (["other", first.call_id], first.prompt_count)):
        turn = asyncio.create_task(rollout.client().chat.completions.create(model="m", messages=said))
        request = pb.LeaseCallsRequest(view=view, wait=wait, known_call_ids=known)
        (second,) = (await service.intercept.LeaseCalls(request)).calls
        assert second.omitted_prefix_count == omitted
        prompt = first.prompt_token_ids[: 4 * omitted] + second.prompt_token_ids
        assert hashlib.sha256(prompt).digest() == second.prompt_sha256
        assert len(prompt) == 4 * second.prompt_count
        await service.intercept.CompleteCalls(pb.CompleteCallsRequest(results=[trainer.result(second, "yes")]))
        await turn
        said = [*said[:-1], {"role": "user", "content": "list the files again"}]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.intercept.LeaseCalls(pb.LeaseCallsRequest(view=view, known_call_ids=["c"] * 4097))
    assert from_rpc_error(refused.value).reason == "FIELD_INVALID"


async def test_a_unary_lease_that_ends_gives_the_call_back(service: Any) -> None:
    """A simple client that died holds nobody."""
    rollout = await service.open()
    task = asking(rollout)
    leased = await service.intercept.LeaseCalls(
        pb.LeaseCallsRequest(lease=Duration(nanos=1_000_000), wait=Duration(seconds=20))
    )
    trainer = await service.trainer()
    assert (await trainer.answer("ok")).call_id == leased.calls[0].call_id
    await task


@pytest.mark.requirement("R41")
async def test_a_wait_for_calls_that_do_not_come_ends_empty(service: Any) -> None:
    """Within its wait, and within 80 % of the caller's deadline."""
    none = await service.intercept.LeaseCalls(pb.LeaseCallsRequest(wait=Duration(nanos=1)))
    assert not none.calls
    for limit in limits(1.0):
        try:
            answer = await service.intercept.LeaseCalls(pb.LeaseCallsRequest(), timeout=limit)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error
            continue  # the answer took longer than what was left for it
        break
    else:
        raise AssertionError("no limit was long enough")
    assert not answer.calls


async def test_views_carry_messages_tools_and_the_body_verbatim(service: Any) -> None:
    """A session that asks for them gets the conversation parsed and the bytes as they came."""
    rollout = await service.open()
    trainer = await service.trainer(view=pb.CallView(messages=True, body=True))
    tool: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    task = asking(rollout, tools=[tool], tool_choice="required")
    call = await trainer.answer("ok")
    await task
    assert call.messages[0].parts[0].text.text == "list the files"
    assert (call.tools[0].name, call.tools[0].parameters_json_schema) == ("bash", '{"type":"object"}')
    assert b'"tool_choice":"required"' in call.request_body.replace(b": ", b":")


async def test_the_protocol_is_kept_or_the_stream_ends_with_a_reason(service: Any) -> None:
    """Hello first and once; credits of one call at least."""
    stream = service.intercept.Intercept()
    await stream.write(pb.InterceptRequest(heartbeat=pb.Heartbeat()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert from_rpc_error(caught.value).reason == "HELLO_EXPECTED"
    trainer = await service.trainer()
    await trainer.send(hello=pb.Hello(credits=pb.Credits(calls=1)))
    await trainer.over.wait()
    assert trainer.error is not None and from_rpc_error(trainer.error).reason == "HELLO_REPEATED"


async def test_a_silent_trainer_is_lost(start: Any) -> None:
    """Three intervals without a frame lose the session: DEADLINE_EXCEEDED HEARTBEAT_MISSED."""
    service = await start(heartbeat_s=0.05)
    trainer = await service.trainer()
    await trainer.over.wait()
    assert trainer.error is not None and from_rpc_error(trainer.error).reason == "HEARTBEAT_MISSED"


@pytest.mark.requirement("R14", "R16")
async def test_an_observer_reads_and_changes_nothing(service: Any) -> None:
    """The role table; an agent's token is nobody to gRPC."""
    from penstock.interception.v1 import intercept_service_pb2_grpc, rollout_gate_service_pb2_grpc
    from penstock_chassis.channel import connect

    rollout = await service.open()
    for token, readable in (("observer-token-1", True), (rollout.token, False)):
        async with connect(service.address, token) as channel:
            stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
            reading = stub.GetRollout(gate.GetRolloutRequest(rollout_id=rollout.rollout_id))
            if readable:
                assert (await reading).rollout.rollout_id == rollout.rollout_id
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await reading
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.CloseRollout(gate.CloseRolloutRequest(rollout_id=rollout.rollout_id))
            assert caught.value.code().name in ("PERMISSION_DENIED", "UNAUTHENTICATED")
            with pytest.raises(grpc.aio.AioRpcError):
                await intercept_service_pb2_grpc.InterceptServiceStub(channel).LeaseCalls(pb.LeaseCallsRequest())
