"""The data of tensors of tokens, which trajectories only describe: of a call's answer, or joined along a sample.

The gate has it, call by call. A call's is at most `token_tensors.MOST_BYTES`; a sample's is at most that of its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock.values.token_tensors import Part, TokenTensor, joined, pieces, read
from penstock_chassis.errors import InvalidArgument, NotFound
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Record
from penstock_driver.trajectories.reading import calls_and_samples
from penstock_driver.trajectories.slow_readers import SlowReaders

_LOADINGS: Final = 4
"""How many tensors are asked for and joined at a time."""


class Tensors:
    """Reads tensors of ended rollouts."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._loading = asyncio.Semaphore(_LOADINGS)
        self._sending = SlowReaders()

    async def of_call(self, record: Record, call_id: str, name: str, start: int) -> AsyncIterator[TokenTensor]:
        """Yield a tensor of a call's answer in pieces, which follow each other.

        NotFound (CALL_UNKNOWN, TENSOR_UNKNOWN).
        """
        async with self._sending.of(record.namespace):
            async with self._loading:
                whole = await self._of_call(record, call_id, name, start)
            for piece in pieces(whole):
                yield piece

    async def of_sample(self, record: Record, sample_id: str, name: str, start: int) -> AsyncIterator[TokenTensor]:
        """Yield a tensor of a sample in pieces, which follow each other.

        NotFound (TENSOR_UNKNOWN); FailedPrecondition (TRAJECTORY_ABSENT).
        """
        async with self._sending.of(record.namespace):
            async with self._loading:
                whole = await self._of_sample(record, sample_id, name, start)
            for piece in pieces(whole):
                yield piece

    async def _of_call(self, record: Record, call_id: str, name: str, start: int) -> TokenTensor:
        try:
            held = await self._captures.tensors(record.rollout_id, call_id, gate=_gate(record))
        except (NotFound, InvalidArgument) as error:  # of no rollout there, or of another one
            raise NotFound(f"{record.rollout_id} has no call {call_id}", reason="CALL_UNKNOWN") from error
        return _chosen(map(read, held), name, start, f"the answer of call {call_id}")

    async def _of_sample(self, record: Record, sample_id: str, name: str, start: int) -> TokenTensor:
        calls: dict[str, trajectory_pb2.Call] = {}
        leaf = policy_id = ""
        async for item in calls_and_samples(self._captures, record):
            if isinstance(item, trajectory_pb2.Call):
                calls[item.call_id] = _outline(item)
            elif item.sample_id == sample_id:
                _chosen(map(read, item.tensors), name, start, f"sample {sample_id}")
                leaf, policy_id = item.turns[-1].call_id, item.policy_id
        if not leaf:
            raise NotFound(f"{record.rollout_id} has no sample {sample_id}", reason="TENSOR_UNKNOWN")
        parts: list[Part] = []
        for call in _line(calls, leaf):
            tensors: list[TokenTensor] = []
            if call.policy_id == policy_id and any(one.name == name for one in call.completion.tensors):
                held = await self._captures.tensors(record.rollout_id, call.call_id, gate=_gate(record))
                tensors = [read(one) for one in held if one.name == name]
            parts.append(Part(call.prompt_shared_count, tensors, call.policy_id))
        return _chosen(joined(parts, policy_id), name, start, f"sample {sample_id}")


async def with_tensors(
    captures: Captures, rollout_id: str, gate: str, fragments: AsyncIterator[trajectory_pb2.Trajectory]
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Yield a capture's fragments with the data of its calls' tensors. A call with some is a fragment of its own."""
    async for fragment in fragments:
        if not any(call.completion.tensors for call in fragment.calls):
            yield fragment
            continue
        for call in fragment.calls:
            part = trajectory_pb2.Trajectory(calls=[call])
            if (own := part.calls[0]).completion.tensors:
                held = await captures.tensors(rollout_id, call.call_id, gate=gate)
                own.completion.ClearField("tensors")
                own.completion.tensors.extend(held)
            yield part
        fragment.ClearField("calls")
        yield fragment


def _outline(call: trajectory_pb2.Call) -> trajectory_pb2.Call:
    """What places a call's tensors, without its tokens."""
    outline = trajectory_pb2.Call(
        call_id=call.call_id,
        parent_call_id=call.parent_call_id,
        prompt_shared_count=call.prompt_shared_count,
        policy_id=call.policy_id,
    )
    outline.completion.tensors.extend(call.completion.tensors)
    return outline


def _line(calls: dict[str, trajectory_pb2.Call], leaf: str) -> list[trajectory_pb2.Call]:
    line = [calls[leaf]]
    while line[-1].prompt_shared_count and (parent := calls.get(line[-1].parent_call_id)) is not None:
        line.append(parent)
    line.reverse()
    return line


def _chosen(tensors: Iterable[TokenTensor], name: str, start: int, holder: str) -> TokenTensor:
    for tensor in tensors:
        if (tensor.name, tensor.start) == (name, start):
            return tensor
    raise NotFound(f"{holder} has no tensor {name!r} that starts at {start}", reason="TENSOR_UNKNOWN")


def _gate(record: Record) -> str:
    return record.home.gate if record.home else ""
