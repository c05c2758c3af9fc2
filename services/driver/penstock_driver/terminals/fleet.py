"""The terminal episodes of a driver, as owned tasks: open, step, answer, close, and what a restart does about them.

Invariants: steps of one episode are done one after another, and each one outlives the stream that brought it; what a
step gave is on disk before it is told; before the verifier starts, everything that the commands started is dead (R60);
an episode that has ended has no sandbox, whatever ended it (R70). After a kill -9 an open episode is taken up again,
with the command that was running; one that was answered and not graded yet, or that needs what is kept in memory only,
ends as DRIVER_RESTARTED.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import structlog

from penstock_chassis.errors import AlreadyExists, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.ports import CommandResult, Sandboxes
from penstock_driver.preflight import Preflight
from penstock_driver.records import Records, new_id
from penstock_driver.releases import DRIVER_LABEL, Releases
from penstock_driver.rollouts import (
    Cause,
    CommandFinished,
    Failure,
    Outcome,
    Party,
    Phase,
    RolloutFailed,
)
from penstock_driver.terminals.endings import draining, ended_from_outside, failure_of_step, fault, stopped
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
from penstock_driver.terminals.records import PlaceRecord, StepRecord, TerminalRecord, TerminalRecords
from penstock_driver.terminals.setups import TerminalSetups
from penstock_driver.terminals.shell import ShellState
from penstock_driver.terminals.steps import TerminalSteps

TERMINAL_LABEL: Final = "penstock_terminal"

_log = structlog.get_logger("penstock.driver")


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that is being done, or waits for its turn."""

    digest: str
    task: asyncio.Task[bytes]


@dataclass(slots=True, eq=False)
class _Live:
    """An episode that is open, or being verified."""

    terminal_id: str
    order: TerminalOrder
    place: PlaceRecord
    shell: ShellState
    course: EpisodeCourse
    over: asyncio.Future[Outcome]
    """Says how it ends as soon as that is certain; what runs then stops."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    flights: dict[str, _Flight] = field(default_factory=dict)
    unfinished: dict[str, bytes] = field(default_factory=dict)
    """What the step that its end cut off gives, by step id."""
    reports: list[CommandFinished] = field(default_factory=list)
    fault: Exception | None = None
    """Why its end is not on disk."""
    timer: asyncio.TimerHandle | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Terminals:
    """All episodes of one driver. Take up with `recover()`, stop with `aclose()`."""

    def __init__(
        self,
        requests: Records,
        records: TerminalRecords,
        sandboxes: Sandboxes,
        preflight: Preflight,
        forms: Forms,
        *,
        instance_id: str,
        max_open: int,
    ) -> None:
        self._requests = requests
        self._records = records
        self._sandboxes = sandboxes
        self._preflight = preflight
        self._forms = forms
        self._max_open = max_open
        self._setups = TerminalSetups(sandboxes)
        self._steps = TerminalSteps(sandboxes)
        self._instance_id = instance_id
        self._releases = Releases(self._release)
        self._live: dict[str, _Live] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._claims = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    # Opening ----------------------------------------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        """How many are open."""
        return len(self._live)

    @property
    def owed(self) -> tuple[str, ...]:
        """Episodes that are over and still have a sandbox, because the sandbox service cannot be reached."""
        return self._releases.owed

    async def open(
        self, order: TerminalOrder, *, request_id: str, digest: str, key: str, shown: bytes, kept: bytes | None
    ) -> TerminalRecord:
        """Open an episode, or find what the same request opened.

        `key` is the digest of what the prepared state depends on, `shown` what GetTerminal tells, `kept` what `Forms`
        makes the order of again, None for an order that must not be kept.
        """
        known = await self._requests.known_request(request_id, digest)
        if known is None:
            with self._claim():
                await self._preflight.check_terminal(order.sandbox)
                record = TerminalRecord(new_id("t"), request_id, dict(order.labels), shown, time.time())
                try:
                    await self._records.create(record, digest)
                    known = record.terminal_id
                except AlreadyExists:
                    known = await self._requests.known_request(request_id, digest)
                    if known is None:
                        raise
                else:
                    task = self._own(self._open(record, order, key, kept))
                    self._opening[known] = task
                    task.add_done_callback(lambda _: self._opening.pop(record.terminal_id, None))
        if opening := self._opening.get(known):
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                if opening.cancelled():
                    raise draining() from None
                raise
        return await self._records.get(known)

    @contextmanager
    def _claim(self) -> Iterator[None]:
        """A place among those that may be open."""
        if self._closing:
            raise draining()
        count = len(self._live) + len(self._opening) + self._claims
        if count >= self._max_open:
            message = f"{count} terminals are open already, which is the most"
            raise ResourceExhausted(message, reason="TERMINAL_LIMIT", retry_after_s=5.0)
        self._claims += 1
        try:
            yield
        finally:
            self._claims -= 1

    async def _open(self, record: TerminalRecord, order: TerminalOrder, key: str, kept: bytes | None) -> None:
        try:
            prepared, place = await self._setups.place(order, key, record.terminal_id, self._labels(record.terminal_id))
            deadline = time.time() + order.limits.agent_s
            setup = self._forms.commands(prepared.commands)
            await self._records.opened(record.terminal_id, place, deadline, kept, setup)
        except BaseException:
            await self._forget(record)
            raise
        shell = ShellState(place.shell_directory)
        self._admit(record.terminal_id, order, place, shell, EpisodeCourse(order.max_commands), deadline)

    def _admit(
        self,
        terminal_id: str,
        order: TerminalOrder,
        place: PlaceRecord,
        shell: ShellState,
        course: EpisodeCourse,
        deadline: float,
    ) -> _Live:
        loop = asyncio.get_running_loop()
        live = _Live(terminal_id, order, place, shell, course, loop.create_future())
        live.timer = loop.call_later(max(0.0, deadline - time.time()), self._expire, live)
        self._live[terminal_id] = live
        return live

    # Steps ------------------------------------------------------------------------------------------------------------

    async def step(self, terminal_id: str, step_id: str, action: Action, *, digest: str, kept: bytes) -> bytes:
        """Do a step, or find what the same step gave; the observation in the wire's form.

        `digest` stands for the action, which `Forms` makes of `kept` again.
        """
        live = self._live.get(terminal_id)
        if live is None:
            return await self._past(terminal_id, step_id, digest)
        flight = live.flights.get(step_id)
        if flight is None:
            if live.course.knows(step_id, digest):
                return await self._past(terminal_id, step_id, digest)
            flight = self._take_off(live, step_id, digest, self._in_turn(live, step_id, action, digest, kept))
        elif flight.digest != digest:
            raise step_reused()
        return await asyncio.shield(flight.task)

    async def _past(self, terminal_id: str, step_id: str, digest: str) -> bytes:
        """What a step gave that is done, of an episode that may have ended."""
        await self._records.get(terminal_id)
        step = await self._records.step(terminal_id, step_id)
        if step is None or step.result is None:
            raise episode_ended()
        if step.digest != digest:
            raise step_reused()
        return step.result

    def _take_off(self, live: _Live, step_id: str, digest: str, work: Coroutine[Any, Any, bytes]) -> _Flight:
        flight = live.flights[step_id] = _Flight(digest, self._own(work))
        flight.task.add_done_callback(lambda _: live.flights.pop(step_id))
        return flight

    async def _in_turn(self, live: _Live, step_id: str, action: Action, digest: str, kept: bytes) -> bytes:
        async with live.turn:
            is_answer = isinstance(action, Answer)
            number = live.course.begin(step_id, digest, is_answer=is_answer)
            step = StepRecord(number, step_id, digest, kept)
            with self._faults_end(live):
                await self._records.begin(live.terminal_id, step, is_answer=is_answer)
                given = await self._do(live, step, action)
        return await self._told(live, step_id, given)

    async def _taken_up(self, live: _Live, step: StepRecord, action: Action) -> bytes:
        async with live.turn:
            with self._faults_end(live):
                given = await self._do(live, step, action)
        return await self._told(live, step.step_id, given)

    @contextmanager
    def _faults_end(self, live: _Live) -> Iterator[None]:
        """End an episode of which a step is begun and not on disk: what it does next could not be told apart."""
        try:
            yield
        except Exception:
            self._own(self._end(live, fault(live.course)))
            raise

    async def _told(self, live: _Live, step_id: str, given: bytes | None) -> bytes:
        """What a step gave; None for one that the end of its episode cut off: it is told with that."""
        if given is not None:
            return given
        await live.gone.wait()
        if live.fault is not None:
            raise live.fault
        return live.unfinished[step_id]

    async def _do(self, live: _Live, step: StepRecord, action: Action) -> bytes | None:
        """Do a step, up to the end of its episode."""
        work = asyncio.ensure_future(
            self._steps.answer(live.order, live.place, action.text, step.number - 1, live.reports.append)
            if isinstance(action, Answer)
            else self._steps.command(live.order, live.place, live.shell, step.number, action)
        )
        ends: list[asyncio.Future[Any]] = [work, live.over]
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
            outcome = Outcome(failure=failure_of_step(error, live.course))
        except Exception:  # noqa: BLE001 - an episode always ends with an outcome
            _log.exception("a terminal's step failed by a fault of the driver", terminal_id=live.terminal_id)
            outcome = fault(live.course)
        if result is not None:
            live.shell = live.shell.after(step.number, result.exit)
            given = self._forms.observation(step.step_id, Observation(result=result))
            shell = (live.shell.saved_by, live.shell.last_code)
            await self._records.done(live.terminal_id, step.step_id, given, shell)
            return given
        if not live.course.end():
            # It ended while the step was done, and whoever ended it waits for this one's turn to be over.
            self._cut_off(live, step.step_id, live.over.result())
            return None
        live.over.set_result(outcome)
        self._cut_off(live, step.step_id, outcome)
        await self._finish(live, outcome)
        return None

    def _cut_off(self, live: _Live, step_id: str, outcome: Outcome) -> None:
        last = Observation(ended=True, reward=outcome.reward, failure=outcome.failure)
        live.unfinished[step_id] = self._forms.observation(step_id, last)

    # Ends -------------------------------------------------------------------------------------------------------------

    async def close(self, terminal_id: str) -> None:
        """End an episode without an answer; when this returns its sandbox is gone.

        Unavailable (TERMINAL_UNRELEASED) while that has not succeeded.
        """
        if opening := self._opening.get(terminal_id):
            await asyncio.wait([opening])
        if live := self._live.get(terminal_id):
            await asyncio.shield(
                self._own(self._end(live, ended_from_outside(Cause.CANCELLED, "CLOSED", "the episode was closed")))
            )
        if await self._records.is_unreleased(terminal_id):
            message = "the episode has ended, and its sandbox could not be deleted yet: the driver goes on trying"
            raise Unavailable(message, reason="TERMINAL_UNRELEASED", retry_after_s=1.0)

    def _expire(self, live: _Live) -> None:
        if live.course.is_open:  # a verifier has a limit of its own
            message = f"no answer came in {live.order.limits.agent_s:g} s"
            self._own(self._end(live, ended_from_outside(Cause.TIMEOUT, "EPISODE_TIMED_OUT", message)))

    async def _end(self, live: _Live, outcome: Outcome) -> None:
        """End an episode from outside of its steps, unless it has ended; return when its sandbox is gone."""
        if live.course.end():
            live.over.set_result(outcome)
            async with live.turn:
                await self._finish(live, outcome)
        else:
            await live.gone.wait()

    async def _finish(self, live: _Live, outcome: Outcome) -> None:
        if live.timer:
            live.timer.cancel()
        end = (self._forms.outcome(outcome), self._forms.commands(live.reports), dict(live.unfinished))

        async def write_end() -> None:
            await self._records.ended(live.terminal_id, *end)

        async def released() -> None:
            if live.fault is not None:
                await write_end()
                live.fault = None
            await self._records.released(live.terminal_id)

        try:
            try:
                await write_end()
            except Exception as error:  # noqa: BLE001 - the sandbox goes all the same, and then it is tried again
                live.fault = error
            await self._releases.settle(live.terminal_id, released)
        finally:
            # Whatever went wrong: nobody waits for what does not come.
            del self._live[live.terminal_id]
            live.gone.set()
        if live.fault is not None:
            raise live.fault

    # The whole --------------------------------------------------------------------------------------------------------

    async def get(self, terminal_id: str) -> TerminalRecord:
        """An episode as it stands; NotFound (TERMINAL_UNKNOWN)."""
        return await self._records.get(terminal_id)

    async def recover(self) -> int:
        """Take up what the last driver left, and return how many episodes go on."""
        taken_up = 0
        for record in await self._records.unreleased():
            if record.outcome is not None:
                self._owe_release(record.terminal_id)
            elif record.place is None:
                # Nobody was told of it: the same request opens another one.
                await self._records.forget_request(record)
                self._releases.owe(record.terminal_id, partial(self._records.forget, record))
            elif record.answered or record.order is None or record.deadline is None:
                await self._end_lost(record)
            else:
                await self._take_up(record, record.place, record.order, record.deadline)
                taken_up += 1
        return taken_up

    async def _take_up(self, record: TerminalRecord, place: PlaceRecord, kept: bytes, deadline: float) -> None:
        order = self._forms.order(kept)
        course, shell = EpisodeCourse(order.max_commands), ShellState(place.shell_directory)
        pending: StepRecord | None = None
        for step in await self._records.steps(record.terminal_id):
            course.begin(step.step_id, step.digest, is_answer=False)
            if step.shell is not None:
                shell = replace(shell, saved_by=step.shell[0], last_code=step.shell[1])
            if step.result is None:
                pending = step
        live = self._admit(record.terminal_id, order, place, shell, course, deadline)
        if pending is not None and pending.action is not None:
            action = self._forms.action(pending.action)
            self._take_off(live, pending.step_id, pending.digest, self._taken_up(live, pending, action))

    async def _end_lost(self, record: TerminalRecord) -> None:
        phase = Phase.VERIFYING if record.answered else Phase.RUNNING
        message = "the driver died while the episode was open, and it could not be taken up again"
        outcome = Outcome(
            failure=Failure(Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, phase, part=Party.DRIVER)
        )
        last = Observation(ended=True, failure=outcome.failure)
        cut_off = {
            step.step_id: self._forms.observation(step.step_id, last)
            for step in await self._records.steps(record.terminal_id)
            if step.result is None
        }
        await self._records.ended(record.terminal_id, self._forms.outcome(outcome), b"", cut_off)
        self._owe_release(record.terminal_id)

    def _labels(self, terminal_id: str) -> dict[str, str]:
        return {DRIVER_LABEL: self._instance_id, TERMINAL_LABEL: terminal_id}

    async def _release(self, terminal_id: str) -> None:
        await self._sandboxes.delete_labelled(self._labels(terminal_id))

    def _owe_release(self, terminal_id: str) -> None:
        self._releases.owe(terminal_id, partial(self._records.released, terminal_id))

    async def _forget(self, record: TerminalRecord) -> None:
        """An opening that failed: its request may come again, and it is known until its sandbox is gone."""
        try:
            await self._records.forget_request(record)
        finally:
            await self._releases.settle(record.terminal_id, partial(self._records.forget, record))

    async def aclose(self) -> None:
        """End what is open, as DRIVER_STOPPED, and wait until all of it is released."""
        self._closing = True
        self._releases.stop()
        for opening in list(self._opening.values()):
            opening.cancel()
        stop = Outcome(failure=stopped(Phase.RUNNING))
        for live in list(self._live.values()):
            self._own(self._end(live, stop))
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._releases.aclose()

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, PenstockError):
            _log.error("a terminal's task failed", error=repr(error))
