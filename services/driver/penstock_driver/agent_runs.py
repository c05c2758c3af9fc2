"""An agent's process in its sandbox: started, watched, its output told as events while it runs; and what it left.

Invariant: when `run_agent` returns, the agent and all that it started are dead (R60).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock_chassis.errors import FailedPrecondition, NotFound, PermissionDenied
from penstock_driver.allowance import Allowance, OutputEvents
from penstock_driver.endings import OF_THE_SANDBOX
from penstock_driver.events import AgentEvent, EventParser
from penstock_driver.launches import Launch, Place, artifact_paths
from penstock_driver.ports import Command, Exit, ExitReason, Sandboxes, SandboxFacts
from penstock_driver.rollouts import (
    AgentExit,
    ArtifactCollected,
    Cause,
    Failure,
    Happening,
    Party,
    Phase,
    RolloutOrder,
    failed,
)
from penstock_driver.specs import AgentSpec, EventSource

AGENT_PROCESS: Final = "agent"
STDERR_TAIL_BYTES: Final = 4096
WATCH_MARGIN_S: Final = 30.0
"""How much longer than the agent's own limit the driver waits for its exit before it calls the sandbox lost."""

Fetched: TypeAlias = ArtifactCollected | Failure


@dataclass(frozen=True, slots=True)
class AgentRun:
    """How an agent's process ended, and the event by which it said that it was done."""

    exit: AgentExit
    done: AgentEvent | None


async def run_agent(
    sandboxes: Sandboxes,
    sandbox_id: str,
    order: RolloutOrder,
    launch: Launch,
    record: Callable[[Happening], None],
    allowance: Allowance,
    ended: Callable[[Exit], None],
) -> AgentRun:
    """Start an agent and watch it to its end; `ended` hears of that before all is dead.

    Its output is recorded while there is an `allowance`, on which `record` draws.

    RolloutFailed (SANDBOX_UNRESPONSIVE) when nobody ends it.
    """
    command = Command(
        argv=launch.argv,
        env={**order.task.env, **launch.env},
        secret_env=launch.secret_env,
        timeout_s=order.limits.agent_s,
    )
    await sandboxes.start(sandbox_id, AGENT_PROCESS, command, launch.stdin)
    said = order.agent.spec.events
    output = OutputEvents(
        allowance, record, lambda: EventParser(said.rules, text=said.source is EventSource.STDOUT_LINES)
    )
    stderr, end = bytearray(), Exit(ExitReason.KILLED)
    try:
        async with asyncio.timeout(order.limits.agent_s + WATCH_MARGIN_S):
            async for item in sandboxes.watch(sandbox_id, AGENT_PROCESS):
                if isinstance(item, Exit):
                    end = item
                    ended(end)
                elif item.is_stderr:
                    stderr += item.data
                    del stderr[:-STDERR_TAIL_BYTES]
                else:
                    await output.take(item.data)
    except TimeoutError:
        message = "the agent's limit is over and the sandbox service has not ended it"
        raise failed(
            Cause.INFRASTRUCTURE, "SANDBOX_UNRESPONSIVE", message, Phase.RUNNING, retriable=True, part=Party.SANDBOX
        ) from None
    output.finish()
    if end.reason is not ExitReason.SANDBOX_LOST:
        await sandboxes.kill(sandbox_id, AGENT_PROCESS, everything=True)
    return AgentRun(AgentExit(end, bytes(stderr)), output.done)


async def fetch_artifacts(
    sandboxes: Sandboxes, sandbox: SandboxFacts, spec: AgentSpec, toolbox: str, rollout_id: str, phase: Phase
) -> list[Fetched]:
    """The artifacts that are there, and a failure for each that must be and is not.

    `toolbox` is where the agent's is mounted.
    """
    place = Place(sandbox.home, sandbox.workdir, toolbox, "", "", "", rollout_id, 0)
    fetched: list[Fetched] = []
    for artifact, path in zip(spec.artifacts, artifact_paths(spec, place), strict=True):
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
