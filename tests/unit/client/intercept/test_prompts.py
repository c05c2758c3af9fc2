"""Prompts whose start the gate leaves out, as a session puts them together."""

import hashlib
from typing import Any

import grpc
import numpy as np
import pytest
from tests.unit.client.conftest import Fakes, Gate, Refusal

from penstock.client import Completion, ModelCall, Penstock
from penstock.client.intercept.prompts import Prompts
from penstock.client.transport.rpc import Backoff
from penstock.interception.v1 import intercept_service_pb2 as icpt

ANSWER = Completion.of_tokens([5, 6], [-0.5, -0.25])


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def sent(call_id: str, prompt: bytes, parent: str = "", omitted: int = 0, **fields: Any) -> icpt.ModelCall:
    """A call as a gate sends it to a session with suffix_only."""
    return icpt.ModelCall(
        call_id=call_id,
        lease_id=f"l-{call_id}",
        parent_call_id=parent or None,
        prompt_token_ids=prompt[4 * omitted :],
        prompt_count=len(prompt) // 4,
        omitted_prefix_count=omitted,
        prompt_sha256=hashlib.sha256(prompt).digest(),
        **{"rollout_id": "r1", "branch_id": "b1", **fields},
    )


async def answer_all(session: Any, count: int) -> list[ModelCall]:
    answered = []
    async for call in session.calls():
        await call.deliver(ANSWER)
        answered.append(call)
        if len(answered) == count:
            return answered
    return answered


async def serve(stream: Gate, *calls: icpt.ModelCall) -> None:
    for call in calls:
        await stream.send(calls=icpt.Calls(calls=[call]))
        await stream.accept(*(await stream.results()))


FIRST, SECOND = ids(1, 2, 3), ids(1, 2, 3, 5, 6, 7)


@pytest.mark.requirement("R32", "R82")
async def test_a_session_hands_out_whole_prompts_of_which_only_the_rest_was_sent(fakes: Fakes, ps: Penstock) -> None:
    """Branches are kept apart; a history that was edited shares a part of the parent's prompt."""
    third, edited = ids(1, 2, 3, 5, 6, 7, 5, 6, 8), ids(1, 2, 9)

    async def gate(stream: Gate) -> None:
        assert (await stream.hello()).view.suffix_only
        await serve(stream, sent("c1", FIRST), sent("c2", SECOND, "c1", 3))
        await serve(stream, sent("c3", third, "c2", 6), sent("c4", edited, "c3", 2, branch_id="b2"))
        await stream.goodbye()

    fakes.converse(gate)
    async with ps.intercept() as session:
        calls = await answer_all(session, 4)
    assert [call.prompt_token_ids.tobytes() for call in calls] == [FIRST, SECOND, third, edited]
    assert [call.prompt_count for call in calls] == [3, 6, 9, 3]


@pytest.mark.requirement("R32", "R82")
@pytest.mark.parametrize("kept", [None, ids(9, 9, 9)], ids=["an unknown parent", "another parent"])
async def test_a_prompt_that_cannot_be_put_together_is_fetched_whole(
    fakes: Fakes, ps: Penstock, kept: bytes | None
) -> None:
    """It is never guessed: its digest is the gate's, or the gate is asked."""

    async def gate(stream: Gate) -> None:
        await stream.hello()
        if kept is not None:
            await serve(stream, sent("c1", kept))
        await serve(stream, sent("c2", SECOND, "c1", 3))
        await stream.goodbye()

    fakes.converse(gate)
    fakes.queue("GetCall", icpt.GetCallResponse(prompt_token_ids=SECOND))
    async with ps.intercept() as session:
        calls = await answer_all(session, 1 if kept is None else 2)
    assert calls[-1].prompt_token_ids.tobytes() == SECOND
    assert fakes.requests["GetCall"] == [icpt.GetCallRequest(call_id="c2", rollout_id="r1")]


@pytest.mark.requirement("R22", "R32", "R82")
async def test_a_call_whose_prompt_cannot_be_had_comes_again_on_a_new_stream(
    fakes: Fakes, ps: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one knows nothing of the old one's prompts: what it carries is whole."""
    monkeypatch.setattr(Backoff, "next", lambda self, error: 0.0)

    async def first(stream: Gate) -> None:
        await stream.hello()
        await serve(stream, sent("c1", FIRST))
        await stream.send(calls=icpt.Calls(calls=[sent("c2", SECOND, "c0", 3)]))
        assert await stream.read() is None

    async def second(stream: Gate) -> None:
        hello = await stream.hello("s2", resumed=True, held=("c2",))
        assert (hello.resume_session_id, list(hello.held.call_ids)) == ("s1", [])
        await serve(stream, sent("c2", SECOND))
        await stream.goodbye()

    fakes.converse(first, second)
    fakes.queue("GetCall", Refusal(grpc.StatusCode.NOT_FOUND, "CALL_UNKNOWN"))
    async with ps.intercept() as session:
        calls = await answer_all(session, 2)
    assert calls[1].prompt_token_ids.tobytes() == SECOND


@pytest.mark.requirement("R32")
async def test_kept_prompts_are_bounded_and_go_with_their_rollout(ps: Penstock) -> None:
    """By branches as the contract says, and by bytes: what is dropped is fetched when it is needed."""
    prompts = Prompts(ps._services["interception"], most_bytes=3000)
    for number in range(20):
        await prompts.whole(sent(f"c{number}", ids(*range(10)), branch_id=f"b{number}"))
    assert len(prompts._rollouts["r1"]) == 16 and prompts._bytes == 640
    await prompts.whole(sent("d", ids(*range(700)), rollout_id="r2"))
    assert list(prompts._rollouts) == ["r2"] and prompts._bytes == 2800
    await prompts.whole(sent("e", ids(1), rollout_id="r3"))
    prompts.forget({"r2", "r9"})
    assert list(prompts._rollouts) == ["r3"] and prompts._bytes == 4
    await prompts.whole(icpt.ModelCall(call_id="f", rollout_id="r4", prompt_token_ids=FIRST))
    assert list(prompts._rollouts) == ["r3"]
