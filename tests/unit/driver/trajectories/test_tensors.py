"""The rows of tensors of tokens, which the driver asks gates for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values.token_tensors import Part, TokenTensor, joined, write
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock_driver.trajectories.tensors import Tensors, with_tensors

NAME = "routed_experts"
CALLS = {
    "a": (0, TokenTensor(NAME, "uint8", 0, (3, 1, 1), bytes([1, 2, 3]))),
    "b": (4, TokenTensor(NAME, "uint8", 3, (2, 1, 1), bytes([4, 5]))),
}
WHOLE = bytes([1, 2, 3, 4, 5])


class Gate:
    """A rollout of two calls, the second of which continues the first, and the sample of both."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_there = True
        self.policies = {"a": "", "b": ""}

    async def capture(self, rollout_id: str, **_: object) -> AsyncIterator[trajectory_pb2.Trajectory]:
        if not self.is_there:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        parts = [Part(shared, (own,), self.policies[call_id]) for call_id, (shared, own) in CALLS.items()]
        (tensor,) = joined(parts, self.policies["b"])
        sample = trajectory_pb2.Sample(sample_id="s", turns=[trajectory_pb2.TurnSpan(call_id=one) for one in CALLS])
        sample.policy_id = self.policies["b"]
        sample.tensors.append(write(tensor.digested().bare(), with_data=False))
        yield trajectory_pb2.Trajectory(samples=[sample], chain_sha256=b"chain")
        for (call_id, (shared, own)), parent in zip(CALLS.items(), (None, "a"), strict=True):
            call = trajectory_pb2.Call(call_id=call_id, parent_call_id=parent, prompt_shared_count=shared)
            call.policy_id = self.policies[call_id]
            call.completion.tensors.append(write(own.bare(), with_data=False))
            yield trajectory_pb2.Trajectory(calls=[call])

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        return ()

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        self.asked.append(call_id)
        if call_id == "of another":
            raise InvalidArgument("is not the call's rollout", reason="FIELD_INVALID")
        if call_id not in CALLS:
            raise NotFound("no such call", reason="CALL_UNKNOWN")
        return [write(CALLS[call_id][1], with_data=True)]


class Ended:
    """What is read of a record."""

    rollout_id, home, namespace = "r", None, "team"


async def data_of(pieces: AsyncIterator[TokenTensor]) -> bytes:
    return b"".join([piece.data async for piece in pieces])


@pytest.mark.requirement("R132")
async def test_a_calls_rows_and_those_of_a_sample_come_from_the_gate() -> None:
    """A sample's are joined from its calls, each asked for once."""
    gate, record = Gate(), Ended()
    tensors: Any = Tensors(gate)  # type: ignore[arg-type]
    assert await data_of(tensors.of_call(record, "b", NAME, 3)) == bytes([4, 5])
    assert await data_of(tensors.of_sample(record, "s", NAME, 0)) == WHOLE
    assert gate.asked == ["b", "a", "b"]


@pytest.mark.requirement("R132", "R133")
async def test_a_sample_has_the_rows_of_its_policys_calls_alone() -> None:
    """The other's are not even asked for; they stay with their call."""
    gate, record = Gate(), Ended()
    gate.policies = {"a": "teacher", "b": "student"}
    tensors: Any = Tensors(gate)  # type: ignore[arg-type]
    assert await data_of(tensors.of_sample(record, "s", NAME, 3)) == bytes([4, 5])
    assert gate.asked == ["b"]
    assert await data_of(tensors.of_call(record, "a", NAME, 0)) == bytes([1, 2, 3])


@pytest.mark.requirement("R29", "R132")
async def test_readers_that_do_not_read_on_block_no_other_namespace() -> None:
    """Nor the next reader of their own, while few wait. One that leaves makes room."""
    other: Any = Ended()
    other.namespace = "other"
    tensors: Any = Tensors(Gate())  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        slow = []
        for _ in range(16):
            reader = await stack.enter_async_context(aclosing(tensors.of_call(Ended(), "b", NAME, 3)))
            assert (await anext(reader)).data == bytes([4, 5])
            slow.append(reader)
        assert await data_of(tensors.of_call(other, "b", NAME, 3)) == bytes([4, 5])
        assert await data_of(tensors.of_sample(other, "s", NAME, 0)) == WHOLE
        waiting = asyncio.ensure_future(data_of(tensors.of_call(Ended(), "b", NAME, 3)))
        assert await data_of(tensors.of_call(other, "b", NAME, 3)) == bytes([4, 5]) and not waiting.done()
        await slow[0].aclose()
        assert await waiting == bytes([4, 5])


@pytest.mark.requirement("R132")
async def test_what_is_not_there_is_refused_by_its_reason() -> None:
    """Calls of other rollouts are as unknown as those that never were."""
    gate, record = Gate(), Ended()
    tensors: Any = Tensors(gate)  # type: ignore[arg-type]
    wrong = {
        ("of_call", "x", NAME, 0): "CALL_UNKNOWN",
        ("of_call", "of another", NAME, 0): "CALL_UNKNOWN",
        ("of_call", "a", NAME, 1): "TENSOR_UNKNOWN",
        ("of_sample", "x", NAME, 0): "TENSOR_UNKNOWN",
        ("of_sample", "s", "sampling_mask", 0): "TENSOR_UNKNOWN",
    }
    for (holder, *given), reason in wrong.items():
        with pytest.raises(PenstockError) as refused:
            await data_of(getattr(tensors, holder)(record, *given))
        assert refused.value.reason == reason
    gate.is_there = False
    with pytest.raises(FailedPrecondition, match="no capture"):
        await data_of(tensors.of_sample(record, "s", NAME, 0))


@pytest.mark.requirement("R128", "R132")
async def test_what_is_replayed_has_the_rows() -> None:
    """Call by call, in order; the rest of a fragment stays."""
    gate = Gate()
    found = [one async for one in with_tensors(gate, "r", "", gate.capture("r"))]  # type: ignore[arg-type]
    given = [(call.call_id, [one.data for one in call.completion.tensors]) for part in found for call in part.calls]
    assert given == [("a", [bytes([1, 2, 3])]), ("b", [bytes([4, 5])])]
    assert [part.chain_sha256 for part in found if part.chain_sha256] == [b"chain"]
