"""What a step of a terminal episode does in its sandbox: a command in the episode's shell, and the answer's grading.

Invariants: a command has its limit here too, should the sandbox service forget it; before the verifier starts,
everything that the commands started is dead (R60), and the system is as it was prepared (R90); it alone is told where
the answer is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition
from penstock_driver import rewards
from penstock_driver.endings import ended_by_its_agent, is_of_a_sandbox_at_work
from penstock_driver.grading import ROOT, check_system
from penstock_driver.launches import FileToWrite
from penstock_driver.patience import patiently
from penstock_driver.ports import Command, CommandResult, Exit, ExitReason, Sandboxes, SandboxFacts
from penstock_driver.rollouts import (
    Cause,
    CommandFinished,
    Failure,
    Party,
    Phase,
    Reward,
    RolloutFailed,
    Verifier,
    failed,
)
from penstock_driver.terminals.episodes import TerminalOrder
from penstock_driver.terminals.records import PlaceRecord
from penstock_driver.terminals.shell import Capture, ShellState, in_shell

ANSWER_VARIABLE: Final = "PENSTOCK_FINAL_ANSWER_FILE"
WATCH_MARGIN_S: Final = 30.0
"""How much longer than a command's own limit the driver waits for its exit before it calls the sandbox lost."""
_KILLS_AT_ONCE: Final = 16


class TerminalSteps:
    """Steps in the sandboxes of one driver."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def command(
        self, order: TerminalOrder, place: PlaceRecord, shell: ShellState, number: int, command: Command
    ) -> CommandResult:
        """Run a command, or find it running; `number` is its step's. RolloutFailed when the sandbox is lost."""
        timeout_s = order.command_s if command.timeout_s is None else command.timeout_s
        bounded = replace(command, timeout_s=timeout_s)
        runs, stdin = in_shell(bounded, shell, number, order.task.env)
        capture, sandbox_id, process_id = Capture(order.output_limit), place.sandbox_id, _process_id(number)
        ends = (capture.head, capture.tail)
        await patiently(lambda: self._sandboxes.start(sandbox_id, process_id, runs, stdin, output_ends=ends))
        end = Exit(ExitReason.SANDBOX_LOST)
        try:
            async with asyncio.timeout(timeout_s + WATCH_MARGIN_S):
                async for item in self._sandboxes.watch(sandbox_id, process_id):
                    if isinstance(item, Exit):
                        end = item
                    else:
                        capture.take(item)
        except TimeoutError:
            message = "a command's limit is over and the sandbox service has not ended it"
            raise failed(
                Cause.INFRASTRUCTURE, "SANDBOX_UNRESPONSIVE", message, Phase.RUNNING, retriable=True, part=Party.SANDBOX
            ) from None
        if end.reason is ExitReason.SANDBOX_LOST:
            message = end.message or "the sandbox was lost"
            raise RolloutFailed(
                Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", message, True, Phase.RUNNING, part=Party.SANDBOX)
            )
        return capture.result(end)

    async def judged(self, place: PlaceRecord, failure: Failure) -> Failure:
        """The failure, after a look at who ended the sandbox where that is why."""
        if is_of_a_sandbox_at_work(failure) and await self._sandboxes.ended_inside(place.sandbox_id):
            return ended_by_its_agent(failure)
        return failure

    async def answer(
        self, order: TerminalOrder, place: PlaceRecord, text: str, steps: int, report: Callable[[CommandFinished], None]
    ) -> Reward | None:
        """Grade an answer after killing what `steps` steps left running; None where nothing grades."""
        await self._kill_all(place, steps)
        verifier = order.task.verifier
        if verifier is None:
            return None
        await self._check_system(order, place)
        limit = order.limits.verify_s
        try:
            async with asyncio.timeout(limit):
                return await rewards.verify(
                    self._sandboxes, place.sandbox_id, place.workdir, with_answer(verifier, text), report
                )
        except TimeoutError:
            message = f"the verifier took longer than {limit:g} s"
            raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, Phase.VERIFYING) from None

    async def _check_system(self, order: TerminalOrder, place: PlaceRecord) -> None:
        """As of a rollout that is graded in place, where the backend tells what changed."""
        if order.sandbox.user in ROOT or not place.home:
            return
        try:
            await check_system(self._sandboxes, SandboxFacts(place.sandbox_id, place.home, place.workdir), None)
        except FailedPrecondition as error:
            if error.reason != "CAPABILITY_MISSING":
                raise

    async def _kill_all(self, place: PlaceRecord, steps: int) -> None:
        slots = asyncio.Semaphore(_KILLS_AT_ONCE)

        async def kill(number: int) -> None:
            async with slots:
                last = number == steps  # nothing at all runs beside what grades
                await patiently(lambda: self._sandboxes.kill(place.sandbox_id, _process_id(number), everything=last))

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, steps + 1):
                    tasks.create_task(kill(number))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


def with_answer(verifier: Verifier, text: str) -> Verifier:
    """The verifier, with the final answer in a file of its own that its commands are told of."""
    path = f"/tmp/penstock-{secrets.token_hex(16)}/answer"  # noqa: S108 - inside the sandbox, and unguessable
    return replace(
        verifier,
        files=(*verifier.files, FileToWrite(path, text.encode(), 0o600)),
        commands=tuple(replace(command, env={**command.env, ANSWER_VARIABLE: path}) for command in verifier.commands),
    )


def _process_id(number: int) -> str:
    return f"step-{number}"
