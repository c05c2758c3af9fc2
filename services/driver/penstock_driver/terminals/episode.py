"""One terminal episode that is open or being verified: its steps and its end.

Invariants: steps run one after another, and each outlives the stream that requested it. A step's result is on disk
before it is returned. The end is reported once the sandbox is gone, whatever ended the episode (R70).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sqlite3 import OperationalError
from typing import Any

import structlog

from penstock.driver.v1 import terminal_service_pb2
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import PenstockError
from penstock_driver.domain.ports import CommandResult
from penstock_driver.domain.rollout import Cause, CommandFinished, Outcome, RolloutFailed
from penstock_driver.domain.terminal_episode import (
    MAX_PENDING_BYTES,
    STEP_BYTES,
    Action,
    Answer,
    EpisodeProgress,
    Observation,
    Step,
    TerminalSpec,
    episode_ended,
    step_reused,
    steps_pending,
)
from penstock_driver.environments.cleanup import Cleanups
from penstock_driver.terminals.failures import ended_from_outside, failure_of_step, fault, left
from penstock_driver.terminals.records import PlaceRecord, StepRecord, TerminalRecords
from penstock_driver.terminals.shell import ShellState
from penstock_driver.terminals.steps import TerminalSteps
from penstock_driver.wire.to_proto import commands_to_proto, observation_to_proto, outcome_to_proto

_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class EpisodeServices:
    """What all episodes of a driver share."""

    records: TerminalRecords
    steps: TerminalSteps
    cleanups: Cleanups
    tasks: TaskOwner


@dataclass(slots=True, eq=False)
class _Flight:
    """A step in progress, or waiting for its turn."""

    digest: str
    size: int
    task: asyncio.Task[terminal_service_pb2.StepResponse]


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """What an episode begins with, or continues with after a restart; it has `left_s` seconds to be answered."""

    spec: TerminalSpec
    place: PlaceRecord
    shell: ShellState
    course: EpisodeProgress
    left_s: float


class LiveEpisode:
    """An episode from its opening, or its recovery, to its end; calls `on_end` when it has ended."""

    def __init__(
        self, terminal_id: str, start: EpisodeStart, services: EpisodeServices, on_end: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self._terminal_id = terminal_id
        self._spec = start.spec
        self._place = start.place
        self._shell = start.shell
        self._course = start.course
        self._services = services
        self._on_end = on_end
        # Set to the outcome as soon as it is decided; the running step then stops.
        self._over: asyncio.Future[Outcome] = loop.create_future()
        self._turn = asyncio.Lock()
        self._flights: dict[str, _Flight] = {}
        self._pending_bytes = 0
        # Results of the steps that the end cut off, by step id.
        self._unfinished: dict[str, terminal_service_pb2.StepResponse] = {}
        self._reports: list[CommandFinished] = []
        # The error that kept the end from being written to disk.
        self._fault: Exception | None = None
        self._gone = asyncio.Event()
        self._is_grading = False
        self._timer = loop.call_later(start.left_s, self._expire)

    async def step(self, step: Step) -> terminal_service_pb2.StepResponse:
        """Run a step, or join the same step, and return the observation.

        ResourceExhausted (STEPS_PENDING) if it would exceed `MAX_PENDING_BYTES`.
        """
        flight = self._flights.get(step.step_id)
        if flight is None:
            if self._course.knows(step.step_id, step.digest):
                if self._course.ended:
                    await self._wait_for_the_end()
                return await past_step(self._services.records, self._terminal_id, step)
            size = step.request.ByteSize() + STEP_BYTES
            if self._flights and self._pending_bytes + size > MAX_PENDING_BYTES:
                raise steps_pending()
            flight = self._take_off(step.step_id, step.digest, size, self._in_turn(step))
        elif flight.digest != step.digest:
            raise step_reused()
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise left() from None
            raise

    @property
    def sandbox_id(self) -> str:
        """The episode's sandbox."""
        return self._place.sandbox_id

    @property
    def grading(self) -> Sequence[asyncio.Task[Any]]:
        """The steps to wait for before the episode can be left: those of a verifier that has begun."""
        return [flight.task for flight in self._flights.values()] if self._is_grading else []

    def leave(self) -> None:
        """Stop without an end, for the next process of this driver. An episode that is ending ends."""
        if self._course.ended:
            return
        self._timer.cancel()
        for flight in self._flights.values():
            flight.task.cancel()
        self._on_end()

    def resume(self, step: StepRecord, action: Action) -> None:
        """Continue a step that the last driver started."""
        self._take_off(step.step_id, step.digest, STEP_BYTES, self._resumed(step, action))

    async def end(self, outcome: Outcome) -> None:
        """End an episode from outside its steps, unless it has ended; return when its sandbox is gone."""
        if self._course.end():
            self._over.set_result(outcome)
            async with self._turn:
                await self._finish(outcome)
        else:
            await self._gone.wait()

    def _take_off(
        self, step_id: str, digest: str, size: int, work: Coroutine[Any, Any, terminal_service_pb2.StepResponse]
    ) -> _Flight:
        flight = self._flights[step_id] = _Flight(digest, size, self._services.tasks.start(work))
        self._pending_bytes += size
        flight.task.add_done_callback(lambda _: self._land(step_id))
        return flight

    def _land(self, step_id: str) -> None:
        self._pending_bytes -= self._flights.pop(step_id).size

    async def _in_turn(self, step: Step) -> terminal_service_pb2.StepResponse:
        async with self._turn:
            is_answer = isinstance(step.action, Answer)
            number = self._course.begin(step.step_id, step.digest, is_answer=is_answer)
            record = StepRecord(number, step.step_id, step.digest, step.request)
            with self._faults_end():
                await self._services.records.begin(self._terminal_id, record, is_answer=is_answer)
                observed = await self._do(record, step.action)
        return await self._result(step.step_id, observed)

    async def _resumed(self, step: StepRecord, action: Action) -> terminal_service_pb2.StepResponse:
        async with self._turn:
            with self._faults_end():
                observed = await self._do(step, action)
        return await self._result(step.step_id, observed)

    @contextmanager
    def _faults_end(self) -> Iterator[None]:
        """End the episode on an error: a step has begun that is not on disk, so later steps would be ambiguous."""
        try:
            yield
        except Exception as error:
            self._services.tasks.start(self.end(fault(self._course, error)))
            raise

    async def _result(
        self, step_id: str, observed: terminal_service_pb2.StepResponse | None
    ) -> terminal_service_pb2.StepResponse:
        """The result of a step; for None, cut off by the end of the episode, the result recorded with that end."""
        if observed is not None:
            return observed
        await self._wait_for_the_end()
        return self._unfinished[step_id]

    async def _wait_for_the_end(self) -> None:
        """Wait until the end is on disk and can be reported; raise the error if it is not."""
        await self._gone.wait()
        if self._fault is not None:
            raise self._fault

    async def _do(self, step: StepRecord, action: Action) -> terminal_service_pb2.StepResponse | None:
        """Run a step, at most to the end of its episode; None when the episode ended."""
        work = asyncio.ensure_future(
            self._services.steps.answer(
                self._spec,
                self._place,
                action.text,
                step.number - 1,
                self._reports.append,
                self._begin_grading,
            )
            if isinstance(action, Answer)
            else self._services.steps.command(self._spec, self._place, self._shell, step.number, action)
        )
        ends: list[asyncio.Future[Any]] = [work, self._over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
        await asyncio.wait([work])
        outcome, result = Outcome(), None
        try:
            done = await work
            if isinstance(done, CommandResult):
                result = done
            else:
                outcome = Outcome(reward=done)
        except (RolloutFailed, PenstockError, asyncio.CancelledError) as error:
            failure = await self._services.steps.judged(self._place, failure_of_step(error, self._course))
            outcome = Outcome(failure=failure)
        except Exception as error:  # noqa: BLE001 - an episode always ends with an outcome
            _log.exception("a terminal's step failed by an internal error of the driver", terminal_id=self._terminal_id)
            outcome = fault(self._course, error)
        if result is not None:
            self._shell = self._shell.after(step.number, result.exit)
            observed = observation_to_proto(step.step_id, Observation(result=result))
            shell = (self._shell.saved_by, self._shell.last_code)
            await self._services.records.done(self._terminal_id, step.step_id, observed, shell)
            return observed
        if not self._course.end():
            # The episode ended during the step, and the caller that ended it waits for this turn to finish.
            self._cut_off(step.step_id, self._over.result())
            return None
        self._over.set_result(outcome)
        self._cut_off(step.step_id, outcome)
        await self._finish(outcome)
        return None

    async def _begin_grading(self) -> None:
        """Record that the verifier begins; while the disk is full it begins anyway, as of a rollout."""
        self._is_grading = True
        try:
            await self._services.records.grading(self._terminal_id)
        except OperationalError as error:
            _log.warning("a restart might grade this episode twice", terminal_id=self._terminal_id, error=repr(error))

    def _cut_off(self, step_id: str, outcome: Outcome) -> None:
        last = Observation(ended=True, reward=outcome.reward, failure=outcome.failure)
        self._unfinished[step_id] = observation_to_proto(step_id, last)

    def _expire(self) -> None:
        if self._course.is_open:  # a verifier has its own limit
            message = f"no answer came in {self._spec.limits.agent_s:g} s"
            self._services.tasks.start(self.end(ended_from_outside(Cause.TIMEOUT, "EPISODE_TIMED_OUT", message)))

    async def _finish(self, outcome: Outcome) -> None:
        self._timer.cancel()
        end = (outcome_to_proto(outcome), commands_to_proto(self._reports), dict(self._unfinished))

        async def write_end() -> None:
            await self._services.records.ended(self._terminal_id, *end)

        async def released() -> None:
            if self._fault is not None:
                await write_end()
                self._fault = None
            await self._services.records.released(self._terminal_id)

        try:
            try:
                await write_end()
            except Exception as error:  # noqa: BLE001 - delete the sandbox anyway, then retry
                self._fault = error
            await self._services.cleanups.settle(self._terminal_id, released)
        finally:
            # Release the waiters after any error.
            self._on_end()
            self._gone.set()
        if self._fault is not None:
            raise self._fault


async def past_step(records: TerminalRecords, terminal_id: str, step: Step) -> terminal_service_pb2.StepResponse:
    """The result of a completed step, also of an episode that has ended."""
    await records.get(terminal_id)
    past = await records.step(terminal_id, step.step_id)
    if past is None or past.result is None:
        raise episode_ended()
    if past.digest != step.digest:
        raise step_reused()
    return past.result
