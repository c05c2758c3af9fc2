"""Branches: rollouts that continue another one, their parent, from one of its calls.

All that they need of the parent is read before they begin: its sealed spec, and its answers up to that call, in one
file that they share. From then on they are rollouts like others, whose first attempt has something to replay.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import GroupRecord, Record, recording_of, seed_of
from penstock_driver.domain.unended import Unended
from penstock_driver.domain.validation import MAX_GROUP, MAX_SEED, Violations
from penstock_driver.rollouts.branch_room import BranchRoom, Recorded
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.rollouts.recovery.sealed_specs import NotAdoptable, SealedSpecs
from penstock_driver.store.records import Records
from penstock_driver.trajectories.tensors import with_tensors

MAX_ANSWER_BYTES: Final = 1 << 20
MAX_ANSWER_PARTS: Final = 256
"""Of a given answer: an agent runs each tool call of it."""
_log = structlog.get_logger("penstock.driver")
_READINGS: Final = 16
"""Requests that read their parents' answers at once: each has some megabytes of them in memory."""
_PARTS: Final = ("text", "reasoning", "tool_call")
_REPLAYS: Final = (rollout_pb2.REPLAY_EXACT, rollout_pb2.REPLAY_UNTIL_DIVERGENCE)


@dataclass(frozen=True, slots=True)
class BranchOrder:
    """A request for branches. The call is named by `call_id`, or by its index if that is empty; one must be set."""

    rollout_id: str
    call_id: str
    call_index: int | None
    count: int
    answer: chat_pb2.Message | None = field(default=None, repr=False)
    group_id: str = ""
    train_prefix: bool = False
    replay: rollout_pb2.Replay.ValueType = rollout_pb2.REPLAY_EXACT
    seed: int | None = None

    def check(self, found: Violations) -> None:
        """InvalidArgument with every wrong field."""
        if not 1 <= self.count <= MAX_GROUP:
            found.add("count", f"expected 1 to {MAX_GROUP}")
        if not self.call_id and self.call_index is None:
            found.add("call", "is required: call_id or call_index")
        if self.call_index is not None and self.call_index < 0:
            found.add("call_index", "must not be negative")
        if self.replay not in _REPLAYS:
            found.add("replay", "expected REPLAY_EXACT or REPLAY_UNTIL_DIVERGENCE: a branch replays its parent")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED - self.count + 1:
            found.add("seed", f"expected 0 to {MAX_SEED - self.count + 1}: the seeds of the branches count up from it")
        if self.answer is not None:
            _check_answer(self.answer, found)
        found.refuse()

    def names(self, call: trajectory_pb2.Call) -> bool:
        """Whether it is the call to branch at."""
        return call.call_id == self.call_id if self.call_id else call.index == self.call_index

    def completion(self) -> completion_pb2.Completion | None:
        """The given answer as a completion that nobody sampled: it has a message and no tokens."""
        if self.answer is None:
            return None
        answer = completion_pb2.Completion(message=self.answer, finish_reason=chat_pb2.FINISH_REASON_STOP)
        answer.message.role = chat_pb2.ROLE_ASSISTANT
        for index, part in enumerate(answer.message.parts):
            if part.HasField("tool_call"):
                answer.finish_reason = chat_pb2.FINISH_REASON_TOOL_CALLS
                part.tool_call.id = part.tool_call.id or f"given_{index}"
        return answer


def branch_order(request: rollout_service_pb2.BranchRolloutRequest) -> BranchOrder:
    """What a client asked for, not checked."""
    return BranchOrder(
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        call_index=request.call_index if request.WhichOneof("call") == "call_index" else None,
        count=request.count,
        answer=request.answer if request.HasField("answer") else None,
        group_id=request.group_id,
        train_prefix=request.train_prefix,
        replay=request.replay or rollout_pb2.REPLAY_EXACT,
        seed=request.seed if request.HasField("seed") else None,
    )


class Parents:
    """What branches need of the rollouts that they continue. `directory` has the files of what is replayed."""

    def __init__(
        self, records: Records, specs: SealedSpecs, captures: Captures, directory: Path, room: BranchRoom
    ) -> None:
        self._room = room
        self._records = records
        self._specs = specs
        self._captures = captures
        self._directory = directory
        self._reading = asyncio.Semaphore(_READINGS)

    async def request(self, parent: Record, order: BranchOrder) -> rollout_pb2.RolloutSpec:
        """The spec of the branches, as if a client had sent it. FailedPrecondition (SPEC_FORGOTTEN)."""
        request = await kept_spec(self._records, self._specs, parent)
        if parent.branched_from is not None:
            if (seed := seed_of(parent.branched_from)) is not None:
                request.sampling_override.seed = seed + parent.index
        elif request.HasField("seed"):
            request.seed += parent.index
        if request.sandbox.HasField("agent_network") and not request.sandbox.agent_network.recording:
            # Up to the branch point its programs must be answered as its parent's were.
            request.sandbox.agent_network.recording = recording_of(parent)
        request.replay = order.replay
        return request

    async def record(
        self, parent: Record, order: BranchOrder
    ) -> tuple[RecordingFile, Recorded, trajectory_pb2.BranchPoint]:
        """Write the parent's answers up to the call to a file for the branches to share, and say where they begin.

        The caller keeps what the file is counted in (`BranchRoom.keep`), or drops it.

        NotFound (CALL_UNKNOWN); FailedPrecondition (CALL_UNANSWERED, TRAJECTORY_ABSENT); ResourceExhausted
        (RECORDINGS_FULL).
        """
        gate = parent.home.gate if parent.home else ""
        captured = with_tensors(
            self._captures,
            parent.rollout_id,
            gate,
            self._captures.capture(parent.rollout_id, gate=gate, include_bodies=False, include_top=True),
        )
        results = partial(self._captures.tool_results, parent.rollout_id, gate=gate)
        file = RecordingFile(self._directory, secrets.token_hex(16))  # equal requests may come at once
        exact = order.replay == rollout_pb2.REPLAY_EXACT
        counted = await self._room.open(parent.namespace)
        try:
            async with self._reading:
                call = await file.write_branch(
                    captured,
                    (parent.rollout_id, parent.attempts),
                    order.names,
                    order.completion(),
                    exact=exact,
                    results=results,
                    grow=partial(self._room.grow, counted),
                )
        except BaseException as error:
            file.remove()
            self._room.drop(counted)
            if isinstance(error, NotFound) and error.reason != "CALL_UNKNOWN":
                message = f"the gate has no calls of {parent.rollout_id}: they were deleted, or it never called"
                raise FailedPrecondition(message, reason="TRAJECTORY_ABSENT") from error
            raise
        point = trajectory_pb2.BranchPoint(
            parent_rollout_id=parent.rollout_id,
            call_id=call.call_id,
            call_index=call.index,
            answer_given=order.answer is not None,
            train_prefix=order.train_prefix,
            seed=order.seed,
        )
        return file, counted, point

    def counts(self, counted: Recorded, group: GroupRecord | None) -> None:
        """Count a file as that of a group that was begun; None: as nobody's."""
        if group is None:
            self._room.drop(counted)
        else:
            self._room.keep(group.group_id, group.rollout_ids, counted)

    def assign(self, rollout_ids: Iterable[str], file: RecordingFile | None) -> None:
        """Make `file` that of recorded rollouts, or let them have none.

        Another request for the same ids may have put its own there: it was refused, and what it has is not theirs.
        """
        for rollout_id in rollout_ids:
            if file is not None and file.is_shared_with(rollout_id):
                continue
            RecordingFile(self._directory, rollout_id).remove()
            if file is not None:
                try:
                    file.share([rollout_id])
                except OSError as error:  # the branch is recorded: it begins, and fails as RECORDING_NOT_LOADED
                    _log.error("a branch has no recording", rollout_id=rollout_id, error=repr(error))

    def unshare(self, rollout_ids: Iterable[str]) -> None:
        """Remove the file of rollouts that have not begun."""
        for rollout_id in rollout_ids:
            RecordingFile(self._directory, rollout_id).remove()


async def kept_spec(records: Records, specs: SealedSpecs, record: Record) -> rollout_pb2.RolloutSpec:
    """The spec of a rollout that runs or has ended, with its secrets, as if a client had sent it; the caller's own.

    FailedPrecondition (SPEC_FORGOTTEN).
    """
    sealed = await records.sealed_spec(record)
    if sealed is None:
        message = (
            f"the driver no longer has the spec of {record.rollout_id}: create the rollout again, and use that one;"
            " with a greater kept_spec_bytes the driver keeps more of them"
        )
        raise FailedPrecondition(message, reason="SPEC_FORGOTTEN")
    try:
        spec = specs.opened(Unended(record, sealed=sealed))
    except NotAdoptable as error:
        raise FailedPrecondition(error.failure.message, reason="SPEC_FORGOTTEN") from error
    request = rollout_pb2.RolloutSpec()
    request.CopyFrom(spec.request)
    return request


def _check_answer(answer: chat_pb2.Message, found: Violations) -> None:
    if answer.role not in (chat_pb2.ROLE_UNSPECIFIED, chat_pb2.ROLE_ASSISTANT):
        found.add("answer.role", "expected ROLE_ASSISTANT")
    if not 1 <= len(answer.parts) <= MAX_ANSWER_PARTS:
        found.add("answer.parts", f"expected 1 to {MAX_ANSWER_PARTS}")
        return
    if answer.ByteSize() > MAX_ANSWER_BYTES:
        found.add("answer", f"at most {MAX_ANSWER_BYTES} bytes")
    for index, part in enumerate(answer.parts):
        if part.WhichOneof("part") not in _PARTS:
            found.add(f"answer.parts[{index}]", "expected a text, reasoning or a tool call")
        elif part.HasField("tool_call") and not part.tool_call.name:
            found.add(f"answer.parts[{index}].tool_call.name", "is required")
