"""Whether a task's verifier can be satisfied, and is not satisfied by nothing: before any agent is judged by it.

Both are rollouts like any other, of an agent that runs the task's solution as a shell script, or an empty one. The
solution gets the greatest reward that the verifier has; nothing gets less.
"""

import asyncio
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.abandoning import abandon, created
from penstock.client.connection import Penstock
from penstock.client.errors import first_of
from penstock.client.results import CommandFinished, Ended, Outcome
from penstock.client.rollouts import RolloutOptions
from penstock.client.tasks import AgentChoice, Command, Mode, Task
from penstock.driver.v1 import agent_pb2
from penstock.trajectory.v1 import trajectory_pb2

_INTERRUPTED: Final = "the proof was interrupted"
AGENT: Final = "penstock-solution"
_PATH: Final = ".penstock-solution/solution.sh"
_TAIL: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a task's solution and doing nothing were worth; None = not graded. `problems` say what went wrong."""

    task_id: str
    solution: float | None
    nothing: float | None
    holds: bool
    problems: tuple[str, ...]


async def prove(
    ps: Penstock, tasks: Sequence[Task], *, concurrency: int = 4, options: RolloutOptions | None = None
) -> list[Proof]:
    """The proofs of tasks, in their order. A task without a verifier or a solution does not hold.

    Raises what `ps.rollouts.create` raises.
    """
    solver = await solving_agent(ps)
    places = asyncio.Semaphore(concurrency)
    given: RolloutOptions = {"mode": Mode.TRANSPARENT_PROXY, **(options or {})}
    given["run_id"] = f"prove-{secrets.token_hex(6)}"
    proofs: list[asyncio.Task[Proof]] = []
    try:
        async with asyncio.TaskGroup() as group:
            proofs.extend(group.create_task(_prove(ps, task, solver, given, places)) for task in tasks)
    except BaseExceptionGroup as failed:
        raise first_of(failed) from None
    return [proof.result() for proof in proofs]


async def solving_agent(ps: Penstock) -> AgentChoice:
    """An agent that runs its instruction as a shell script and never asks a model, for rollouts of one's own.

    It is nobody's to choose: it is off the list again before this returns, and known by the hash of its spec alone.
    So nothing stays, however the program ends, and one who proves takes nothing away from another.
    """
    agent = await ps.agents.register(_spec())
    await ps.agents.delete(agent.name)
    return AgentChoice(name=agent.name, spec_sha256=agent.spec_sha256)


async def _prove(
    ps: Penstock, task: Task, solver: AgentChoice, options: RolloutOptions, places: asyncio.Semaphore
) -> Proof:
    if task.verifier is None or task.solution is None:
        lacks = "verifier" if task.verifier is None else "solution"
        return Proof(task_id=task.task_id, solution=None, nothing=None, holds=False, problems=(f"it has no {lacks}",))
    solved = replace(
        task, instruction=script(task.solution.commands), files=[*task.files, *task.solution.files], solution=None
    )
    right, told = await _run(ps, solved, solver, options, places)
    wrong, _ = await _run(ps, replace(task, instruction=":\n", solution=None), solver, options, places)
    solution, nothing = (None if item.reward is None else item.reward.value for item in (right, wrong))
    most = task.verifier.range[1] if task.verifier.range is not None else 1.0
    problems = []
    if solution is None or solution < most:
        problems.append(f"the solution is worth {solution}, not {most:g}: {_failure(right)}\n{told}")
    if nothing is None or nothing >= most:
        problems.append(f"doing nothing is worth {nothing}: {_failure(wrong)}")
    return Proof(task_id=task.task_id, solution=solution, nothing=nothing, holds=not problems, problems=tuple(problems))


async def _run(
    ps: Penstock, task: Task, solver: AgentChoice, options: RolloutOptions, places: asyncio.Semaphore
) -> tuple[Outcome, str]:
    """How a rollout ended, and what its verifier and its agent said last."""
    async with places:
        handle = await created(ps.rollouts.create(task, solver, **options), _INTERRUPTED)
        outcome, told = Outcome(), ""
        try:
            async for event in handle.events():
                if isinstance(event.payload, CommandFinished):
                    output = (event.payload.stdout_tail + event.payload.stderr_tail).decode("utf-8", "replace")
                    told += f"$ {event.payload.command[:200]} [{event.payload.exit}]\n{output}\n"
                elif isinstance(event.payload, Ended):
                    outcome = event.payload.outcome
        except BaseException:
            await abandon(handle, _INTERRUPTED)
            raise
        return outcome, (outcome.agent_stderr.decode("utf-8", "replace") + told)[-_TAIL:]


def _failure(outcome: Outcome) -> str:
    return "" if outcome.failure is None else f"{outcome.failure.reason}: {outcome.failure.message}"


def script(commands: Sequence[Command]) -> str:
    """Commands as one shell script that ends with the first that fails."""
    lines = ["set -e\n"]
    for command in commands:
        words = list(command.argv) if command.shell is None else ["sh", "-c", command.shell]
        env = [f"{name}={value}" for name, value in {**command.env, **command.secret_env}.items()]
        line = shlex.join(["env", *env, *words] if env else words)
        lines.append(f"(cd {shlex.quote(command.cwd)} && {line})\n" if command.cwd else f"{line}\n")
    return "".join(lines)


def _spec() -> agent_pb2.AgentSpec:
    return agent_pb2.AgentSpec(
        name=AGENT,
        description="Runs a task's own solution; registered by `penstock tasks prove`.",
        version="1",
        argv=["sh", "{{instruction_path}}"],
        instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_FILE, path=_PATH),
        # It has a model like every agent, and never asks it.
        files=[
            agent_pb2.ConfigFile(path=".penstock-solution/endpoint", text="{{base_url}}\n"),
            agent_pb2.ConfigFile(path=".penstock-solution/key", text="{{api_key}}"),
        ],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
    )
