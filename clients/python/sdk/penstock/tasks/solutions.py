"""Checks a task's verifier before any agent is judged by it: the solution must pass, doing nothing must not.

Both are ordinary rollouts of an agent that runs the task's solution as a shell script, or an empty one. The solution
must get the verifier's maximum reward, and nothing must get less.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, first_of
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import abandon, created
from penstock.client.tasks.spec import AgentChoice, Mode
from penstock.client.tasks.task import Task
from penstock.client.types.results import CommandFinished, Ended, Outcome
from penstock.driver.v1 import agent_pb2
from penstock.tasks.scripts import MAX_SCRIPT_BYTES, of_solution
from penstock.trajectory.v1 import trajectory_pb2

_INTERRUPTED: Final = "the proof was interrupted"
AGENT: Final = "penstock-solution"
REPORT: Final = "PENSTOCK "
"""How a line of the script's output begins that is recorded as an event of the agent, with the field `line`."""
PLACE: Final = ".penstock-solution"
"""The agent's directory in the sandbox's home."""
_PATH: Final = f"{PLACE}/solution.sh"
_TAIL: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The rewards of a task's solution and of doing nothing; None = not graded. `problems` describe failures."""

    task_id: str
    solution: float | None
    nothing: float | None
    holds: bool
    problems: tuple[str, ...]


async def prove(
    ps: Penstock,
    tasks: Sequence[Task],
    *,
    concurrency: int = 4,
    options: RolloutOptions | None = None,
    ended: Callable[[Proof], None] = lambda _: None,
) -> list[Proof]:
    """Returns the proofs of tasks, in their order.

    A task without a verifier or a solution, or one that the services refuse, is not proved: its proof has the problem.

    Args:
        ps: the services.
        tasks: those with an image of their own as `with_image` returns them.
        concurrency: rollouts at once.
        options: of the rollouts.
        ended: called with each proof as soon as it is known.

    Raises:
        The errors of `ps.rollouts.create`, but for InvalidArgument and FailedPrecondition.
    """
    solver = await solving_agent(ps)
    places = asyncio.Semaphore(concurrency)
    given = without_calls(options)
    given["run_id"] = f"prove-{secrets.token_hex(6)}"
    proofs: list[asyncio.Task[Proof]] = []

    async def one(task: Task) -> Proof:
        proof = await _prove(ps, task, solver, given, places)
        ended(proof)
        return proof

    try:
        async with asyncio.TaskGroup() as group:
            proofs.extend(group.create_task(one(task)) for task in tasks)
    except BaseExceptionGroup as failed:
        raise first_of(failed) from None
    return [proof.result() for proof in proofs]


def without_calls(options: RolloutOptions | None) -> RolloutOptions:
    """Returns options for rollouts whose agents call no model: the services need no engine, only a tokenizer.

    A source that the options name is checked, as for rollouts that it answers.
    """
    given = options or {}
    return {"mode": Mode.TRANSPARENT_PROXY if "source" in given else Mode.INTERCEPTION_GATE, "models": (), **given}


async def solving_agent(ps: Penstock) -> AgentChoice:
    """Returns an agent that runs its instruction as a shell script and never calls a model, for the caller's rollouts.

    It is unlisted: deleted from the registry before this returns, and addressed by the hash of its spec only. So
    nothing is left behind, however the program ends, and concurrent proofs do not interfere.
    """
    agent = await ps.agents.register(_spec())
    await ps.agents.delete(agent.name)
    return AgentChoice(name=agent.name, spec_sha256=agent.spec_sha256)


async def _prove(
    ps: Penstock, task: Task, solver: AgentChoice, options: RolloutOptions, places: asyncio.Semaphore
) -> Proof:
    if task.verifier is None or task.solution is None:
        lacks = "verifier" if task.verifier is None else "solution"
        return _unproved(task, f"it has no {lacks}")
    written = of_solution(task.solution)
    if len(written.encode()) > MAX_SCRIPT_BYTES:
        return _unproved(task, f"its solution has more than {MAX_SCRIPT_BYTES} bytes, which cannot be put in place")
    # The agent that runs a script can neither use MCP servers nor go on for a user.
    undone = replace(task, instruction=":\n", mcp_servers=(), user=None, solution=None)
    solved = replace(undone, instruction=written)
    try:
        right, transcript = await _run(ps, solved, solver, options, places)
        wrong, _ = await _run(ps, undone, solver, options, places)
    except (InvalidArgument, FailedPrecondition) as error:
        # The services refuse this task: the proofs of the others go on.
        return _unproved(task, str(error))
    solution, nothing = (None if item.reward is None else item.reward.value for item in (right, wrong))
    most = task.verifier.range[1] if task.verifier.range is not None else 1.0
    problems = []
    if solution is None or solution < most:
        problems.append(f"the solution gets the reward {solution}, not {most:g}: {_failure(right)}\n{transcript}")
    if nothing is None or nothing >= most:
        problems.append(f"doing nothing gets the reward {nothing}: {_failure(wrong)}")
    return Proof(task_id=task.task_id, solution=solution, nothing=nothing, holds=not problems, problems=tuple(problems))


def _unproved(task: Task, problem: str) -> Proof:
    return Proof(task_id=task.task_id, solution=None, nothing=None, holds=False, problems=(problem,))


async def _run(
    ps: Penstock, task: Task, solver: AgentChoice, options: RolloutOptions, places: asyncio.Semaphore
) -> tuple[Outcome, str]:
    """Runs a rollout; returns its outcome, and the last output of its verifier and agent."""
    async with places:
        handle = await created(ps.rollouts.create(task, solver, **options), _INTERRUPTED)
        outcome, transcript = Outcome(), ""
        try:
            async for event in handle.events():
                if isinstance(event.payload, CommandFinished):
                    output = (event.payload.stdout_tail + event.payload.stderr_tail).decode("utf-8", "replace")
                    transcript += f"$ {event.payload.command[:200]} [{event.payload.exit}]\n{output}\n"
                elif isinstance(event.payload, Ended):
                    outcome = event.payload.outcome
        except BaseException:
            await abandon(handle, _INTERRUPTED)
            raise
        return outcome, (outcome.agent_stderr.decode("utf-8", "replace") + transcript)[-_TAIL:]


def _failure(outcome: Outcome) -> str:
    return "" if outcome.failure is None else f"{outcome.failure.reason}: {outcome.failure.message}"


def _spec() -> agent_pb2.AgentSpec:
    return agent_pb2.AgentSpec(
        name=AGENT,
        description="Runs a task's own solution; registered by `penstock tasks prove`.",
        version="1",
        argv=["sh", "{{instruction_path}}"],
        instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_FILE, path=_PATH),
        # Like every agent it has a model, but never calls it.
        files=[
            agent_pb2.ConfigFile(path=f"{PLACE}/endpoint", text="{{base_url}}\n"),
            agent_pb2.ConfigFile(path=f"{PLACE}/key", text="{{api_key}}"),
        ],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        events=agent_pb2.EventMapping(
            source=agent_pb2.EventMapping.SOURCE_STDOUT_LINES,
            rules=[
                agent_pb2.EventRule(
                    when=f"starts_with(line, '{REPORT}')",
                    kind=agent_pb2.AGENT_EVENT_KIND_OTHER,
                    fields={"line": "line"},
                ),
                agent_pb2.EventRule(when="line != `null`"),
            ],
        ),
    )
