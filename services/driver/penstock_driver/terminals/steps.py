"""Runs a step of a terminal episode in its sandbox: a command in the episode's shell, or the grading of the answer.

Invariants: the driver also enforces a command's limit, in case the sandbox service fails to. Before the verifier
starts, all processes that the commands started are dead (R60) and the system is as prepared (R90). Only the verifier
learns the path of the answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.domain.failures import ended_by_its_agent, is_of_a_sandbox_at_work
from penstock_driver.domain.ports import Command, CommandResult, Exit, ExitReason, Sandboxes, SandboxFacts
from penstock_driver.domain.rollout import (
    Cause,
    CommandFinished,
    Component,
    Failure,
    Phase,
    Reward,
    RolloutFailed,
    Verifier,
    failed,
)
from penstock_driver.domain.terminal_episode import TerminalSpec
from penstock_driver.environments.throttle import patiently
from penstock_driver.grading.grader import ROOT, check_system
from penstock_driver.grading.verifier import invalid_reward, verify
from penstock_driver.rollouts.process_watch import watched
from penstock_driver.terminals.records import PlaceRecord
from penstock_driver.terminals.shell import Capture, ShellState, in_shell

ANSWER_VARIABLE: Final = "PENSTOCK_FINAL_ANSWER_FILE"
_KILLS_AT_ONCE: Final = 16


class TerminalSteps:
    """Steps in the sandboxes of one driver."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def command(
        self, spec: TerminalSpec, place: PlaceRecord, shell: ShellState, number: int, command: Command
    ) -> CommandResult:
        """Run a command, or join it if it runs; `number` is its step's. RolloutFailed when the sandbox is lost."""
        timeout_s = spec.command_s if command.timeout_s is None else command.timeout_s
        bounded = replace(command, timeout_s=timeout_s)
        runs, stdin = in_shell(bounded, shell, number, spec.task.env)
        capture, sandbox_id, process_id = Capture(spec.output_limit), place.sandbox_id, _process_id(number)
        ends = (capture.head, capture.tail)
        await patiently(lambda: self._sandboxes.start(sandbox_id, process_id, runs, stdin, output_ends=ends))
        end = Exit(ExitReason.SANDBOX_LOST)
        watching = watched(self._sandboxes, sandbox_id, process_id, timeout_s, what="a command")
        async with aclosing(watching) as items:
            async for item in items:
                if isinstance(item, Exit):
                    end = item
                else:
                    capture.take(item)
        if end.reason is ExitReason.SANDBOX_LOST:
            message = end.message or "the sandbox was lost"
            raise RolloutFailed(
                Failure(Cause.INFRASTRUCTURE, "SANDBOX_LOST", message, True, Phase.RUNNING, component=Component.SANDBOX)
            )
        return capture.result(end)

    async def judged(self, place: PlaceRecord, failure: Failure) -> Failure:
        """Return the failure, after checking who ended the sandbox if that is the cause."""
        if is_of_a_sandbox_at_work(failure) and await self._sandboxes.ended_inside(place.sandbox_id):
            return ended_by_its_agent(failure)
        return failure

    async def answer(
        self,
        spec: TerminalSpec,
        place: PlaceRecord,
        text: str,
        steps: int,
        report: Callable[[CommandFinished], None],
        begins: Callable[[], Awaitable[None]],
    ) -> Reward | None:
        """Kill everything that `steps` steps left running, then grade the answer; None without a verifier.

        `begins` is called before the verifier begins.
        """
        await self._kill_all(place, steps)
        verifier = spec.task.verifier
        if verifier is None:
            return None
        await self._check_system(spec, place)
        await begins()
        limit = spec.limits.verify_s
        try:
            async with asyncio.timeout(limit):
                reward = await verify(
                    self._sandboxes, place.sandbox_id, place.workdir, with_answer(verifier, text), report
                )
        except TimeoutError:
            message = f"the verifier took longer than {limit:g} s"
            raise failed(Cause.VERIFIER, "VERIFIER_TIMED_OUT", message, Phase.VERIFYING) from None
        if reward.turns:
            raise invalid_reward("turns: a terminal episode has steps and no calls of a model")
        return reward

    async def _check_system(self, spec: TerminalSpec, place: PlaceRecord) -> None:
        """Check the system as for a rollout graded in place, if the backend reports changes."""
        if spec.sandbox.user in ROOT or not place.home:
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
                last = number == steps  # no other process runs beside the verifier
                await patiently(lambda: self._sandboxes.kill(place.sandbox_id, _process_id(number), everything=last))

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, steps + 1):
                    tasks.create_task(kill(number))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


def with_answer(verifier: Verifier, text: str) -> Verifier:
    """The verifier, with the final answer in a file whose path its commands get."""
    path = f"/tmp/penstock-{secrets.token_hex(16)}/answer"  # noqa: S108 - inside the sandbox, and unguessable
    return replace(
        verifier,
        files=(*verifier.files, FileToWrite(path, text.encode(), 0o600)),
        commands=tuple(replace(command, env={**command.env, ANSWER_VARIABLE: path}) for command in verifier.commands),
    )


def _process_id(number: int) -> str:
    return f"step-{number}"
