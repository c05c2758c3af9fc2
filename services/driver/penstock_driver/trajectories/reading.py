"""Reads the trajectory of an ended rollout: what the gate captured, with what only the driver knows, such as rewards,
also of turns and tokens, and annotations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, NotFound, Unavailable
from penstock_driver.domain.ports import GATE_GONE, Captures
from penstock_driver.domain.records import Record
from penstock_driver.store.annotations import Annotations
from penstock_driver.trajectories.turn_rewards import add_to_samples
from penstock_driver.wire.to_proto import add_driver_fields, reward_of

_DISCARDED: Final = "CAPTURE_DISCARDED"


async def fragments(
    captures: Captures,
    annotations: Annotations,
    record: Record,
    *,
    include_bodies: bool,
    include_top: bool,
    grade: str = "",
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Yield the trajectory in fragments, which merge; with the reward of `grade`, as in `add_driver_fields`, and the
    annotations at the end.

    FailedPrecondition (TRAJECTORY_ABSENT): the gate has none; with `why` in the metadata, if it had to delete it
    (CAPTURE_DISCARDED) or is gone itself (GATE_GONE).
    """
    is_first, reward = True, reward_of(record, grade)
    async for fragment in _captured(captures, record, include_bodies=include_bodies, include_top=include_top):
        add_to_samples(fragment, reward)
        yield add_driver_fields(fragment, record, grade) if is_first else fragment
        is_first = False
    if is_first:
        yield add_driver_fields(trajectory_pb2.Trajectory(), record, grade)
    async for some in annotations.fragments(record.rollout_id):
        yield trajectory_pb2.Trajectory(annotations=some)


async def without_tokens(captures: Captures, record: Record) -> trajectory_pb2.Trajectory:
    """A trajectory's hash chain, and its calls: their ids and indices and, of those with an answer, how many tokens
    were sampled. Raises as `fragments`.
    """
    read = trajectory_pb2.Trajectory(rollout_id=record.rollout_id)
    async for fragment in _captured(captures, record, include_bodies=False, include_top=False):
        read.chain_sha256 = fragment.chain_sha256 or read.chain_sha256
        for call in fragment.calls:
            known = read.calls.add(call_id=call.call_id, index=call.index)
            if call.HasField("completion"):
                known.completion.span.count = call.completion.span.count
    return read


async def calls_and_samples(
    captures: Captures, record: Record
) -> AsyncIterator[trajectory_pb2.Call | trajectory_pb2.Sample]:
    """Yield all calls of a trajectory, then its samples. Raises as `fragments`."""
    samples: list[trajectory_pb2.Sample] = []
    async for fragment in _captured(captures, record, include_bodies=False, include_top=False):
        for call in fragment.calls:
            yield call
        samples += fragment.samples
    for sample in samples:
        yield sample


async def _captured(
    captures: Captures, record: Record, *, include_bodies: bool, include_top: bool
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    try:
        async for fragment in captures.capture(
            record.rollout_id,
            gate=record.home.gate if record.home else "",
            include_bodies=include_bodies,
            include_top=include_top,
        ):
            yield fragment
    except NotFound as error:
        if error.reason in (_DISCARDED, GATE_GONE):
            why = {**error.metadata, "why": error.reason}
            raise FailedPrecondition(error.message, reason="TRAJECTORY_ABSENT", metadata=why) from error
        message = "the gate has no capture of this rollout: it was never opened there, or its capture was deleted"
        raise FailedPrecondition(message, reason="TRAJECTORY_ABSENT") from error


async def whole(
    captures: Captures,
    annotations: Annotations,
    record: Record,
    *,
    include_bodies: bool,
    may_return: Callable[[str], bool],
) -> trajectory_pb2.Trajectory:
    """The whole trajectory, with alternatives; of a rollout without a capture, what the driver knows. A finding says
    that the gate had to delete it, or is gone.

    `may_return` says of a gate that is no member whether it is waited for. Raises Unavailable (GATE_LOST) then.
    """
    trajectory = trajectory_pb2.Trajectory()
    try:
        async for fragment in fragments(captures, annotations, record, include_bodies=include_bodies, include_top=True):
            trajectory.MergeFrom(fragment)
    except FailedPrecondition as error:
        why = error.metadata.get("why", "")
        if why == GATE_GONE and may_return(error.metadata["gate"]):
            raise Unavailable(error.message, reason="GATE_LOST") from error
        trajectory = add_driver_fields(trajectory_pb2.Trajectory(), record)
        if why:
            trajectory.findings.add(severity=trajectory_pb2.Finding.SEVERITY_FATAL, reason=why, message=error.message)
    return trajectory
