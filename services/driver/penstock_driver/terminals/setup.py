"""Prepares terminal episodes: a task's files and setup, done once per content, and each episode's forked sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, Internal, NotFound, Unavailable
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.domain.failures import describe, setup_failure
from penstock_driver.domain.ports import CommandReport, PreparedSnapshot, Sandboxes, SnapshotSpec
from penstock_driver.domain.rollout import CommandFinished, Phase
from penstock_driver.domain.terminal_episode import TerminalSpec
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.packages import TaskPackages
from penstock_driver.environments.prepare import setup_of
from penstock_driver.environments.throttle import NODE_LOST, patiently
from penstock_driver.terminals.records import PlaceRecord
from penstock_driver.terminals.shell import ShellState, fresh_state

_OUTPUT_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class PreparedTerminal:
    """The state that an episode is forked from, and the results of its setup."""

    snapshot_id: str
    commands: tuple[CommandFinished, ...]


class TerminalSetups:
    """Prepared states, each made once."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._forks = ThrottledForks(sandboxes)
        self._packages = TaskPackages(sandboxes)
        self._prepared: SingleFlight[tuple[str, str], PreparedTerminal] = SingleFlight()

    async def get(self, spec: TerminalSpec, *, again: bool = False) -> PreparedTerminal:
        """Return the state that `spec` starts from, made once for equal `environment_key` and backend.

        `again` makes it anew.

        FailedPrecondition (SETUP_FAILED), DeadlineExceeded (PREPARE_TIMED_OUT), and the sandbox service's errors.
        """
        key = (spec.sandbox.backend, spec.environment_key)
        if again:
            self._prepared.forget(key)
        limit = spec.limits.prepare_s + spec.limits.setup_s
        try:
            async with asyncio.timeout(limit):
                return await self._prepared.get(
                    key, lambda: patiently(lambda: self._make(spec, again), full_s=spec.limits.prepare_s)
                )
        except TimeoutError:
            message = f"preparing took longer than {limit:g} s"
            raise DeadlineExceeded(message, reason="PREPARE_TIMED_OUT") from None

    async def place(
        self, spec: TerminalSpec, terminal_id: str, labels: Mapping[str, str]
    ) -> tuple[PreparedTerminal, PlaceRecord]:
        """Return a sandbox for one episode, forked from the result of `get`; idempotent."""

        async def fork(prepared: PreparedTerminal) -> PlaceRecord:
            facts = await self._forks.fork(
                prepared.snapshot_id,
                request_id=f"{terminal_id}/{prepared.snapshot_id}",
                backend=spec.sandbox.backend,
                lease_s=spec.limits.sandbox_s,
                labels=labels,
                patience_s=spec.limits.prepare_s,
                repeatable=spec.request.sandbox.repeatable,
            )
            return PlaceRecord(facts.sandbox_id, facts.workdir, fresh_state().directory, facts.home, facts.service)

        prepared = await self.get(spec)
        try:
            place = await fork(prepared)
        except (NotFound, Unavailable) as error:
            # Its sandbox service evicted the snapshot meanwhile, or is lost: another one can make it.
            if isinstance(error, Unavailable) and error.reason != NODE_LOST:
                raise
            prepared = await self.get(spec, again=True)
            place = await fork(prepared)
        await self._sandboxes.write_files(
            place.sandbox_id, [FileToWrite(ShellState(place.shell_directory).path, b"", 0o600)]
        )
        return prepared, place

    async def _make(self, spec: TerminalSpec, again: bool) -> PreparedTerminal:
        try:
            return await self._snapshot(spec, again)
        except NotFound as error:
            if error.reason != "TOOLBOX_UNKNOWN":
                raise
            # The sandbox service evicted the toolbox since it was prepared.
            return await self._snapshot(spec, True)

    async def _snapshot(self, spec: TerminalSpec, again: bool) -> PreparedTerminal:
        commands = setup_of(spec.task, spec.limits)
        packages = await self._packages.get(spec.packages, spec.sandbox, spec.namespace, _unread, again=again)
        wanted = SnapshotSpec(terms=spec.sandbox, toolbox_ids=packages, files=spec.task.files, setup=commands)
        reports: list[CommandReport] = []
        try:
            async for step in self._sandboxes.prepare_snapshot(wanted):
                if isinstance(step, PreparedSnapshot):
                    finished = (
                        CommandFinished.of(Phase.SETTING_UP, r.index, commands[r.index], r.result) for r in reports
                    )
                    return PreparedTerminal(step.snapshot_id, tuple(finished))
                reports.append(step)
        except FailedPrecondition as error:
            if error.reason == "SETUP_FAILED" and reports:
                raise _setup_failed(reports[-1], len(commands)) from error
            raise
        raise Internal("the sandbox service ended the preparation without a snapshot", reason="SNAPSHOT_MISSING")


def _unread(line: str) -> None:
    """An episode has no events for lines of an installation; its failure names the cause."""


def _setup_failed(report: CommandReport, count: int) -> FailedPrecondition:
    ended, result = describe(report.result.exit), report.result
    output = (result.stderr or result.stdout)[-_OUTPUT_BYTES:].decode("utf-8", "replace")
    return FailedPrecondition(
        setup_failure(result, report.index, count),
        reason="SETUP_FAILED",
        metadata={"index": str(report.index), "exit": ended, "output": output},
    )
