"""Environments that rollouts share: each toolbox is installed and each snapshot created once.

Concurrent requests for the same content share one piece of work (`SingleFlight`). A snapshot's key is its whole spec,
so the rollouts of a group share one by construction.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakValueDictionary

from penstock_chassis.aio.broadcast import Broadcast
from penstock_chassis.aio.single_flight import KEPT, SingleFlight
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_driver.agents.launch import check_command
from penstock_driver.agents.specs import Toolbox
from penstock_driver.domain.ports import (
    LIMITED,
    NO_PACKAGES,
    Command,
    CommandReport,
    PreparedSnapshot,
    PreparedToolbox,
    Sandboxes,
    SandboxFacts,
    SandboxTerms,
    SnapshotSpec,
)
from penstock_driver.domain.rollout import TAIL_BYTES, Cause, Component, Limits, Phase, RolloutSpec, Task, failed
from penstock_driver.environments.packages import TaskPackages
from penstock_driver.environments.throttle import never, while_full

CHECK_TIMEOUT_S: Final = 120.0
"""For an agent's check command: the first start of a native program reads hundreds of megabytes."""

_EMPTY: Final = "empty"
"""Name of the toolbox of every agent that installs nothing: with one of its own, each had a snapshot of its own."""


@dataclass(frozen=True, slots=True)
class PreparedEnvironment:
    """The state that a rollout is forked from; `reports` are the results of the task's setup commands."""

    toolbox: PreparedToolbox
    snapshot: PreparedSnapshot
    reports: tuple[CommandReport, ...]
    plain: set[str] = field(default_factory=set, compare=False)
    """Directories that are known to lie behind no link there: a fresh fork need not be asked again (`Grader`)."""


def for_verifier(spec: RolloutSpec) -> RolloutSpec:
    """Return the spec of the state that its verifier runs in: `spec` itself, unless the verifier has another sandbox.

    Nothing of the agent is in that. With an image of its own it has nothing of the task either; else the task's setup
    runs once more, with other resources.
    """
    verifier = spec.task.verifier
    if verifier is None or not verifier.has_own_sandbox:
        return spec
    own = verifier.sandbox
    bare = spec.agent.spec.model_copy(update={"toolbox": Toolbox(), "check_argv": []})
    given = {name: value for name in LIMITED if (value := getattr(own, name)) is not None}
    found = replace(
        spec,
        agent=replace(spec.agent, spec=bare, sha256=""),
        sandbox=replace(spec.sandbox, **given),
    )
    state = spec.environment_key
    if own.image:
        found = replace(
            found,
            task=replace(found.task, files=(), setup=(), env={}),
            sandbox=replace(found.sandbox, image=own.image, user=own.user, setup_network=None),
            packages=NO_PACKAGES,
        )
        state = spec.namespace
    key = repr((state, [getattr(found.sandbox, name) for name in ("image", "user", "own_kernel", *LIMITED)]))
    return replace(found, environment_key=hashlib.sha256(key.encode()).hexdigest())


class SetupFailed(Exception):
    """A setup command failed, at `reports[-1]`; with no reports, the agent's own check command failed."""

    def __init__(self, message: str, reports: tuple[CommandReport, ...], check: CommandReport | None) -> None:
        super().__init__(message)
        self.reports = reports
        self.check = check


class Environments:
    """Toolboxes, facts about bases, and snapshots, each made once."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._toolboxes: SingleFlight[tuple[str, str, str, str], PreparedToolbox] = SingleFlight()
        self._installations: WeakValueDictionary[tuple[str, str, str, str], Broadcast[str]] = WeakValueDictionary()
        """What an installation prints, while somebody follows it."""
        self._bases: SingleFlight[SandboxTerms, SandboxFacts] = SingleFlight()
        self._snapshots: SingleFlight[tuple[str, str, str], PreparedEnvironment] = SingleFlight()
        self._contents: dict[tuple[str, str, str], str] = {}
        self._packages = TaskPackages(sandboxes)

    def content(self, spec: RolloutSpec) -> str:
        """The content key of the snapshot that `spec` starts from; empty if it was not prepared here."""
        return self._contents.get(_snapshot_key(spec), "")

    async def get(
        self,
        spec: RolloutSpec,
        on_line: Callable[[str], None],
        *,
        again: bool = False,
        has_room_elsewhere: Callable[[], bool] = never,
    ) -> PreparedEnvironment:
        """Return the state that `spec` starts from: one for equal `environment_key`, agent and backend. The namespace
        is a part of the key.

        `on_line` receives all lines of an installation in progress, also one that another rollout started. `again`
        discards the earlier result, for when the sandbox service no longer knows it. A full service is waited for
        during `limits.prepare`, unless another one has room. SetupFailed when a setup command or the agent's check
        failed; TimeoutError after the limits of the spec that started the work, counted anew after each wait;
        ResourceExhausted if the service stays full.
        """
        agent = spec.agent.spec
        toolbox_name = agent.name if agent.toolbox != Toolbox() else _EMPTY
        toolbox_key = (spec.namespace, agent.name, spec.agent.sha256, spec.sandbox.backend)
        snapshot_key = _snapshot_key(spec)
        if again:
            self._toolboxes.forget(toolbox_key)
            self._snapshots.forget(snapshot_key)

        lines = self._installations.setdefault(toolbox_key, Broadcast(keep=None))
        seen = 0

        def forward(line: str) -> None:
            lines.publish(line)

        def show() -> None:
            nonlocal seen
            for line in lines.after(seen, lines.last) or ():
                on_line(line)
            seen = lines.last

        async def attempt(again: bool) -> PreparedEnvironment:
            async with asyncio.timeout(spec.limits.prepare_s):
                toolbox = await self._toolboxes.get(
                    toolbox_key,
                    lambda: self._sandboxes.prepare_toolbox(toolbox_name, agent.toolbox, spec.sandbox.backend, forward),
                )
                facts = await self._bases.get(spec.sandbox, lambda: self._facts(spec.sandbox))
                packages = await self._packages.get(spec.packages, spec.sandbox, spec.namespace, forward, again=again)
            async with asyncio.timeout(spec.limits.prepare_s + spec.limits.setup_s):
                return await self._snapshot(spec, toolbox, packages, facts)

        async def attempts() -> PreparedEnvironment:
            try:
                return await attempt(again)
            except NotFound as error:
                if error.reason != "TOOLBOX_UNKNOWN":
                    raise
                # The sandbox service evicted a toolbox since it was prepared.
                self._toolboxes.forget(toolbox_key)
                return await attempt(True)

        async def make() -> PreparedEnvironment:
            made = await while_full(attempts, full_s=spec.limits.prepare_s, has_room_elsewhere=has_room_elsewhere)
            self._contents.pop(snapshot_key, None)
            self._contents[snapshot_key] = made.snapshot.key
            if len(self._contents) > KEPT:
                del self._contents[next(iter(self._contents))]
            return made

        show()
        lines.published.call_on_change(show)
        try:
            return await self._snapshots.get(snapshot_key, make)
        finally:
            lines.published.forget(show)

    async def _facts(self, terms: SandboxTerms) -> SandboxFacts:
        """Home and working directory of a base, asked of a short-lived sandbox and never guessed (R45).

        The check command must name them before the snapshot is made, from which all other sandboxes are forked.
        """
        facts = await self._sandboxes.create(replace(terms, companions=()), 60.0, {})
        await self._sandboxes.delete(facts.sandbox_id)
        return facts

    async def _snapshot(
        self, spec: RolloutSpec, toolbox: PreparedToolbox, packages: tuple[str, ...], facts: SandboxFacts
    ) -> PreparedEnvironment:
        task = spec.task
        check = check_command(spec.agent.spec, home=facts.home, workdir=facts.workdir, toolbox=toolbox.mount_path)
        checks = [Command(argv=check, timeout_s=CHECK_TIMEOUT_S)] if check else []
        wanted = SnapshotSpec(
            terms=spec.sandbox,
            # First the task's: grades do not depend on which programs an agent brings.
            toolbox_ids=(*packages, toolbox.toolbox_id),
            files=task.files,
            setup=(*checks, *setup_of(task, spec.limits)),
        )
        reports: list[CommandReport] = []
        try:
            async for step in self._sandboxes.prepare_snapshot(wanted):
                if isinstance(step, PreparedSnapshot):
                    return PreparedEnvironment(toolbox, step, _of_task(reports, len(checks)))
                reports.append(step)
        except FailedPrecondition as error:
            if error.reason != "SETUP_FAILED":
                raise
            is_check = bool(checks) and len(reports) <= 1
            raise SetupFailed(
                error.message, _of_task(reports, len(checks)), reports[0] if is_check and reports else None
            ) from error
        raise failed(
            Cause.INFRASTRUCTURE,
            "SNAPSHOT_MISSING",
            "the sandbox service ended the preparation without a snapshot",
            Phase.PREPARING,
            retriable=True,
            component=Component.SANDBOX,
        )


def _snapshot_key(spec: RolloutSpec) -> tuple[str, str, str]:
    return spec.agent.sha256, spec.sandbox.backend, spec.environment_key


def setup_of(task: Task, limits: Limits) -> tuple[Command, ...]:
    """A task's setup commands with its environment, each bounded by the setup limit."""
    return tuple(
        replace(
            command,
            env={**task.env, **command.env},
            timeout_s=limits.setup_s if command.timeout_s is None else min(limits.setup_s, command.timeout_s),
        )
        for command in task.setup
    )


def _of_task(reports: list[CommandReport], checks: int) -> tuple[CommandReport, ...]:
    """The reports of the task's own commands, cut to the tails that events carry, because they are cached."""
    return tuple(
        CommandReport(
            report.index - checks,
            replace(
                report.result, stdout=report.result.stdout[-TAIL_BYTES:], stderr=report.result.stderr[-TAIL_BYTES:]
            ),
        )
        for report in reports
        if report.index >= checks
    )
