"""Reads stored outcomes: of a rollout that an earlier driver process ran, and that this one goes on with."""

from __future__ import annotations

from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import reader
from penstock_driver.domain.ports import Command
from penstock_driver.domain.rollout import (
    ArtifactCollected,
    Cause,
    Changes,
    CommandFinished,
    Component,
    Failure,
    Grading,
    Outcome,
    Phase,
    TurnReward,
)
from penstock_driver.wire.converters import exit_from_proto

_PHASES: Final = {rollout_pb2.Phase.Value(f"PHASE_{phase.name}"): phase for phase in Phase}
_INFRASTRUCTURE: Final = rollout_pb2.FailureCause.Value(f"FAILURE_CAUSE_{Cause.INFRASTRUCTURE.value}")
_COMPONENTS: Final = {rollout_pb2.Party.Value(f"PARTY_{component.value}"): component for component in Component}


def phase_from_proto(wire: rollout_pb2.Phase.ValueType) -> Phase:
    """The phase; KeyError for one that this version does not know."""
    return _PHASES[wire]


failure_from_proto: Final = reader(
    Failure,
    rollout_pb2.Failure,
    left_out=("caused_by",),
    by={"component": lambda failure: _COMPONENTS[failure.caused_by] if failure.cause == _INFRASTRUCTURE else None},
)
"""Why a rollout, or an attempt, did not complete."""

reader(TurnReward, trajectory_pb2.TurnReward, left_out=("call_index",))


def _commands(grading: rollout_pb2.Grading) -> tuple[CommandFinished, ...]:
    """What clients see of the commands: their exits and the ends of their outputs."""
    return tuple(
        CommandFinished(Phase.VERIFYING, index, Command(), exit_from_proto(one.exit), one.stdout_tail, one.stderr_tail)
        for index, one in enumerate(grading.commands)
    )


_grading: Final = reader(
    Grading,
    rollout_pb2.Grading,
    left_out=("place", "passed"),
    by={
        "fresh_fork": lambda grading: grading.place == rollout_pb2.GRADING_PLACE_FRESH_FORK,
        "commands": _commands,
    },
)

changes_from_proto: Final = reader(Changes, rollout_pb2.Grading.Changes)
"""What was copied of an agent's work."""

artifact_from_proto: Final = reader(ArtifactCollected, rollout_pb2.ArtifactCollected, left_out=("truncated",))
"""A fetched file."""

outcome_from_proto: Final = reader(Outcome, rollout_pb2.Outcome)
"""How a rollout, or an attempt, ended."""
