"""Terminal episodes: the policy itself types the commands, and its final answer is graded.

async with await ps.terminals.open(task) as terminal:
    seen = await terminal.run("cat report.csv | wc -l")
    print(seen.text())
    end = await terminal.answer("17 lines")
    print(end.reward)
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from penstock.client.errors import Unavailable
from penstock.client.rollouts import client
from penstock.client.rollouts.driver_rpc import Drivers
from penstock.client.tasks import spec as tasks
from penstock.client.tasks.task import Task
from penstock.client.transport.patience import Patience
from penstock.client.transport.rpc import Service
from penstock.client.types import results
from penstock.client.types.sandboxes import RunResult
from penstock.client.types.trajectories import Reward
from penstock.client.wire import chat, specs
from penstock.driver.v1 import terminal_service_pb2 as pb
from penstock.driver.v1 import terminal_service_pb2_grpc as pb_grpc
from penstock.values import reader

OPEN_TIMEOUT_S: Final = 1500.0
"""Seconds that opening may take: a task's first episode prepares the state that the others share."""
_CLOSE_TIMEOUT_S: Final = 120.0
_CONNECT_S: Final = 25.0
"""Maximum seconds of an attempt to connect, plus a margin: a call that broke later had reached the driver."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """An episode as the driver reported it. Times are UTC.

    `reward` None = not graded, which is not zero. `failure` is set if an ended episode should have a reward but has
    none. `setup` are the task's setup commands where this episode's preparation ran them, `verifier` those of the
    verifier.
    """

    terminal_id: str
    task_id: str
    labels: Mapping[str, str]
    step_count: int
    ended: bool
    reward: Reward | None
    failure: results.Failure | None
    setup: tuple[results.CommandFinished, ...]
    verifier: tuple[results.CommandFinished, ...]
    sandbox_id: str
    create_time: datetime | None
    expire_time: datetime | None
    end_time: datetime | None
    namespace: str = "default"


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one step: a command's `result`, or the episode's end.

    With `ended`: `reward` of a graded answer (None = not graded, which is not zero), and `failure` where a reward was
    due but is missing, or where the episode ended during the command.
    """

    step_id: str
    result: RunResult | None
    ended: bool
    reward: Reward | None
    failure: results.Failure | None

    @property
    def ok(self) -> bool:
        """Whether the command exited with 0, or the answer was accepted and nothing failed."""
        return self.result.ok if self.result is not None else self.failure is None

    def text(self) -> str:
        """Returns the text for the policy: both outputs, where they were cut, and how the command ended if not with 0.

        It contains nothing of the verifier and no reward.
        """
        if self.result is None:
            return f"The episode has ended: {self.failure.message}" if self.failure else "The episode has ended."
        end = self.result.exit
        parts = [_whole(self.result.stdout, end.stdout_bytes), _whole(self.result.stderr, end.stderr_bytes)]
        shown = "\n".join(part.rstrip("\n") for part in parts if part)
        note = "" if end.ok else f"[{_how(end)}]"
        return "\n".join(part for part in (shown, note) if part) or "[no output]"


class TerminalHandle:
    """One episode: `run`, `answer`, `refresh`, `close`. `async with` closes it at the end."""

    def __init__(self, service: Service, info: Terminal) -> None:
        self._service = service
        self._stub = pb_grpc.TerminalServiceStub(service.channel)
        self.info: Terminal = info
        """The episode as last reported."""

    def __repr__(self) -> str:
        return f"TerminalHandle({self.terminal_id})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def terminal_id(self) -> str:
        """The episode's id."""
        return self.info.terminal_id

    async def run(
        self,
        command: str | tasks.Command | Sequence[str],
        *,
        timeout: float | None = None,
        step_id: str = "",
    ) -> Observation:
        """Runs one command in the episode's shell and returns its result.

        The working directory, variables and functions persist between commands. A broken connection is resumed and the
        command is not run twice; cancelling this leaves it running, and the next step waits for it.

        Args:
            command: text for the shell, an argument vector, or a `Command`.
            timeout: seconds; None = the command's own, or the episode's.
            step_id: idempotency key; a repeated one returns the first result. Empty = assigned.

        Raises:
            FailedPrecondition: `EPISODE_ENDED`.
            ResourceExhausted: `STEP_LIMIT`, only an answer is accepted now; `STEPS_PENDING`, too many bytes of this
                episode's steps wait.
            InvalidArgument: `FIELD_INVALID`.
        """
        if isinstance(command, str):
            given = tasks.Command(shell=command)
        else:
            given = command if isinstance(command, tasks.Command) else tasks.Command(command)
        request = pb.StepRequest(command=specs.command(given))
        if timeout is not None:
            request.command.timeout.FromNanoseconds(round(timeout * 1e9))
        return await self._step(request, step_id)

    async def answer(self, text: str = "", *, step_id: str = "") -> Observation:
        """Submits the final answer, which ends the episode: its verifier runs and reads the text from a file.

        Args:
            text: at most 1 MiB; may be empty.
            step_id: as for `run`.

        Raises:
            FailedPrecondition: `EPISODE_ENDED`.
        """
        return await self._step(pb.StepRequest(final_answer=text), step_id)

    async def _step(self, request: pb.StepRequest, step_id: str) -> Observation:
        request.terminal_id, request.step_id = self.terminal_id, step_id or secrets.token_hex(16)
        patience, loop = Patience(), asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                answer = await self._service.exchange(self._stub.Step, request)
            except Unavailable as error:
                if loop.time() - begun > _CONNECT_S:
                    patience.sign()  # the step may take longer than we wait for a driver that is down
                await patience.pause(error)
                continue
            return observation(answer)

    async def refresh(self) -> Terminal:
        """Fetches the episode's current state."""
        request = pb.GetTerminalRequest(terminal_id=self.terminal_id)
        answer = await self._service.call(self._stub.GetTerminal, request, repeatable=True)
        self.info = terminal(answer.terminal)
        return self.info

    async def close(self) -> None:
        """Ends it without an answer unless it has ended; returns when its sandbox is removed. Idempotent."""
        request = pb.CloseTerminalRequest(terminal_id=self.terminal_id)
        await self._service.call(self._stub.CloseTerminal, request, timeout=_CLOSE_TIMEOUT_S, repeatable=True)


class TerminalsClient:
    """`ps.terminals`."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers = drivers

    async def open(
        self,
        task: Task,
        *,
        sandbox: tasks.SandboxChoice | None = None,
        wall_time: float | None = None,
        command_timeout: float | None = None,
        output_limit_bytes: int | None = None,
        max_steps: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> TerminalHandle:
        """Opens an episode at one of the drivers, and returns when it is ready for commands.

        Use it as `async with await ps.terminals.open(task)`.

        Args:
            task: what to do; nothing of its verifier is in the sandbox before the answer. Its `sandbox`, `labels` and
                `limits.agent` apply unless given here. There are no model calls, so `budgets` is not used, and the
                driver's own limits apply to preparing, setup and verifier.
            sandbox: where; it has no network, whatever setup had.
            wall_time: seconds until the answer; None = the task's, or 30 min.
            command_timeout: seconds for each command; None = 2 min.
            output_limit_bytes: of each stream of an observation, half of it the end; None = 64 KiB, at most 1 MiB.
            max_steps: maximum commands; None = 240, the maximum.
            labels: for finding it.

        Raises:
            FailedPrecondition: `SETUP_FAILED`, with `output` in its metadata; `CAPABILITY_MISSING`.
            InvalidArgument: `FIELD_INVALID`; `violations` name the fields. `TASK_IMAGE`, as for rollouts.
            ResourceExhausted: `TERMINAL_LIMIT`.
        """
        sandbox = client.sandbox_of(task, sandbox)
        if wall_time is None and task.limits is not None:
            wall_time = task.limits.agent
        request = pb.OpenTerminalRequest(
            request_id=secrets.token_hex(16),
            task=specs.task(task),
            wall_time=chat.duration(wall_time),
            command_timeout=chat.duration(command_timeout),
            labels={**task.labels, **(labels or {})},
            output_limit_bytes=output_limit_bytes,
            max_steps=max_steps,
        )
        if sandbox is not None:
            request.sandbox.CopyFrom(specs.sandbox_choice(sandbox))
        driver, answer = await self._drivers.create(
            lambda driver, is_only: driver.service.call(
                pb_grpc.TerminalServiceStub(driver.service.channel).OpenTerminal,
                request,
                timeout=OPEN_TIMEOUT_S,
                repeatable=True,
                while_draining=is_only,
            )
        )
        return TerminalHandle(driver.service, terminal(answer.terminal))

    async def attach(self, terminal_id: str) -> TerminalHandle:
        """Returns a handle of an episode that was opened elsewhere. Raises NotFound `TERMINAL_UNKNOWN`."""
        request = pb.GetTerminalRequest(terminal_id=terminal_id)
        driver, answer = await self._drivers.having(
            terminal_id,
            lambda driver: driver.service.call(
                pb_grpc.TerminalServiceStub(driver.service.channel).GetTerminal, request, repeatable=True
            ),
        )
        return TerminalHandle(driver.service, terminal(answer.terminal))


terminal: Final = reader(
    Terminal,
    pb.Terminal,
    renamed={"task_id": "task.task_id", "setup": "setup_commands", "verifier": "verifier_commands"},
    left_out=("home",),
)
"""Converts an episode."""

observation: Final = reader(Observation, pb.StepResponse)
"""Converts the result of a step."""


def _whole(kept: bytes, written: int) -> str:
    """Returns an output as text, with a note where its middle is left out."""
    more = written - len(kept)
    if more <= 0:
        return kept.decode("utf-8", "replace")
    # The first and the last half of the limit are kept; the first one has the odd byte.
    head = len(kept) - len(kept) // 2
    first, last = (part.decode("utf-8", "replace") for part in (kept[:head], kept[head:]))
    return f"{first}\n[{more} bytes left out]\n{last}"


def _how(end: results.Exit) -> str:
    if end.reason == "exited":
        return f"exit code {end.code}"
    if end.reason == "timed_out":
        return f"timed out after {end.duration:.0f} s and was killed"
    return str(end)
