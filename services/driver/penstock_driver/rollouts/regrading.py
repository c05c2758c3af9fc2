"""Grades ended rollouts again: another verifier, on a kept end state, in a fresh fork of the prepared state.

Invariants: the code is that which grades a rollout in a fresh fork (`grading`), so a verifier that repeats itself gives
the same reward. A grade is on disk once, under its name, or not at all: whatever is interrupted begins again from the
end state, which no verifier changes. What says nothing of the agent's work, such as a lost sandbox, is an error of the
call and no grade.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_chassis import times
from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import acting_in
from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain.failures import ended_by_its_agent, failure_of, is_of_a_sandbox_at_work
from penstock_driver.domain.ports import Captures, Sandboxes, SandboxFacts
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import (
    CARRY_S,
    FIRST_GRADE,
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
    Reward,
    RolloutFailed,
    RolloutSpec,
    failed,
)
from penstock_driver.domain.validation import Violations
from penstock_driver.environments.prepare import SetupFailed, for_verifier
from penstock_driver.grading.carried import Work
from penstock_driver.grading.grader import Grader
from penstock_driver.placement.placement import Avoid, Place, Placement
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.attempt_resources import GRADING, allowlist_of
from penstock_driver.rollouts.branching import kept_spec
from penstock_driver.rollouts.recovery.sealed_specs import SealedSpecs
from penstock_driver.store.end_states import EndStates
from penstock_driver.store.records import Records
from penstock_driver.trajectories.reading import without_tokens
from penstock_driver.trajectories.turn_rewards import with_call_ids
from penstock_driver.wire.specs import rollout_spec, verifier_sha256
from penstock_driver.wire.to_proto import outcome_to_proto

REGRADE_LABEL: Final = "penstock_regrade"
"""Label of a sandbox in which a rollout is graded again: the driver's instance id."""
GRADE_LABEL: Final = "penstock_grade"
"""Another label of it, of its own."""
MOST_GRADES: Final = 16
MOST_WAITING: Final = 256
"""Calls that wait for a slot, each with its spec in memory."""
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_DIGITS: Final = 12
RELEASE_S: Final = 30.0
OUTPUT_BYTES: Final = 32 << 10
PATH_BYTES: Final = 4 << 10
"""What one grade keeps of all its commands' output, and of the paths that were left out. An agent chooses both, and a
rollout has 16 grades.
"""
_MARGIN_S: Final = 60.0
_GRADED: Final = (Cause.VERIFIER, Cause.AGENT, Cause.TASK)
T = TypeVar("T")
_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class _Order:
    """What to grade, and how: `spec` has the new verifier."""

    record: Record
    spec: RolloutSpec
    name: str


class Regrader:
    """Grades ended rollouts again, at most `most` at once. Stop with `aclose()`."""

    def __init__(
        self,
        records: Records,
        specs: SealedSpecs,
        agents: AgentRegistry,
        end_states: EndStates,
        placement: Placement,
        captures: Captures,
        *,
        instance_id: str,
        most: int,
    ) -> None:
        self._captures = captures
        self._records = records
        self._specs = specs
        self._agents = agents
        self._end_states = end_states
        self._placement = placement
        self._labels: Mapping[str, str] = {REGRADE_LABEL: instance_id}
        self._slots = asyncio.Semaphore(most)
        self._most = most + MOST_WAITING
        self._asked = 0
        """Calls that are not answered yet."""
        self._working = 0
        """Grades that are being made: also those whose callers went away."""
        self._recording = asyncio.Lock()
        """Held while a rollout's grades are read and written."""
        self._flights: SingleFlight[tuple[str, str, str], rollout_pb2.Grade] = SingleFlight(keep=0, finish=True)
        self._releases = TaskOwner()
        self._recovery: asyncio.Task[None] | None = None

    @property
    def running_count(self) -> int:
        """How many calls are not answered, or grades not made yet."""
        return max(self._asked, self._working)

    def recover(self, sandboxes: Sandboxes) -> None:
        """Delete the sandboxes of an earlier process, which nobody waits for, before there are new ones."""
        self._recovery = asyncio.ensure_future(self._recover(sandboxes))

    async def _recover(self, sandboxes: Sandboxes) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                await sandboxes.delete_labelled(self._labels)
        except (PenstockError, TimeoutError) as error:
            _log.warning("sandboxes of an earlier process are left to their leases", error=repr(error))

    async def regrade(self, record: Record, verifier: rollout_pb2.Verifier | None, name: str) -> rollout_pb2.Grade:
        """The grade of this name, which is made unless it is there. See RegradeRollout for its errors."""
        request = await kept_spec(self._records, self._specs, record)
        order = self._order(record, request, verifier, name)
        if (known := _known(record, order)) is not None:
            return known
        if self.running_count >= self._most:
            message = f"{self.running_count} rollouts are graded again, or wait for it: try again later"
            raise ResourceExhausted(message, reason="REGRADE_LIMIT", retry_after_s=1.0)
        self._asked += 1
        try:
            if self._recovery is not None:
                await asyncio.shield(self._recovery)
            key = (record.rollout_id, order.name, order.spec.verifier_sha256)
            return await self._flights.get(key, lambda: self._regraded(order))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _interrupted("the driver was stopped") from None
        finally:
            self._asked -= 1

    async def aclose(self) -> None:
        """Stop what runs. Its sandboxes are deleted."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        await self._flights.aclose()
        await self._releases.wait()

    # One grade --------------------------------------------------------------------------------------------------------

    def _order(
        self, record: Record, request: rollout_pb2.RolloutSpec, verifier: rollout_pb2.Verifier | None, name: str
    ) -> _Order:
        """InvalidArgument with every wrong field."""
        found, own = Violations(), rollout_pb2.Verifier()
        own.CopyFrom(request.task.verifier)
        first = list(own.changes_below)
        if verifier is None and not request.task.HasField("verifier"):
            found.add("verifier", "is required: the rollout has none of its own")
        if (own if verifier is None else verifier).HasField("judge"):
            found.add("verifier.judge", "the gate has judges of verifiers that end their rollouts only: leave it unset")
        if name and (name == FIRST_GRADE or not NAME.fullmatch(name)):
            found.add("name", f'expected 1 to 64 letters, digits, "-", "_" and ".", and not "{FIRST_GRADE}"')
        if verifier is not None:
            if verifier.HasField("fresh_fork") and not verifier.fresh_fork:
                found.add("verifier.fresh_fork", "an end state is graded in a fresh fork: leave it unset")
            if verifier.changes_below and list(verifier.changes_below) != first:
                kept = ", ".join(first) or "the working directory"
                found.add("verifier.changes_below", f"the end state has the changes below {kept}: leave it empty")
            if verifier.copies and list(verifier.copies) != list(own.copies):
                kept = ", ".join(copied.path for copied in own.copies) or "nothing"
                found.add("verifier.copies", f"the end state has whole copies of {kept}: leave it empty")
            if verifier.collect and list(verifier.collect) != list(own.collect):
                found.add(
                    "verifier.collect", "the agent's sandbox is gone, and the end state is what it had: leave it empty"
                )
        found.refuse()
        if verifier is not None:
            request.task.verifier.CopyFrom(verifier)
        sha256 = verifier_sha256(request.task.verifier)
        request.task.verifier.fresh_fork = True
        for field in ("changes_below", "copies", "collect"):
            request.task.verifier.ClearField(field)
        request.task.verifier.changes_below.extend(first)
        request.task.verifier.copies.extend(own.copies)
        spec = rollout_spec(request, self._agents, record.namespace)
        return _Order(record, replace(spec, verifier_sha256=sha256), name or sha256[:NAME_DIGITS])

    async def _regraded(self, order: _Order) -> rollout_pb2.Grade:
        self._working += 1
        try:
            async with self._slots:
                with acting_in(order.record.namespace):
                    outcome = await self._with_call_ids(order, await self._graded(order))
            return await self._record(order, _grade(order, outcome))
        except OSError as error:
            raise _interrupted(f"the driver's disk: {error.strerror or error!r}") from error
        finally:
            self._working -= 1

    async def _with_call_ids(self, order: _Order, outcome: Outcome) -> Outcome:
        """The outcome, whose turns name their calls. FailedPrecondition (TRAJECTORY_ABSENT)."""
        reward = outcome.reward
        if reward is None or not reward.turns:
            return outcome
        trajectory = await without_tokens(self._captures, order.record)
        try:
            return replace(outcome, reward=with_call_ids(reward, trajectory.calls))
        except RolloutFailed as error:
            return Outcome(failure=error.failure, grading=outcome.grading)

    async def _record(self, order: _Order, grade: rollout_pb2.Grade) -> rollout_pb2.Grade:
        rollout_id = order.record.rollout_id
        async with self._recording:
            record = await self._records.get(rollout_id)
            if (known := _known(record, order)) is not None:
                return known
            await self._records.set_grades(rollout_id, [*record.grades, grade])
        return grade

    async def _graded(self, order: _Order) -> Outcome:
        record, spec = order.record, order.spec
        state = await self._end_states.open_state(record.rollout_id, record.attempts)
        with state.layer:
            try:
                place = await self._placement.place(spec, Avoid())
            except RolloutFailed as error:
                raise _interrupted(error.failure.message) from error
            verifier = spec.task.verifier
            assert verifier is not None
            services = place.services
            grader = Grader(
                services.sandboxes,
                verifier,
                spool=services.spool,
                max_bytes=services.max_changes_bytes,
                verifier_sha256=spec.verifier_sha256,
            )
            grader.give(Work(state.changes, (), state.layer))
            try:
                return await self._at(place, order, grader)
            finally:
                grader.close()

    async def _at(self, place: Place, order: _Order, grader: Grader) -> Outcome:
        """Grade at a place, unless that is lost meanwhile."""
        task, lost = asyncio.current_task(), list[Failure]()
        assert task is not None

        def lose(failure: Failure) -> None:
            lost.append(failure)
            task.cancel()

        try:
            with self._placement.occupied(place, lose):
                return await self._in_a_fork(place.services, order, grader)
        except asyncio.CancelledError:
            if not lost:
                raise
            if task.uncancel():  # stopped too
                raise
            raise _interrupted(lost[0].message) from None

    async def _in_a_fork(self, services: RunnerServices, order: _Order, grader: Grader) -> Outcome:
        sandboxes = services.sandboxes
        labels = {**self._labels, GRADE_LABEL: secrets.token_hex(8)}
        try:
            fork = await _forked(services, order, labels)
        except BaseException:
            await self._to_its_end(sandboxes.delete_labelled(labels))  # the request for it may have arrived
            raise
        try:
            try:
                await grader.put(fork)
                reward = await _in_time(grader.grade(fork, lambda _: None), order.spec.limits.verify_s)
                return Outcome(reward=reward, grading=grader.grading)
            except RolloutFailed as error:
                failure = error.failure
            except PenstockError as error:
                failure = failure_of(error, Phase.VERIFYING, Component.SANDBOX)
            if is_of_a_sandbox_at_work(failure) and await self._to_its_end(sandboxes.ended_inside(fork.sandbox_id)):
                failure = ended_by_its_agent(failure)
        finally:
            await self._to_its_end(sandboxes.delete(fork.sandbox_id))
        if failure.cause not in _GRADED:
            raise _interrupted(f"{failure.reason}: {failure.message}")
        return Outcome(failure=failure, grading=grader.grading)

    async def _to_its_end(self, request: Awaitable[T]) -> T | None:
        """The answer to a request about a sandbox, also while this task is cancelled; None if there is none: its lease
        ends the sandbox.
        """

        async def work() -> T | None:
            try:
                async with asyncio.timeout(RELEASE_S):
                    return await request
            except (PenstockError, TimeoutError) as error:
                _log.warning("a sandbox of a further grade is left to its lease", error=repr(error))
                return None

        return await self._releases.finish(work())


async def _forked(services: RunnerServices, order: _Order, labels: Mapping[str, str]) -> SandboxFacts:
    """A fork of the rollout's prepared state. What fails says nothing of the agent's work, which is not in it yet.

    FailedPrecondition (REGRADE_FAILED); Unavailable (REGRADE_INTERRUPTED).
    """
    spec = for_verifier(order.spec)
    try:
        for is_second in (False, True):
            prepared = await services.environments.get(spec, lambda _: None, again=is_second)
            try:
                return await services.forks.fork(
                    prepared.snapshot.snapshot_id,
                    request_id=f"{order.record.rollout_id}/{order.name}/{secrets.token_hex(8)}",
                    backend=spec.sandbox.backend,
                    lease_s=spec.limits.verify_s + 2 * CARRY_S + _MARGIN_S,
                    labels=labels,
                    patience_s=spec.limits.prepare_s,
                    allowlist=allowlist_of(spec, order.record, GRADING),
                )
            except NotFound:  # evicted meanwhile
                if is_second:
                    raise
        raise AssertionError("the second try returns or raises")
    except TimeoutError as error:
        raise _interrupted("preparing took longer than the rollout's limits") from error
    except SetupFailed as error:
        raise _not_made_again(str(error)) from error
    except RolloutFailed as error:
        failure = error.failure
    except PenstockError as error:
        failure = failure_of(error, Phase.PREPARING, Component.SANDBOX)
    text = f"{failure.reason}: {failure.message}"
    raise _interrupted(text) if failure.retriable else _not_made_again(text)


async def _in_time(grading: Awaitable[Reward], limit_s: float) -> Reward:
    """RolloutFailed (VERIFIER, VERIFIER_TIMED_OUT)."""
    try:
        async with asyncio.timeout(limit_s):
            return await grading
    except TimeoutError:
        message = f"the verifier took longer than {limit_s:g} s"
        raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, Phase.VERIFYING) from None


def _known(record: Record, order: _Order) -> rollout_pb2.Grade | None:
    """The grade that is there. AlreadyExists (GRADE_EXISTS); ResourceExhausted (GRADE_LIMIT)."""
    for grade in record.grades:
        if grade.name == order.name:
            if grade.grading.verifier_sha256 != order.spec.verifier_sha256:
                message = f"{record.rollout_id} has a grade {order.name} of another verifier: choose another name"
                raise AlreadyExists(message, reason="GRADE_EXISTS")
            return grade
    if len(record.grades) >= MOST_GRADES:
        message = f"{record.rollout_id} has {MOST_GRADES} further grades, which is the maximum"
        raise ResourceExhausted(message, reason="GRADE_LIMIT")
    return None


def _grade(order: _Order, outcome: Outcome) -> rollout_pb2.Grade:
    """What is recorded, now."""
    ended = outcome_to_proto(outcome)
    grade = rollout_pb2.Grade(name=order.name, time=times.timestamp(time.time()), grading=ended.grading)
    if ended.HasField("reward"):
        grade.reward.CopyFrom(ended.reward)
    if ended.HasField("failure"):
        grade.failure.CopyFrom(ended.failure)
    _shorten(grade.grading)
    return grade


def _shorten(grading: rollout_pb2.Grading) -> None:
    """Keep the ends of the commands' output, and the first of the paths that were left out."""
    each = OUTPUT_BYTES // max(1, 2 * len(grading.commands))
    for command in grading.commands:
        command.stdout_tail = command.stdout_tail[max(0, len(command.stdout_tail) - each) :]
        command.stderr_tail = command.stderr_tail[max(0, len(command.stderr_tail) - each) :]
    room, paths = PATH_BYTES, list[str]()
    for path in grading.changes.left_out_paths:
        room -= len(path.encode())
        if room < 0:
            break
        paths.append(path)
    if len(paths) < len(grading.changes.left_out_paths):
        grading.changes.left_out_paths[:] = paths


def _not_made_again(why: str) -> FailedPrecondition:
    message = f"the rollout's prepared state cannot be made again: {why}"
    return FailedPrecondition(message, reason="REGRADE_FAILED")


def _interrupted(why: str) -> Unavailable:
    return Unavailable(f"nothing was graded: {why}. Try again", reason="REGRADE_INTERRUPTED", retry_after_s=1.0)
