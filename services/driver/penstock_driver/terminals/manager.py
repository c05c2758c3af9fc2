"""Runs the terminal episodes of a driver as owned tasks: open, step, answer, close, and recovery after a restart.

Invariants: before the verifier starts, all processes that the commands started are dead (R60). An ended episode has no
sandbox, whatever ended it (R70). After a kill -9 an open episode continues, with the command that was running, and an
answered one is graded, unless its verifier had begun: that one ends as GRADING_INTERRUPTED.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from penstock.driver.v1 import terminal_service_pb2
from penstock_chassis import times
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import Quotas, acting_in
from penstock_chassis.errors import NotFound, PenstockError, ResourceExhausted
from penstock_chassis.homes import Home
from penstock_driver.domain.ports import Sandboxes
from penstock_driver.domain.records import RequestKey
from penstock_driver.domain.rollout import (
    Cause,
    Component,
    Failure,
    Outcome,
    Phase,
)
from penstock_driver.domain.terminal_episode import EpisodeProgress, Observation, Step, TerminalSpec
from penstock_driver.environments.cleanup import DRIVER_LABEL, Cleanups
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.store.records import Records
from penstock_driver.terminals.episode import EpisodeServices, EpisodeStart, LiveEpisode, past_step
from penstock_driver.terminals.failures import draining, ended_from_outside, stopped, unreleased
from penstock_driver.terminals.records import PlaceRecord, StepRecord, TerminalRecord, TerminalRecords
from penstock_driver.terminals.setup import TerminalSetups
from penstock_driver.terminals.shell import ShellState
from penstock_driver.terminals.steps import TerminalSteps
from penstock_driver.wire.specs import step_action, terminal_spec
from penstock_driver.wire.to_proto import (
    commands_to_proto,
    observation_to_proto,
    outcome_to_proto,
    public_terminal,
    recovery_request,
)

TERMINAL_LABEL: Final = "penstock_terminal"

_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class OpenLimits:
    """At most `total` episodes are open at once; `quotas` has the most of each namespace that has a quota."""

    total: int
    quotas: Mapping[str, int]


class TerminalManager:
    """All episodes of one driver. Start with `recover()`, stop with `aclose()`."""

    def __init__(
        self,
        requests: Records,
        records: TerminalRecords,
        sandboxes: Sandboxes,
        preflight: Preflight,
        *,
        instance_id: str,
        home: Home,
        limits: OpenLimits,
        clock: Callable[[], float] = times.even_time,
    ) -> None:
        """`clock` gives monotonic seconds since the epoch: setting the machine's clock ends no episode."""
        self._requests = requests
        self._records = records
        self._sandboxes = sandboxes
        self._preflight = preflight
        self._max_open = limits.total
        self._quotas = Quotas(limits.quotas, "terminals")
        self._held: Counter[str] = Counter()
        """By namespace: the episodes that are open, that are being opened, and the claims."""
        self._clock = clock
        self._setups = TerminalSetups(sandboxes)
        self._instance_id = instance_id
        self.home = home
        self._cleanups = Cleanups(self._release)
        self._tasks = TaskOwner(unlogged=(PenstockError,))
        self._services = EpisodeServices(records, TerminalSteps(sandboxes), self._cleanups, self._tasks)
        self._live: dict[str, LiveEpisode] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self.draining = False
        """Whether new episodes are refused."""

    # Opening ----------------------------------------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        """Number of open episodes."""
        return len(self._live)

    @property
    def pending_cleanups(self) -> tuple[str, ...]:
        """Ended episodes that still have a sandbox, because the sandbox service is unreachable."""
        return self._cleanups.owed

    async def open(self, key: RequestKey, spec: TerminalSpec) -> TerminalRecord:
        """Open an episode, or return the one that the same request opened."""
        known = await self._requests.known_request(key)
        if known is None:
            with self._claim(spec.namespace):
                terms = await self._preflight.check_terminal(spec.sandbox, spec.packages)
                spec = replace(spec, sandbox=terms)
                begun = await self._tasks.run(self._begin(key, spec))
            known = begun
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
            raise unreleased("the earlier request with this id failed to open the episode") from None

    @contextmanager
    def _claim(self, namespace: str) -> Iterator[None]:
        """Reserve a slot, which counts towards the namespace's quota."""
        if self._closing or self.draining:
            raise draining()
        count = self._held.total()
        if count >= self._max_open:
            message = f"{count} terminals are open, which is the maximum: close one, or try again later"
            raise ResourceExhausted(message, reason="TERMINAL_LIMIT", retry_after_s=5.0)
        self._quotas.check(namespace, self._held[namespace])
        self._held[namespace] += 1
        try:
            yield
        finally:
            self._let_go(namespace)

    def _let_go(self, namespace: str) -> None:
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]

    async def _begin(self, key: RequestKey, spec: TerminalSpec) -> str:
        """Record a new episode and start to open it; return the id of this request's, or of an equal concurrent one's.

        Must not be cancelled in between: an episode that is recorded but not opened would never be.
        """
        record = TerminalRecord(
            self.home.new_id("t"), key.request_id, dict(spec.labels), public_terminal(spec), self._clock()
        )
        if (known := await self._requests.unless_known(key, self._records.create(record, key))) is not None:
            return known

        def opened(_: asyncio.Task[None]) -> None:
            del self._opening[record.terminal_id]
            self._let_go(spec.namespace)

        task = self._opening[record.terminal_id] = self._tasks.start(self._open(record, spec))
        self._held[spec.namespace] += 1
        task.add_done_callback(opened)
        if self._closing:  # recorded before `aclose`, begun too late for its cancellation
            task.cancel()
        return record.terminal_id

    async def _open(self, record: TerminalRecord, spec: TerminalSpec) -> None:
        try:
            with acting_in(record.namespace):
                prepared, place = await self._setups.place(spec, record.terminal_id, self._labels(record.terminal_id))
            left_s = spec.limits.agent_s
            deadline = self._clock() + left_s
            setup = commands_to_proto(prepared.commands)
            await self._records.opened(record.terminal_id, place, deadline, recovery_request(spec), setup)
        except BaseException:
            # Owned: stopping cancels the opening and must not interrupt this.
            await self._tasks.run(self._forget(record))
            raise
        shell = ShellState(place.shell_directory)
        start = EpisodeStart(spec, place, shell, EpisodeProgress(spec.max_commands), left_s)
        self._admit(record.terminal_id, start)

    def _admit(self, terminal_id: str, start: EpisodeStart) -> LiveEpisode:
        def on_end() -> None:
            del self._live[terminal_id]
            self._let_go(start.spec.namespace)

        self._held[start.spec.namespace] += 1
        live = self._live[terminal_id] = LiveEpisode(terminal_id, start, self._services, on_end)
        return live

    # Steps ------------------------------------------------------------------------------------------------------------

    async def step(self, terminal_id: str, step: Step) -> terminal_service_pb2.StepResponse:
        """Run a step, or join the same step; return the observation."""
        if live := self._live.get(terminal_id):
            return await live.step(step)
        return await past_step(self._records, terminal_id, step)

    # Ends -------------------------------------------------------------------------------------------------------------

    async def close(self, terminal_id: str) -> None:
        """End an episode without an answer; its sandbox is gone when this returns.

        Unavailable (TERMINAL_UNRELEASED) while the sandbox cannot be deleted.
        """
        if opening := self._opening.get(terminal_id):
            await asyncio.wait([opening])
        if live := self._live.get(terminal_id):
            closed = ended_from_outside(Cause.CANCELLED, "CLOSED", "the episode was closed")
            await self._tasks.run(live.end(closed))
        if await self._records.is_unreleased(terminal_id):
            raise unreleased("the episode has ended")

    # The whole --------------------------------------------------------------------------------------------------------

    async def get(self, terminal_id: str) -> TerminalRecord:
        """Return the current state of an episode; NotFound (TERMINAL_UNKNOWN)."""
        return await self._records.get(terminal_id)

    async def recover(self) -> int:
        """Recover the last driver's episodes; return the number of those that continue.

        Everything is read first: if the disk refuses that, the next start finds everything unchanged.
        """
        continued = 0
        unreleased = [
            (record, await self._records.steps(record.terminal_id)) for record in await self._records.unreleased()
        ]
        for record, steps in unreleased:
            if record.outcome is not None:
                self._clean_up_later(record.terminal_id)
            elif record.place is None:
                # Its id was never returned: the same request opens another one.
                await self._forget_request(record)
                self._cleanups.owe(record.terminal_id, partial(self._records.forget, record))
            elif record.deadline is None or (spec := _spec_of(record)) is None:
                await self._end_lost(record, steps)
            else:
                self._resume(record, record.place, spec, record.deadline, steps)
                continued += 1
        return continued

    def _resume(
        self,
        record: TerminalRecord,
        place: PlaceRecord,
        spec: TerminalSpec,
        deadline: float,
        steps: Sequence[StepRecord],
    ) -> None:
        course, shell = EpisodeProgress(spec.max_commands), ShellState(place.shell_directory)
        pending: StepRecord | None = None
        for step in steps:
            course.begin(step.step_id, step.digest, is_answer=record.answered and step is steps[-1])
            if step.shell is not None:
                shell = replace(shell, saved_by=step.shell[0], last_code=step.shell[1])
            if step.result is None:
                pending = step
        # The clock may have been set back meanwhile: never exceed the original limit.
        left_s = min(max(0.0, deadline - self._clock()), spec.limits.agent_s)
        live = self._admit(record.terminal_id, EpisodeStart(spec, place, shell, course, left_s))
        if pending is not None and pending.action is not None:
            live.resume(pending, step_action(pending.action))

    async def _end_lost(self, record: TerminalRecord, steps: Sequence[StepRecord]) -> None:
        outcome = Outcome(failure=_lost(record))
        last = Observation(ended=True, failure=outcome.failure)
        cut_off = {step.step_id: observation_to_proto(step.step_id, last) for step in steps if step.result is None}
        end = (record.terminal_id, outcome_to_proto(outcome), terminal_service_pb2.Terminal(), cut_off)

        async def released() -> None:
            await self._records.ended(*end)  # may be on disk already
            await self._records.released(record.terminal_id)

        try:
            await self._records.ended(*end)
        except sqlite3.OperationalError as error:
            _log.warning("an episode's end is not on disk yet", terminal_id=record.terminal_id, error=repr(error))
        self._cleanups.owe(record.terminal_id, released)

    def _labels(self, terminal_id: str) -> dict[str, str]:
        return {DRIVER_LABEL: self._instance_id, TERMINAL_LABEL: terminal_id}

    async def _release(self, terminal_id: str) -> None:
        """Delete an episode's sandbox. Where the service that has it is known, no other one that is lost delays this.

        Of an opening that failed it is not known. An open episode has one sandbox; if another service had answered its
        fork too late, what that made ends with its lease.
        """
        beside = await self._sandbox_of(terminal_id)
        await self._sandboxes.delete_labelled(self._labels(terminal_id), beside=beside)

    async def _sandbox_of(self, terminal_id: str) -> str:
        """The id of an episode's sandbox; empty = not known, also while the journal cannot be read."""
        if live := self._live.get(terminal_id):
            return live.sandbox_id
        try:
            place = (await self._records.get(terminal_id)).place
        except (NotFound, sqlite3.Error):
            return ""
        return "" if place is None else place.sandbox_id

    def _clean_up_later(self, terminal_id: str) -> None:
        self._cleanups.owe(terminal_id, partial(self._records.released, terminal_id))

    async def _forget(self, record: TerminalRecord) -> None:
        """Undo a failed opening: its request may be repeated, and it stays recorded until its sandbox is gone."""
        await self._forget_request(record)
        await self._cleanups.settle(record.terminal_id, partial(self._records.forget, record))

    async def _forget_request(self, record: TerminalRecord) -> None:
        """Let the request open another episode at once; if the disk refuses, once the sandbox is gone."""
        try:
            await self._records.forget_request(record)
        except sqlite3.OperationalError as error:
            _log.warning("a request's record was not deleted yet", terminal_id=record.terminal_id, error=repr(error))

    async def leave(self, wait_s: float) -> None:
        """Stop without ending an open episode: this driver's next process goes on with all (decision 061).

        Wait at most `wait_s` seconds for verifiers that have begun.
        """
        self._closing = True
        if grading := [task for live in self._live.values() for task in live.grading]:
            await asyncio.wait(grading, timeout=wait_s)
        for live in list(self._live.values()):
            live.leave()

    async def aclose(self) -> None:
        """End all open episodes as DRIVER_STOPPED and wait until all of them are released."""
        self._closing = True
        self._cleanups.stop()
        for opening in list(self._opening.values()):
            opening.cancel()
        stop = Outcome(failure=stopped(Phase.RUNNING))
        for live in list(self._live.values()):
            self._tasks.start(live.end(stop))
        await self._tasks.wait()
        await self._cleanups.aclose()


def _spec_of(record: TerminalRecord) -> TerminalSpec | None:
    """The spec of an episode that can go on; None for one that cannot, or that this version does not accept."""
    if record.request is None or record.grading or (record.earlier and record.answered):
        return None
    try:
        return terminal_spec(record.request, record.namespace)
    except PenstockError as error:
        _log.warning("an episode cannot go on", terminal_id=record.terminal_id, error=error.message)
        return None


def _lost(record: TerminalRecord) -> Failure:
    """Why an episode does not go on after a restart."""
    phase = Phase.VERIFYING if record.answered else Phase.RUNNING
    if record.grading:
        message = "the driver was restarted while the verifier ran"
        return Failure(Cause.INFRASTRUCTURE, "GRADING_INTERRUPTED", message, True, phase, component=Component.DRIVER)
    if record.earlier:
        message = "the driver died while the episode was open, and was an earlier version"
        return Failure(Cause.INFRASTRUCTURE, "DRIVER_RESTARTED", message, True, phase, component=Component.DRIVER)
    message = "what the episode needs to go on cannot be opened, or is not accepted"
    return Failure(Cause.INFRASTRUCTURE, "SPEC_UNREADABLE", message, True, phase, component=Component.OPERATOR)
