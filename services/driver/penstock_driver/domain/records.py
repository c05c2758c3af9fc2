"""What the driver records of rollouts and groups; times are seconds since the epoch."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from google.protobuf.message import Message

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import recordings
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.validation import check_request_id
from penstock_driver.domain.pauses import Pause
from penstock_driver.domain.rollout import Phase, RolloutSpec


def new_id(prefix: str) -> str:
    """A fresh identifier of 128 random bits (R25)."""
    return f"{prefix}{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies a creating request: a repeated `request_id` of a namespace must come with the same digest."""

    request_id: str
    digest: str
    namespace: str = DEFAULT_NAMESPACE

    @classmethod
    def of(cls, namespace: str, request_id: str, request: Message, prefix: bytes = b"") -> RequestKey:
        """The key of a request. A digest, so that no secret of a spec is stored.

        Raises InvalidArgument FIELD_INVALID without a request id.
        """
        check_request_id(request_id)
        data = prefix + request.SerializeToString(deterministic=True)
        return cls(request_id, hashlib.sha256(data).hexdigest(), namespace)


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded rollout. `spec` is the effective spec, without secrets and contents.

    `paused_s` and `pauses` are of the pauses that are over, in seconds and as a count. `branched_from` is set for a
    branch of another rollout.
    """

    rollout_id: str
    group_id: str | None
    index: int
    run_id: str | None
    task_id: str
    agent: str
    agent_sha256: str
    labels: Mapping[str, str]
    spec: rollout_pb2.RolloutSpec = field(repr=False)
    create_time: float
    end_time: float | None = None
    phase: Phase = Phase.QUEUED
    phase_times: Mapping[Phase, float] = field(default_factory=dict)
    outcome: rollout_pb2.Outcome | None = None
    is_result: bool = False
    fork_kind: int = 0
    last_sequence: int = 0
    attempts: int = 1
    namespace: str = DEFAULT_NAMESPACE
    home: rollout_pb2.Home | None = None
    export: rollout_pb2.Export | None = None
    pause: Pause | None = None
    paused_s: float = 0.0
    pauses: int = 0
    branched_from: trajectory_pb2.BranchPoint | None = None
    grades: Sequence[rollout_pb2.Grade] = field(default=(), repr=False)
    """Further grades, oldest first."""

    @property
    def gates(self) -> tuple[str, ...]:
        """The name of the gate at which the last attempt was opened, as far as it is recorded; at most one."""
        return (self.home.gate,) if self.home is not None and self.home.gate else ()

    def gates_to_report(self, opened: tuple[str, ...]) -> tuple[str, ...]:
        """The gates that may have something of the rollout: those `opened` since it was recorded; empty = any may.

        A record has the last attempt's gate alone, so after several attempts the others are not known.
        """
        return opened if self.attempts == 1 else ()


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How many rollouts a group has and needs: `quorum` of `size` results complete it, after `grace_s` without the
    stragglers; `grace_s` None waits for them. `spares` run in addition.
    """

    size: int
    spares: int = 0
    quorum: int = 0
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    group_id: str
    run_id: str | None
    spec: rollout_pb2.RolloutSpec = field(repr=False)
    plan: GroupPlan
    create_time: float
    rollout_ids: tuple[str, ...]
    namespace: str = DEFAULT_NAMESPACE
    branched_from: trajectory_pb2.BranchPoint | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the rollouts that match every condition that is set. `namespace` None = those of all namespaces."""

    run_id: str | None = None
    group_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ended: bool | None = None
    task_id: str | None = None
    agent: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """The end of a rollout as it is recorded, with its last event.

    `cleanup_pending` means that something which the rollout held in other services is not released yet. `gates` are the
    names of those that have a capture of any of its attempts, the last one's last; empty = not known, or none.
    """

    outcome: rollout_pb2.Outcome
    phase_times: Mapping[Phase, float]
    last_sequence: int
    is_result: bool = False
    fork_kind: int = 0
    attempts: int = 1
    cleanup_pending: bool = False
    gates: tuple[str, ...] = ()


def recording_of(record: Record) -> str:
    """The recording of what a rollout's sandboxes are answered, of which its siblings get the same."""
    if record.group_id:
        return f"{recordings.OF_GROUP}{record.group_id}"
    return f"{recordings.OF_ROLLOUT}{record.rollout_id}"


def seed_of(point: trajectory_pb2.BranchPoint) -> int | None:
    """The seed of the first branch of a group, where its creator gave one: that of each is it plus its index."""
    return point.seed if point.HasField("seed") else None


@cache
def _home(driver: str) -> rollout_pb2.Home:
    """What is known of a new rollout's place: one message for all, which nobody changes."""
    return rollout_pb2.Home(driver=driver)


def new_records(
    spec: RolloutSpec,
    effective: rollout_pb2.RolloutSpec,
    ids: Sequence[str],
    group_id: str | None = None,
    *,
    driver: str = "",
    branched_from: trajectory_pb2.BranchPoint | None = None,
) -> list[Record]:
    """Records of the new rollouts of one spec.

    `effective` is the form that is stored, without secrets; `driver` is this driver's name. `branched_from` makes them
    branches.
    """
    now, home, labels = time.time(), _home(driver), dict(spec.labels)
    return [
        Record(
            rollout_id=rollout_id,
            group_id=group_id,
            index=index,
            run_id=spec.run_id,
            task_id=spec.task.task_id,
            agent=spec.agent.spec.name,
            agent_sha256=spec.agent.sha256,
            labels=labels,
            spec=effective,
            create_time=now,
            namespace=spec.namespace,
            home=home,
            branched_from=branched_from,
        )
        for index, rollout_id in enumerate(ids)
    ]
