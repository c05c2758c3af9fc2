"""Reads the trajectory of an ended rollout: what the gate captured, with what only the driver knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Record
from penstock_driver.wire.to_proto import add_driver_fields

_DISCARDED: Final = "CAPTURE_DISCARDED"


async def fragments(
    captures: Captures, record: Record, *, include_bodies: bool, include_top: bool, grade: str = ""
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Yield the trajectory in fragments, which merge; with the reward of `grade`, as in `add_driver_fields`.

    FailedPrecondition (TRAJECTORY_ABSENT): the gate has none; with `why` in the metadata, if it had to delete it.
    """
    is_first = True
    try:
        found = captures.capture(
            record.rollout_id,
            gate=record.home.gate if record.home else "",
            include_bodies=include_bodies,
            include_top=include_top,
        )
        async for fragment in found:
            yield add_driver_fields(fragment, record, grade) if is_first else fragment
            is_first = False
    except NotFound as error:
        if error.reason == _DISCARDED:
            raise FailedPrecondition(error.message, reason="TRAJECTORY_ABSENT", metadata={"why": _DISCARDED}) from error
        message = "the gate has no capture of this rollout: it was never opened there, or its capture was deleted"
        raise FailedPrecondition(message, reason="TRAJECTORY_ABSENT") from error
    if is_first:
        yield add_driver_fields(trajectory_pb2.Trajectory(), record, grade)


async def whole(captures: Captures, record: Record, *, include_bodies: bool) -> trajectory_pb2.Trajectory:
    """The whole trajectory, with alternatives; of a rollout without a capture, what the driver knows. A finding says
    that the gate had to delete it.
    """
    trajectory = trajectory_pb2.Trajectory()
    try:
        async for fragment in fragments(captures, record, include_bodies=include_bodies, include_top=True):
            trajectory.MergeFrom(fragment)
    except FailedPrecondition as error:
        trajectory = add_driver_fields(trajectory_pb2.Trajectory(), record)
        if error.metadata.get("why") == _DISCARDED:
            trajectory.findings.add(
                severity=trajectory_pb2.Finding.SEVERITY_FATAL, reason=_DISCARDED, message=error.message
            )
    return trajectory
