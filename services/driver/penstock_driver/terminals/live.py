"""One terminal episode that is open, or being verified: its steps and its end.

Invariants: steps are done one after another, and each one outlives the stream that brought it; what a step gave is on
disk before it is told; the end is told when the sandbox is gone, whatever ended the episode (R70).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from penstock_chassis.errors import PenstockError
from penstock_driver.ports import CommandResult
from penstock_driver.releases import Releases
from penstock_driver.rollouts import Cause, CommandFinished, Outcome, RolloutFailed
from penstock_driver.terminals.endings import ended_from_outside, failure_of_step, fault
from penstock_driver.terminals.episodes import (
    Action,
    Answer,
    EpisodeCourse,
    Forms,
    Observation,
    TerminalOrder,
    episode_ended,
    step_reused,
)
from penstock_driver.terminals.records import PlaceRecord, StepRecord, TerminalRecords
from penstock_driver.terminals.shell import ShellState
from penstock_driver.terminals.steps import TerminalSteps

_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class Shared:
    """What a driver's episodes have in common; `own` runs a task that nobody waits for, and sees to its error."""

    records: TerminalRecords
    steps: TerminalSteps
    forms: Forms
    releases: Releases
    own: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that is being done, or waits for its turn."""

    digest: str
    task: asyncio.Task[bytes]


class LiveEpisode:
    """An episode from its opening, or its being taken up again, to its end; `left` is called when it has ended.

    `deadline` is when it ends unanswered, in seconds since the epoch.
    """

    def __init__(
        self,
        terminal_id: str,
        order: TerminalOrder,
        place: PlaceRecord,
        shell: ShellState,
        course: EpisodeCourse,
        *,
        deadline: float,
        shared: Shared,
        left: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._terminal_id = terminal_id
        self._order = order
        self._place = place
        self._shell = shell
        self._course = course
        self._shared = shared
        self._left = left
        # Says how it ends as soon as that is certain; what runs then stops.
        self._over: asyncio.Future[Outcome] = loop.create_future()
        self._turn = asyncio.Lock()
        self._flights: dict[str, _Flight] = {}
        # What the step that its end cut off gives, by step id.
        self._unfinished: dict[str, bytes] = {}
        self._reports: list[CommandFinished] = []
        # Why its end is not on disk.
        self._fault: Exception | None = None
        self._gone = asyncio.Event()
        self._timer = loop.call_later(max(0.0, deadline - time.time()), self._expire)

    async def step(self, step_id: str, action: Action, *, digest: str, kept: bytes) -> bytes:
        """Do a step, or find what the same step gave: the observation in the wire's form."""
        flight = self._flights.get(step_id)
        if flight is None:
            if self._course.knows(step_id, digest):
                if self._course.ended:
                    await self._wait_for_the_end()
                return await past_step(self._shared.records, self._terminal_id, step_id, digest)
            flight = self._take_off(step_id, digest, self._in_turn(step_id, action, digest, kept))
        elif flight.digest != digest:
            raise step_reused()
        return await asyncio.shield(flight.task)

    def take_up(self, step: StepRecord, action: Action) -> None:
        """Go on with a step that the last driver began."""
        self._take_off(step.step_id, step.digest, self._taken_up(step, action))

    async def end(self, outcome: Outcome) -> None:
        """End an episode from outside of its steps, unless it has ended; return when its sandbox is gone."""
        if self._course.end():
            self._over.set_result(outcome)
            async with self._turn:
                await self._finish(outcome)
        else:
            await self._gone.wait()

    def _take_off(self, step_id: str, digest: str, work: Coroutine[Any, Any, bytes]) -> _Flight:
        flight = self._flights[step_id] = _Flight(digest, self._shared.own(work))
        flight.task.add_done_callback(lambda _: self._flights.pop(step_id))
        return flight

    async def _in_turn(self, step_id: str, action: Action, digest: str, kept: bytes) -> bytes:
        async with self._turn:
            is_answer = isinstance(action, Answer)
            number = self._course.begin(step_id, digest, is_answer=is_answer)
            step = StepRecord(number, step_id, digest, kept)
            with self._faults_end():
                await self._shared.records.begin(self._terminal_id, step, is_answer=is_answer)
                given = await self._do(step, action)
        return await self._told(step_id, given)

    async def _taken_up(self, step: StepRecord, action: Action) -> bytes:
        async with self._turn:
            with self._faults_end():
                given = await self._do(step, action)
        return await self._told(step.step_id, given)

    @contextmanager
    def _faults_end(self) -> Iterator[None]:
        """End an episode of which a step is begun and not on disk: what it does next could not be told apart."""
        try:
            yield
        except Exception as error:
            self._shared.own(self.end(fault(self._course, error)))
            raise

    async def _told(self, step_id: str, given: bytes | None) -> bytes:
        """What a step gave; None for one that the end of its episode cut off: it is told with that."""
        if given is not None:
            return given
        await self._wait_for_the_end()
        return self._unfinished[step_id]

    async def _wait_for_the_end(self) -> None:
        """Return when the end is on disk and may be told; raise why it is not."""
        await self._gone.wait()
        if self._fault is not None:
            raise self._fault

    async def _do(self, step: StepRecord, action: Action) -> bytes | None:
        """Do a step, up to the end of its episode."""
        work = asyncio.ensure_future(
            self._shared.steps.answer(self._order, self._place, action.text, step.number - 1, self._reports.append)
            if isinstance(action, Answer)
            else self._shared.steps.command(self._order, self._place, self._shell, step.number, action)
        )
        ends: list[asyncio.Future[Any]] = [work, self._over]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
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
            failure = await self._shared.steps.judged(self._place, failure_of_step(error, self._course))
            outcome = Outcome(failure=failure)
        except Exception as error:  # noqa: BLE001 - an episode always ends with an outcome
            _log.exception("a terminal's step failed by a fault of the driver", terminal_id=self._terminal_id)
            outcome = fault(self._course, error)
        if result is not None:
            self._shell = self._shell.after(step.number, result.exit)
            given = self._shared.forms.observation(step.step_id, Observation(result=result))
            shell = (self._shell.saved_by, self._shell.last_code)
            await self._shared.records.done(self._terminal_id, step.step_id, given, shell)
            return given
        if not self._course.end():
            # It ended while the step was done, and whoever ended it waits for this one's turn to be over.
            self._cut_off(step.step_id, self._over.result())
            return None
        self._over.set_result(outcome)
        self._cut_off(step.step_id, outcome)
        await self._finish(outcome)
        return None

    def _cut_off(self, step_id: str, outcome: Outcome) -> None:
        last = Observation(ended=True, reward=outcome.reward, failure=outcome.failure)
        self._unfinished[step_id] = self._shared.forms.observation(step_id, last)

    def _expire(self) -> None:
        if self._course.is_open:  # a verifier has a limit of its own
            message = f"no answer came in {self._order.limits.agent_s:g} s"
            self._shared.own(self.end(ended_from_outside(Cause.TIMEOUT, "EPISODE_TIMED_OUT", message)))

    async def _finish(self, outcome: Outcome) -> None:
        self._timer.cancel()
        end = (self._shared.forms.outcome(outcome), self._shared.forms.commands(self._reports), dict(self._unfinished))

        async def write_end() -> None:
            await self._shared.records.ended(self._terminal_id, *end)

        async def released() -> None:
            if self._fault is not None:
                await write_end()
                self._fault = None
            await self._shared.records.released(self._terminal_id)

        try:
            try:
                await write_end()
            except Exception as error:  # noqa: BLE001 - the sandbox goes all the same, and then it is tried again
                self._fault = error
            await self._shared.releases.settle(self._terminal_id, released)
        finally:
            # Whatever went wrong: nobody waits for what does not come.
            self._left()
            self._gone.set()
        if self._fault is not None:
            raise self._fault


async def past_step(records: TerminalRecords, terminal_id: str, step_id: str, digest: str) -> bytes:
    """What a step gave that is done, of an episode that may have ended."""
    await records.get(terminal_id)
    step = await records.step(terminal_id, step_id)
    if step is None or step.result is None:
        raise episode_ended()
    if step.digest != digest:
        raise step_reused()
    return step.result
