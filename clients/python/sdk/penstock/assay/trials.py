"""One trial of a task: a rollout of the agent that runs a shell script, graded as every rollout is."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from penstock.assay.model import Kind, Trial
from penstock.client.connection import Penstock
from penstock.client.errors import PenstockError
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import abandon, created_with_room
from penstock.client.tasks.spec import AgentChoice
from penstock.client.tasks.task import Task
from penstock.client.types.results import (
    AgentEvent,
    ArtifactCollected,
    CommandFinished,
    Ended,
    FailureCause,
    Outcome,
    Phase,
    Progress,
)

_INTERRUPTED: Final = "the assay was interrupted"
_NOTHING_ABOUT_THE_TASK: Final = frozenset({FailureCause.INFRASTRUCTURE, FailureCause.CANCELLED, FailureCause.MODEL})
_TAIL: Final = 2000
_DIFF: Final = "changes.diff"


class Trials:
    """Runs trials, at most `concurrency` at once; their rollouts are deleted when they have been read."""

    def __init__(self, ps: Penstock, agent: AgentChoice, options: RolloutOptions, concurrency: int) -> None:
        self._ps = ps
        self._agent = agent
        self._options = options
        self._places = asyncio.Semaphore(concurrency)

    async def run(self, task: Task, kind: Kind, name: str, script: str, *, keep_diff: bool = False) -> Trial:
        """Runs a script as the task's agent, and has it graded.

        Raises:
            PenstockError: the rollout cannot be created.
        """
        # The agent that runs a script can neither use MCP servers nor go on for a user.
        undone = replace(task, solution=None, mcp_servers=(), user=None)
        given = replace(undone, instruction=script, keep_diff=keep_diff, keep_files=False)
        async with self._places:
            begin = time.monotonic()
            handle = await created_with_room(
                lambda: self._ps.rollouts.create(given, self._agent, **self._options), _INTERRUPTED
            )
            outcome, output, progress = Outcome(), "", ""
            reports: list[str] = []
            diff: str | None = None
            try:
                async for event in handle.events():
                    match event.payload:
                        case CommandFinished() as done:
                            text = (done.stdout_tail + done.stderr_tail).decode("utf-8", "replace")
                            output += f"$ {done.command[:200]} [{done.exit}]\n{text}\n"
                        case AgentEvent(data=data) if data.get("line"):
                            reports.append(str(data["line"]))
                        case ArtifactCollected(name=artifact, content=content) if artifact == _DIFF:
                            diff = content.decode("utf-8", "replace")
                        case Progress(message=message):
                            progress = f"{progress}{message}\n"[-_TAIL:]
                        case Ended(outcome=last):
                            outcome = last
                times = (await handle.refresh()).phase_times
            except BaseException:
                await abandon(handle, _INTERRUPTED)
                raise
            with suppress(PenstockError):  # one that cannot be deleted now is deleted by the driver's own retention
                await handle.delete()
        failure = outcome.failure
        return Trial(
            kind=kind,
            name=name,
            reward=None if outcome.reward is None else outcome.reward.value,
            failure="" if failure is None else f"{failure.reason}: {failure.message}",
            phase="" if failure is None or failure.phase is None else str(failure.phase),
            infrastructure=failure is not None and failure.cause in _NOTHING_ABOUT_THE_TASK,
            output=(outcome.agent_stderr.decode("utf-8", "replace") + output)[-_TAIL:],
            reports=tuple(reports),
            diff=diff,
            progress=progress,
            seconds=time.monotonic() - begin,
            setup_seconds=times.get(Phase.PREPARING, 0.0) + times.get(Phase.SETTING_UP, 0.0),
        )
