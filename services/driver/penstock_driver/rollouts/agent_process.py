"""Plans and runs an agent's process in its sandbox, records its output as events, and fetches its artifacts.

Invariant: when `watch_agent` returns, the agent and all processes that it started are dead (R60).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from penstock_chassis.errors import FailedPrecondition, NotFound, PenstockError, PermissionDenied
from penstock_driver.agents.launch import Launch, LaunchContext, artifact_paths, plan_launch
from penstock_driver.agents.output_events import AgentEvent, EventParser
from penstock_driver.agents.specs import AgentSpec, EventSource, PromptDelivery
from penstock_driver.domain.failures import OF_THE_SANDBOX, failure_of
from penstock_driver.domain.ports import Command, Exit, ExitReason, GateOpening, Sandboxes, SandboxFacts
from penstock_driver.domain.rollout import (
    AgentExit,
    ArtifactCollected,
    Cause,
    Component,
    Failure,
    Phase,
    RolloutEvent,
    RolloutFailed,
    RolloutSpec,
    failed,
)
from penstock_driver.grading.carried import Fetched
from penstock_driver.grading.judge import NAMELESS_MODEL
from penstock_driver.rollouts.conversation.conversation import Conversation
from penstock_driver.rollouts.event_limits import Allowance, OutputEvents
from penstock_driver.rollouts.process_watch import watched

STDERR_TAIL_BYTES: Final = 4096
BROUGHT_BYTES: Final = 256 << 10
"""The most bytes of files that come with the request to start an agent."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """How an agent's process ended, by which event it reported that it was done, and the end of its last message."""

    exit: AgentExit
    done: AgentEvent | None
    said: str


def brings_files(sandbox: SandboxFacts, launch: Launch) -> bool:
    """Whether `start_agent` writes the agent's files too, in one call less: small ones, where they are taken."""
    return sandbox.takes_files and sum(len(file.content) for file in launch.files) <= BROUGHT_BYTES


def plan_agent(
    spec: RolloutSpec,
    rollout_id: str,
    port: int,
    sandbox: SandboxFacts,
    toolbox: str,
    opening: GateOpening,
    phase: Phase,
    conversation: Conversation,
) -> Launch:
    """Plan the launch of a rollout's agent in its sandbox, with the instruction at which its conversation is.

    `port`: of the sandbox's loopback, where the gate is. `toolbox`: where its programs are mounted.

    Raises RolloutFailed: DIALECT_MISSING, and the reasons of `plan_launch`.
    """
    agent = spec.agent.spec
    dialect = next((item for item in agent.dialects if item in opening.base_paths), None)
    if dialect is None:
        spoken = ", ".join(agent.dialects)
        message = f"agent {agent.name} speaks {spoken}, which the gate does not support"
        raise failed(Cause.INFRASTRUCTURE, "DIALECT_MISSING", message, phase, component=Component.OPERATOR)
    place = LaunchContext(
        home=sandbox.home,
        workdir=sandbox.workdir,
        toolbox=toolbox,
        base_url=f"http://127.0.0.1:{port}{opening.base_paths[dialect]}",
        api_key=opening.token,
        model=opening.model_name or NAMELESS_MODEL,
        rollout_id=rollout_id,
        wall_time_s=spec.limits.agent_s,
        tools_url=f"http://127.0.0.1:{port}{opening.mcp_path}" if opening.host_tools else "",
    )
    try:
        return plan_launch(agent, spec.choice, place, conversation.instruction, conversation.start)
    except PenstockError as error:
        raise RolloutFailed(failure_of(error, phase, Component.OPERATOR)) from error


async def start_agent(
    sandboxes: Sandboxes, sandbox: SandboxFacts, spec: RolloutSpec, launch: Launch, conversation: Conversation
) -> None:
    """Start an agent and give it its instruction, and its files if it brings them."""
    command = Command(
        argv=launch.argv,
        env={**spec.task.env, **launch.env},
        secret_env=launch.secret_env,
        timeout_s=conversation.left_s,
    )
    files = launch.files if brings_files(sandbox, launch) else ()
    process_id = conversation.process_id
    await sandboxes.start(sandbox.sandbox_id, process_id, command, launch.stdin, kill_all_after=True, files=files)


async def rejoin_agent(sandboxes: Sandboxes, sandbox_id: str, spec: RolloutSpec, conversation: Conversation) -> None:
    """Give an agent that an earlier process started what it has not got of its instruction.

    One that a pause has frozen has all of it: it was started before. NotFound (PROCESS_UNKNOWN) if it was not started.
    """
    stdin = conversation.instruction.encode() if spec.agent.spec.instruction.method is PromptDelivery.STDIN else None
    if stdin is not None:
        try:
            await sandboxes.send_stdin(sandbox_id, conversation.process_id, stdin)
        except FailedPrecondition as error:
            if error.reason != "SANDBOX_PAUSED":
                raise


async def watch_agent(
    sandboxes: Sandboxes,
    sandbox_id: str,
    spec: RolloutSpec,
    record: Callable[[RolloutEvent], None],
    allowance: Allowance,
    ended: Callable[[Exit], None],
    *,
    process_id: str,
    limit_s: float,
    held_s: Callable[[], float],
    recorded: Sequence[int] = (),
) -> AgentRun:
    """Watch a started agent to its end; `ended` is called with its exit before its other processes are killed.

    Output is recorded through `record` while the `allowance` lasts; `recorded` as in `OutputEvents`. The agent may run
    for `limit_s` seconds more, without those in which it is held: `held_s`, as in `watched`.

    RolloutFailed (SANDBOX_UNRESPONSIVE) when the process does not end and the sandbox does not respond; NotFound
    (PROCESS_UNKNOWN) if it was not started.
    """
    mapping = spec.agent.spec.events
    output = OutputEvents(
        allowance, record, lambda: EventParser(mapping.rules, text=mapping.source is EventSource.STDOUT_LINES), recorded
    )
    stderr, end = bytearray(), Exit(ExitReason.KILLED)
    watching = watched(sandboxes, sandbox_id, process_id, limit_s, what="the agent", held_s=held_s)
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
    if end.reason is not ExitReason.SANDBOX_LOST and not end.all_killed:
        await sandboxes.kill(sandbox_id, process_id, everything=True)
    return AgentRun(AgentExit(end, bytes(stderr)), output.done, output.said)


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
