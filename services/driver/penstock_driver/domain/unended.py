"""What the journal has of a rollout that has not ended, so that the next driver can go on with it.

Invariant: all of it is on disk before the driver does what cannot be undone (decision 054).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from penstock.driver.v1 import rollout_pb2
from penstock_driver.domain.ports import PreparedSnapshot, PreparedToolbox, SandboxFacts
from penstock_driver.domain.records import Record


class Stage(StrEnum):
    """How far an attempt is within its phase."""

    NONE = ""
    CARRIED = "CARRIED"
    """The agent's work is in a file of this driver, and its sandbox may be deleted."""
    GRADING = "GRADING"
    """A verifier may have begun in the agent's own sandbox, or beside its companions."""
    DECIDED = "DECIDED"
    """The attempt's outcome is known; what it had may be released."""


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """Where an agent runs: names of the members, its sandbox, and the state that this is a fork of.

    `deadline` is when the sandbox service ends the agent, in seconds since the epoch. `gate_request` is the id of the
    request that opened the rollout at the gate: a repeat returns the same agent key. `paused_s` is for how many seconds
    the rollout had been paused before its agent's start; 0 in places of earlier versions, which did not record it.
    """

    node: str
    gate: str
    sandbox: SandboxFacts
    snapshot: PreparedSnapshot
    toolbox: PreparedToolbox
    deadline: float
    gate_request: str = ""
    paused_s: float = 0.0

    def to_json(self) -> str:
        """As it is stored."""
        data = asdict(self)
        del data["sandbox"]["takes_files"]  # needed no more, and an earlier version would not know it
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> AttemptPlace:
        """The stored place. ValueError for one that this version does not know."""
        data = json.loads(text)
        try:
            return cls(
                data["node"],
                data["gate"],
                SandboxFacts(**data["sandbox"]),
                PreparedSnapshot(**data["snapshot"]),
                PreparedToolbox(**data["toolbox"]),
                data["deadline"],
                data.get("gate_request", ""),
                data.get("paused_s", 0.0),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a place of an attempt: {error}") from error


@dataclass(frozen=True, slots=True)
class Unended:
    """A recorded rollout that has not ended. `place` is None before its agent starts.

    `sealed` is its sealed spec; None for one of an earlier version, and until it is read. `so_far` is what is known of
    its outcome. `owed` means that an earlier attempt left something in other services. `is_readable`: False for one
    whose row a newer version wrote, with which nobody goes on.
    """

    record: Record
    sealed: bytes | None = field(default=None, repr=False)
    place: AttemptPlace | None = None
    stage: Stage = Stage.NONE
    so_far: rollout_pb2.Outcome | None = None
    owed: bool = False
    is_readable: bool = True


def spec_id(record: Record) -> str:
    """The id of a rollout's sealed spec."""
    return record.group_id or record.rollout_id


def spec_context(record: Record) -> str:
    """What a rollout's spec is sealed for: a group and a rollout may have one id."""
    return f"group {record.group_id}" if record.group_id else f"rollout {record.rollout_id}"
