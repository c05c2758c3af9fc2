"""The terminal episodes of a driver, as owned tasks: open, step, answer, close, and what a restart does about them.

Invariants: before the verifier starts, everything that the commands started is dead (R60); an episode that has ended
has no sandbox, whatever ended it (R70). After a kill -9 an open episode is taken up again, with the command that was
running; one that was answered and not graded yet, or that needs what is kept in memory only, ends as DRIVER_RESTARTED.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from penstock_chassis.errors import AlreadyExists, NotFound, PenstockError, ResourceExhausted
from penstock_driver.ports import Sandboxes
from penstock_driver.preflight import Preflight
from penstock_driver.records import Records, new_id
from penstock_driver.releases import DRIVER_LABEL, Releases
from penstock_driver.rollouts import (
    Cause,
    Failure,
    Outcome,
    Party,
    Phase,
)
from penstock_driver.terminals.endings import draining, ended_from_outside, stopped, unreleased
from penstock_driver.terminals.episodes import (
    Action,
    EpisodeCourse,
    Forms,
    Observation,
    TerminalOrder,
)
from penstock_driver.terminals.live import LiveEpisode, Shared, past_step
from penstock_driver.terminals.records import PlaceRecord, StepRecord, TerminalRecord, TerminalRecords
from penstock_driver.terminals.setups import TerminalSetups
from penstock_driver.terminals.shell import ShellState
from penstock_driver.terminals.steps import TerminalSteps

TERMINAL_LABEL: Final = "penstock_terminal"

_log = structlog.get_logger("penstock.driver")


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
        self._instance_id = instance_id
        self._releases = Releases(self._release)
        self._shared = Shared(records, TerminalSteps(sandboxes), forms, self._releases, self._own)
        self._live: dict[str, LiveEpisode] = {}
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
        try:
            return await self._records.get(known)
        except NotFound:
            raise unreleased("the episode that this request opened before could not be opened") from None

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
    ) -> LiveEpisode:
        def left() -> None:
            del self._live[terminal_id]

        live = self._live[terminal_id] = LiveEpisode(
            terminal_id, order, place, shell, course, deadline=deadline, shared=self._shared, left=left
        )
        return live

    # Steps ------------------------------------------------------------------------------------------------------------

    async def step(self, terminal_id: str, step_id: str, action: Action, *, digest: str, kept: bytes) -> bytes:
        """Do a step, or find what the same step gave; the observation in the wire's form.

        `digest` stands for the action, which `Forms` makes of `kept` again.
        """
        if live := self._live.get(terminal_id):
            return await live.step(step_id, action, digest=digest, kept=kept)
        return await past_step(self._records, terminal_id, step_id, digest)

    # Ends -------------------------------------------------------------------------------------------------------------

    async def close(self, terminal_id: str) -> None:
        """End an episode without an answer; when this returns its sandbox is gone.

        Unavailable (TERMINAL_UNRELEASED) while that has not succeeded.
        """
        if opening := self._opening.get(terminal_id):
            await asyncio.wait([opening])
        if live := self._live.get(terminal_id):
            closed = ended_from_outside(Cause.CANCELLED, "CLOSED", "the episode was closed")
            await asyncio.shield(self._own(live.end(closed)))
        if await self._records.is_unreleased(terminal_id):
            raise unreleased("the episode has ended")

    # The whole --------------------------------------------------------------------------------------------------------

    async def get(self, terminal_id: str) -> TerminalRecord:
        """An episode as it stands; NotFound (TERMINAL_UNKNOWN)."""
        return await self._records.get(terminal_id)

    async def recover(self) -> int:
        """Take up what the last driver left, and return how many episodes go on.

        All is read first: when the disk refuses that, the next start finds everything as it was.
        """
        taken_up = 0
        left = [(record, await self._records.steps(record.terminal_id)) for record in await self._records.unreleased()]
        for record, steps in left:
            if record.outcome is not None:
                self._owe_release(record.terminal_id)
            elif record.place is None:
                # Nobody was told of it: the same request opens another one.
                await self._forget_request(record)
                self._releases.owe(record.terminal_id, partial(self._records.forget, record))
            elif record.answered or record.order is None or record.deadline is None:
                await self._end_lost(record, steps)
            else:
                self._take_up(record, record.place, record.order, record.deadline, steps)
                taken_up += 1
        return taken_up

    def _take_up(
        self, record: TerminalRecord, place: PlaceRecord, kept: bytes, deadline: float, steps: Sequence[StepRecord]
    ) -> None:
        order = self._forms.order(kept)
        course, shell = EpisodeCourse(order.max_commands), ShellState(place.shell_directory)
        pending: StepRecord | None = None
        for step in steps:
            course.begin(step.step_id, step.digest, is_answer=False)
            if step.shell is not None:
                shell = replace(shell, saved_by=step.shell[0], last_code=step.shell[1])
            if step.result is None:
                pending = step
        live = self._admit(record.terminal_id, order, place, shell, course, deadline)
        if pending is not None and pending.action is not None:
            live.take_up(pending, self._forms.action(pending.action))

    async def _end_lost(self, record: TerminalRecord, steps: Sequence[StepRecord]) -> None:
        phase = Phase.VERIFYING if record.answered else Phase.RUNNING
        message = "the driver died while the episode was open, and it could not be taken up again"
        outcome = Outcome(
            failure=Failure(Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, phase, part=Party.DRIVER)
        )
        last = Observation(ended=True, failure=outcome.failure)
        cut_off = {step.step_id: self._forms.observation(step.step_id, last) for step in steps if step.result is None}
        end = (record.terminal_id, self._forms.outcome(outcome), b"", cut_off)

        async def released() -> None:
            await self._records.ended(*end)  # which it may be already
            await self._records.released(record.terminal_id)

        try:
            await self._records.ended(*end)
        except sqlite3.OperationalError as error:
            _log.warning("an episode's end is not on disk yet", terminal_id=record.terminal_id, error=repr(error))
        self._releases.owe(record.terminal_id, released)

    def _labels(self, terminal_id: str) -> dict[str, str]:
        return {DRIVER_LABEL: self._instance_id, TERMINAL_LABEL: terminal_id}

    async def _release(self, terminal_id: str) -> None:
        await self._sandboxes.delete_labelled(self._labels(terminal_id))

    def _owe_release(self, terminal_id: str) -> None:
        self._releases.owe(terminal_id, partial(self._records.released, terminal_id))

    async def _forget(self, record: TerminalRecord) -> None:
        """An opening that failed: its request may come again, and it is known until its sandbox is gone."""
        await self._forget_request(record)
        await self._releases.settle(record.terminal_id, partial(self._records.forget, record))

    async def _forget_request(self, record: TerminalRecord) -> None:
        """A request may open another episode at once; where the disk refuses that, when the sandbox is gone."""
        try:
            await self._records.forget_request(record)
        except sqlite3.OperationalError as error:
            _log.warning("a request is not forgotten yet", terminal_id=record.terminal_id, error=repr(error))

    async def aclose(self) -> None:
        """End what is open, as DRIVER_STOPPED, and wait until all of it is released."""
        self._closing = True
        self._releases.stop()
        for opening in list(self._opening.values()):
            opening.cancel()
        stop = Outcome(failure=stopped(Phase.RUNNING))
        for live in list(self._live.values()):
            self._own(live.end(stop))
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
