"""What an attempt at a rollout is given, and what it returns."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Final

from penstock_driver.domain.ports import OpenRequest
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import Cause, Failure, Outcome, Phase, RolloutSpec
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.rollouts.pausing import Pausing
from penstock_driver.store.end_states import EndStates

_CANCELLED: Final = Failure(Cause.CANCELLED, "CANCELLED", "the rollout was cancelled", False, Phase.QUEUED)


@dataclass(frozen=True, slots=True)
class TakenUp:
    """An attempt of an earlier process of this driver, whose agent had been started, or was about to be."""

    place: AttemptPlace
    stage: Stage
    so_far: Outcome


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt at a rollout, counted from 1. `labels` are those of its resources in other services.

    `node` and `gate` are the names of its place among the members.
    """

    record: Record
    rollout: RolloutSpec
    number: int
    labels: dict[str, str]
    is_moved: bool = False
    """Whether it began before: at another place, which took no new work, or by an earlier process of this driver."""
    node: str = ""
    gate: str = ""
    taken_up: TakenUp | None = None
    """Where to go on; None = at its beginning."""
    pausing: Pausing = field(kw_only=True, repr=False, compare=False)
    end_states: EndStates | None = field(default=None, repr=False, compare=False)
    """Where the agent's changes are kept, to be graded again; None = nowhere."""

    @property
    def is_first(self) -> bool:
        """Whether nothing of the rollout can be at a gate yet."""
        return self.number == 1 and not self.is_moved

    def new_gate_request(self) -> str:
        """Returns the id of the request that opens the rollout at the gate: the first one's is the rollout's."""
        return self.record.rollout_id if self.is_first else secrets.token_hex(16)

    def open_request(self, request_id: str) -> OpenRequest:
        """Returns the request that opens the rollout at the gate."""
        agent = self.rollout.agent.spec
        hints, record = agent.auxiliary_calls, self.record
        return OpenRequest(
            rollout_id=record.rollout_id,
            request_id=request_id,
            group_id=record.group_id,
            group_index=record.index if record.group_id else None,
            task_id=self.rollout.task.task_id,
            terms=self.rollout.gate_terms,
            dialects=tuple(agent.dialects),
            title_system_prompts=tuple(hints.title_system_prompts),
            compaction_system_prompts=tuple(hints.compaction_system_prompts),
            session_headers=tuple(hints.session_headers),
            volatile_line_patterns=tuple(hints.volatile_line_patterns),
            labels={**self.rollout.labels, **self.labels},
            attempt=self.number,
            branched_from=record.branched_from,
        )


@dataclass(slots=True)
class Cancellation:
    """Why a rollout is to end early; None while it is not. `is_left`: the next process goes on with it."""

    failure: Failure | None = None
    is_left: bool = False

    def at(self, phase: Phase) -> Failure:
        """The failure of a rollout that was cancelled in this phase."""
        return replace(self.failure or _CANCELLED, phase=phase)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended; `cleanup_pending` if something that it held could not be released."""

    outcome: Outcome
    cleanup_pending: bool = False


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """How a rollout ended; `cleanup_pending` if something that any of its attempts held could not be released."""

    outcome: Outcome
    cleanup_pending: bool = False
