"""Runs an agent's process in its sandbox, records its output as events, and fetches its artifacts.

Invariant: when `run_agent` returns, the agent and all processes that it started are dead (R60).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock_chassis.errors import FailedPrecondition, NotFound, PermissionDenied
from penstock_driver.agents.launch import Launch, LaunchContext, artifact_paths
from penstock_driver.agents.output_events import AgentEvent, EventParser
from penstock_driver.agents.specs import AgentSpec, EventSource
from penstock_driver.domain.failures import OF_THE_SANDBOX
from penstock_driver.domain.ports import Command, Exit, ExitReason, Sandboxes, SandboxFacts
from penstock_driver.domain.rollout import (
    AgentExit,
    ArtifactCollected,
    Cause,
    Failure,
    Phase,
    RolloutEvent,
    RolloutSpec,
)
from penstock_driver.rollouts.event_limits import Allowance, OutputEvents
from penstock_driver.rollouts.process_watch import watched

AGENT_PROCESS: Final = "agent"
STDERR_TAIL_BYTES: Final = 4096

Fetched: TypeAlias = ArtifactCollected | Failure


@dataclass(frozen=True, slots=True)
class AgentRun:
    """How an agent's process ended, and the event by which it reported that it was done."""

    exit: AgentExit
    done: AgentEvent | None


async def run_agent(
    sandboxes: Sandboxes,
    sandbox_id: str,
    spec: RolloutSpec,
    launch: Launch,
    record: Callable[[RolloutEvent], None],
    allowance: Allowance,
    ended: Callable[[Exit], None],
) -> AgentRun:
    """Start an agent and watch it to its end; `ended` is called with its exit before its other processes are killed.

    Output is recorded through `record` while the `allowance` lasts.

    RolloutFailed (SANDBOX_UNRESPONSIVE) when the process does not end and the sandbox does not respond.
    """
    command = Command(
        argv=launch.argv,
        env={**spec.task.env, **launch.env},
        secret_env=launch.secret_env,
        timeout_s=spec.limits.agent_s,
    )
    await sandboxes.start(sandbox_id, AGENT_PROCESS, command, launch.stdin)
    mapping = spec.agent.spec.events
    output = OutputEvents(
        allowance, record, lambda: EventParser(mapping.rules, text=mapping.source is EventSource.STDOUT_LINES)
    )
    stderr, end = bytearray(), Exit(ExitReason.KILLED)
    watching = watched(sandboxes, sandbox_id, AGENT_PROCESS, spec.limits.agent_s, what="the agent")
    async with aclosing(watching) as items:
        async for item in items:
            if isinstance(item, Exit):
                end = item
                ended(end)
            elif item.is_stderr:
                stderr += item.data
                del stderr[:-STDERR_TAIL_BYTES]
            else:
                await output.take(item.data)
    output.finish()
    if end.reason is not ExitReason.SANDBOX_LOST:
        await sandboxes.kill(sandbox_id, AGENT_PROCESS, everything=True)
    return AgentRun(AgentExit(end, bytes(stderr)), output.done)


async def fetch_artifacts(
    sandboxes: Sandboxes, sandbox: SandboxFacts, agent: AgentSpec, toolbox: str, rollout_id: str, phase: Phase
) -> list[Fetched]:
    """Return the artifacts that exist, and a failure for each required one that is missing.

    `toolbox` is the mount path of the agent's toolbox.
    """
    place = LaunchContext(sandbox.home, sandbox.workdir, toolbox, "", "", "", rollout_id, 0)
    fetched: list[Fetched] = []
    for artifact, path in zip(agent.artifacts, artifact_paths(agent, place), strict=True):
        try:
            content, size = await sandboxes.read_file(sandbox.sandbox_id, path, artifact.max_bytes)
        except (NotFound, FailedPrecondition, PermissionDenied) as error:
            if error.reason in OF_THE_SANDBOX:
                raise
            if artifact.required:
                message = f"the agent left no {artifact.name}: {error.message}"
                fetched.append(Failure(Cause.AGENT, "ARTIFACT_MISSING", message, False, phase))
            continue
        fetched.append(ArtifactCollected(artifact.name, content, size))
    return fetched
