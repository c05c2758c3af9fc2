"""The prepared state that the terminal episodes of one content share: the task's files and setup, done once; and the
sandbox of each episode, forked from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, Internal, NotFound
from penstock_chassis.single_flight import SingleFlight
from penstock_driver import rewards
from penstock_driver.endings import describe
from penstock_driver.launches import FileToWrite
from penstock_driver.patience import patiently
from penstock_driver.ports import CommandReport, PreparedSnapshot, Sandboxes, SnapshotOrder
from penstock_driver.preparations import setup_of
from penstock_driver.rollouts import CommandFinished, Phase
from penstock_driver.terminals.episodes import TerminalOrder
from penstock_driver.terminals.records import PlaceRecord
from penstock_driver.terminals.shell import ShellState, fresh_state

_TOLD_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class PreparedTerminal:
    """What an episode is forked from, and how its setup went."""

    snapshot_id: str
    commands: tuple[CommandFinished, ...]


class TerminalSetups:
    """Prepared states, each made once."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._prepared: SingleFlight[str, PreparedTerminal] = SingleFlight()

    async def get(self, order: TerminalOrder, key: str, *, again: bool = False) -> PreparedTerminal:
        """The state that `order` starts from; `key` is the digest of what it depends on, `again` makes it anew.

        FailedPrecondition (SETUP_FAILED), DeadlineExceeded (PREPARE_TIMED_OUT), and the sandbox service's refusals.
        """
        if again:
            self._prepared.forget(key)
        limit = order.limits.prepare_s + order.limits.setup_s
        try:
            async with asyncio.timeout(limit):
                return await self._prepared.get(
                    key, lambda: patiently(lambda: self._make(order), full_s=order.limits.prepare_s)
                )
        except TimeoutError:
            message = f"preparing took longer than {limit:g} s"
            raise DeadlineExceeded(message, reason="PREPARE_TIMED_OUT") from None

    async def place(
        self, order: TerminalOrder, key: str, terminal_id: str, labels: Mapping[str, str]
    ) -> tuple[PreparedTerminal, PlaceRecord]:
        """A sandbox for one episode, forked from what `get` gives; the same one when it is asked for again."""

        async def fork(prepared: PreparedTerminal) -> PlaceRecord:
            facts = await patiently(
                lambda: self._sandboxes.fork(
                    prepared.snapshot_id,
                    request_id=f"{terminal_id}/{prepared.snapshot_id}",
                    port=0,
                    upstream="",
                    lease_s=order.limits.sandbox_s,
                    labels=labels,
                ),
                full_s=order.limits.prepare_s,
            )
            return PlaceRecord(facts.sandbox_id, facts.workdir, fresh_state().directory, facts.home)

        prepared = await self.get(order, key)
        try:
            place = await fork(prepared)
        except NotFound:
            # The sandbox service has dropped the snapshot since we learnt of it.
            prepared = await self.get(order, key, again=True)
            place = await fork(prepared)
        await self._sandboxes.write_files(
            place.sandbox_id, [FileToWrite(ShellState(place.shell_directory).path, b"", 0o600)]
        )
        return prepared, place

    async def _make(self, order: TerminalOrder) -> PreparedTerminal:
        commands = setup_of(order.task, order.limits)
        wanted = SnapshotOrder(terms=order.sandbox, toolbox_ids=(), files=order.task.files, setup=commands)
        reports: list[CommandReport] = []
        try:
            async for step in self._sandboxes.prepare_snapshot(wanted):
                if isinstance(step, PreparedSnapshot):
                    told = (rewards.finished(Phase.SETTING_UP, r.index, commands[r.index], r.result) for r in reports)
                    return PreparedTerminal(step.snapshot_id, tuple(told))
                reports.append(step)
        except FailedPrecondition as error:
            if error.reason == "SETUP_FAILED" and reports:
                raise _setup_failed(reports[-1], len(commands)) from error
            raise
        raise Internal("the sandbox service ended the preparation without a snapshot", reason="SNAPSHOT_MISSING")


def _setup_failed(report: CommandReport, count: int) -> FailedPrecondition:
    ended, result = describe(report.result.exit), report.result
    output = (result.stderr or result.stdout)[-_TOLD_BYTES:].decode("utf-8", "replace")
    return FailedPrecondition(
        f"setup command {report.index + 1} of {count} failed: {ended}",
        reason="SETUP_FAILED",
        metadata={"index": str(report.index), "exit": ended, "output": output},
    )
