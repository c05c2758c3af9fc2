"""Terminal episodes without `await`, with the names of the Terminus environment: one tool, `terminal`.

    factory = TerminusSessionFactory()
    with factory.create({"instruction": "Write hi to out.txt", "verify": ["grep -q hi out.txt"]}) as session:
        messages = session.initial_messages()
        while not session.done:
            call = build_terminal_tool_call(policy(messages))
            result = session.call_tool(call.name, call.args)
            messages.append(session.tool_message(call, result))
        print(session.verify().env_reward)

Invariants: verifier commands are shown only on request; a reward travels in a field of its own, which no output of a
command can write, and is None where there is none (R74, R77); `close` may be called from any thread, and unblocks a
running command (R70).
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from penstock.client import sync
from penstock.client.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock.client.tasks.spec import Command, SandboxChoice
from penstock.client.tasks.task import Task
from penstock.client.terminals import Observation, Terminal
from penstock.client.terminus.calls import TOOL_NAME, TerminalToolCall, call_problem
from penstock.client.terminus.tasks import as_task, sandbox_of
from penstock.client.transport.endpoints import Target, Tls
from penstock.client.types.chat import Tool

TERMINAL_TOOL: Final = Tool(
    name=TOOL_NAME,
    description="Runs one command in a shell that keeps its state, or sends the final answer, which ends the task.",
    parameters_json_schema=json.dumps(
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "A command for the shell."},
                "final_answer": {"type": "string", "description": "Sent once, when the task is done."},
            },
            "additionalProperties": False,
        }
    ),
)
"""The one tool: `command` or `final_answer`, never both."""

_USAGE: Final = (
    'Work in a terminal: call the tool `terminal` with {"command": "..."} to run a command and see its output, as '
    'often as you need. When you are done, call it with {"final_answer": "..."}, once.'
)
_CLOSED: Final = "the session is closed"
_POLICYS: Final = frozenset({"EPISODE_ENDED", "FIELD_INVALID", "STEP_LIMIT"})
"""Errors caused by the policy, for the policy to read."""


@dataclass(frozen=True, slots=True)
class TerminusResult:
    """The result of a call: `data` has tool_name, arguments, output, reward (None = none), done, and error if there is
    one."""

    data: Mapping[str, Any]
    done: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def output(self) -> str:
        """The text for the policy."""
        return str(self.data["output"])

    @property
    def reward(self) -> float | None:
        """The reward; None = not graded, which is not zero."""
        reward: float | None = self.data["reward"]
        return reward


@dataclass(frozen=True, slots=True)
class TerminusVerdict:
    """The grade of an episode. `env_reward` None = not graded, which is not zero; `metrics` describe its progress."""

    env_reward: float | None
    done: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Any] = field(default_factory=dict)


class TerminusSessionFactory:
    """Makes sessions, which share one connection while any is open. Picklable: the process that uses it connects.

    Args:
        default_setup: shell commands, for tasks without their own.
        default_verify: the same for the verifier; the reward is the share that passes.
        sandbox: where; a task's `sandbox_backend` and `sandbox_image` take precedence.
        show_verifier: whether the first message shows the verifier's commands to the policy.
        wall_time: seconds for each episode; a task's `sandbox_timeout` takes precedence. None = 30 min.
        command_timeout: seconds for each command; None = 2 min.
        max_steps: maximum commands; None = 240, the maximum.
        target, token, tls: as `penstock.client.connect`.
    """

    def __init__(
        self,
        default_setup: Sequence[str | Command] = (),
        default_verify: Sequence[str | Command] = (),
        *,
        sandbox: SandboxChoice | None = None,
        show_verifier: bool = False,
        wall_time: float | None = None,
        command_timeout: float | None = None,
        max_steps: int | None = None,
        target: Target | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._setup = tuple(default_setup)
        self._verify = tuple(default_verify)
        self._sandbox = sandbox or SandboxChoice()
        self._show_verifier = show_verifier
        self._wall_time = wall_time
        self._command_timeout = command_timeout
        self._max_steps = max_steps
        self._connection = (target, token, tls)
        self._lock = threading.Lock()
        self._client: sync.Penstock | None = None
        self._users = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_client", "_users")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._client, self._users = threading.Lock(), None, 0

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> "TerminusSession":
        """Opens an episode.

        Args:
            task: an instruction; chat messages, whose last user message is the instruction; a mapping with
                instruction (prompt, question, task), setup, verify, sandbox_backend, sandbox_image, sandbox_timeout;
                or a `Task`.
            seed: must be None: nothing is random here (R63).
            episode_id: kept as the label `episode_id`.

        Raises:
            InvalidArgument: `TERMINUS_TASK`, it is none of these, or requires something that does not exist.
            PenstockError: as `ps.terminals.open`.
        """
        if seed is not None:
            raise InvalidArgument("seed: a terminal episode has no random choices: use None", reason="TERMINUS_TASK")
        made = as_task(task, self._setup, self._verify)
        sandbox, wall_time = self._sandbox, self._wall_time
        if isinstance(task, Mapping):
            sandbox, wall_time = sandbox_of(task, sandbox, wall_time)
        client = self._enter()
        try:
            labels = {"episode_id": episode_id} if episode_id else {}
            terminal = client.terminals.open(
                made,
                sandbox=sandbox,
                labels=labels,
                wall_time=wall_time,
                command_timeout=self._command_timeout,
                max_steps=self._max_steps,
            )
        except BaseException:
            self._leave()
            raise
        return TerminusSession(terminal, made, show_verifier=self._show_verifier, leave=self._leave)

    def _enter(self) -> sync.Penstock:
        with self._lock:
            if self._client is None:
                target, token, tls = self._connection
                self._client = sync.connect(target, token, tls=tls).__enter__()
            self._users += 1
            return self._client

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            client, self._client = (self._client, None) if not self._users else (None, self._client)
        if client is not None:
            client.__exit__(None, None, None)


class TerminusSession:
    """One episode: `initial_messages`, `list_tools`, `call_tool`, `verify`, `close`. A `with` block closes it."""

    def __init__(self, terminal: sync.TerminalHandle, task: Task, *, show_verifier: bool, leave: Any) -> None:
        self._terminal = terminal
        self._task = task
        self._show_verifier = show_verifier
        self._leave = leave
        self._lock = threading.Lock()
        self._closed = False
        self._released = False
        self._uses = 1
        """Number of users of the connection: the session itself until it is released, running calls and closes."""
        self._last: Terminal | None = None
        self._end: Observation | None = None
        self._commands = 0
        self._answer: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def terminal_id(self) -> str:
        """The episode's id."""
        return self._terminal.terminal_id

    @property
    def done(self) -> bool:
        """Whether a call of this session was the last or came after the episode's end."""
        return self._end is not None

    def initial_messages(self) -> list[dict[str, Any]]:
        """Returns the first messages: the instruction, how to use the tool, and the verifier's commands if shown."""
        parts = [self._task.instruction, _USAGE]
        if self._show_verifier and self._task.verifier is not None:
            commands = "\n".join(str(command) for command in self._task.verifier.commands)
            parts.append(f"These commands will check your work:\n{commands}")
        return [{"role": "user", "content": "\n\n".join(parts)}]

    def list_tools(self) -> list[Tool]:
        """Returns the tool `terminal`."""
        return [TERMINAL_TOOL]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> TerminusResult:
        """Runs a command or submits the final answer.

        A mistake of the policy (another tool, both arguments or none, an invalid command, a command beyond the maximum,
        a call after the end) is returned as `error` for it to read, and changes nothing. After the end, whatever ended
        the episode, the result is `done` and has the reward.
        """
        problem = call_problem(name, arguments)
        if problem:
            return self._result(name, arguments, problem, error=problem)
        with self._lock:
            if self._closed:
                return self._result(name, arguments, _CLOSED, error=_CLOSED)
            self._uses += 1
        try:
            seen = self._step(arguments)
        except (FailedPrecondition, InvalidArgument, ResourceExhausted) as error:
            if error.reason not in _POLICYS:
                raise
            problem = error.message if error.reason != "EPISODE_ENDED" else self._find_end() or error.message
            return self._result(name, arguments, problem, error=problem)
        finally:
            self._release()
        if seen.ended:
            self._end = seen
        return self._result(name, arguments, seen.text(), error=_failure(seen))

    def _find_end(self) -> str | None:
        """Looks up an end that no call of this session saw: its time passed, or it was ended elsewhere. Returns why."""
        if self._end is None and (found := self._terminal.refresh()).ended:
            self._end = Observation("", result=None, ended=True, reward=found.reward, failure=found.failure)
        return _failure(self._end) if self._end is not None else None

    def _step(self, arguments: Mapping[str, Any]) -> Observation:
        if command := arguments.get("command"):
            seen: Observation = self._terminal.run(command)
            self._commands += 1
        else:
            seen = self._terminal.answer(arguments["final_answer"])
            self._answer = arguments["final_answer"]
        return seen

    def tool_message(self, call: TerminalToolCall, result: TerminusResult) -> dict[str, Any]:
        """Returns the message that answers a call, the reward in a field beside the text: see `terminus_reward`."""
        content = result.output if call.ok else call.problem
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content, "reward": result.reward}

    def verify(self, transcript: Any = None, final_state: Any = None) -> TerminusVerdict:
        """Returns the episode's grade; nothing is graded here. The arguments are ignored.

        `env_reward` is None while it has not ended, where it has no verifier, and where grading failed
        (`metrics["failure"]`).
        """
        terminal = self._last or self._terminal.refresh()
        return TerminusVerdict(
            env_reward=None if terminal.reward is None else terminal.reward.value,
            done=terminal.ended,
            metrics={
                "done": terminal.ended,
                "step_count": terminal.step_count,
                "commands": self._commands,
                "setup_commands": len(self._task.setup),
                "verify_commands": len(self._task.verifier.commands) if self._task.verifier else 0,
                "verify_passed": sum(command.exit.ok for command in terminal.verifier),
                "submitted_answer": self._answer,
                "sandbox_id": terminal.sandbox_id,
                "failure": None if terminal.failure is None else terminal.failure.reason,
            },
        )

    def close(self) -> None:
        """Ends the episode unless it has ended; a command running in another thread returns. Idempotent.

        Raises:
            PenstockError: the driver has not ended it. Call this again: until then the session keeps its connection,
                and runs nothing.
        """
        with self._lock:
            self._closed = True
            if self._released:
                return
            self._uses += 1
        try:
            self._terminal.close()
            self._last = self._terminal.refresh()
            self._release_own()
        finally:
            self._release()

    def _release_own(self) -> None:
        """Releases the session's own use of the connection, once."""
        with self._lock:
            is_first, self._released = not self._released, True
        if is_first:
            self._release()

    def _release(self) -> None:
        """Releases the connection; the last session closes it."""
        with self._lock:
            self._uses -= 1
            is_last = self._uses == 0
        if is_last:
            self._leave()

    def _result(self, name: str, arguments: Mapping[str, Any], output: str, *, error: str | None) -> TerminusResult:
        reward = self._end.reward.value if self._end is not None and self._end.reward is not None else None
        data: dict[str, Any] = {
            "tool_name": name,
            "arguments": dict(arguments),
            "output": output,
            "reward": reward,
            "done": self.done,
        }
        if error:
            data["error"] = error
        return TerminusResult(data, self.done, {"terminal_id": self.terminal_id}, error)


def _failure(seen: Observation) -> str | None:
    return f"{seen.failure.reason}: {seen.failure.message}" if seen.failure else None


def terminus_reward(completions: Sequence[Sequence[Mapping[str, Any]] | str], **kwargs: Any) -> list[float | None]:
    """Returns the reward of each completion, None where there is none: a reward function for trainers.

    It is the last `reward` field of a message with the role `tool`, as `TerminusSession.tool_message` makes them. The
    text of messages is never read: a policy writes it (R77).

    Args:
        completions: lists of messages; a text has no reward.
        kwargs: `env_reward`, if the trainer carries rewards in a column of its own, one for each completion: then it is
            returned. Others are ignored.

    Raises:
        InvalidArgument: `TERMINUS_REWARD`, a reward is not a finite number, or there are not as many as completions.
    """
    column = kwargs.get("env_reward")
    if column is not None:
        if len(column) != len(completions):
            raise InvalidArgument("env_reward must have one value for each completion", reason="TERMINUS_REWARD")
        return [_reward(value) for value in column]
    return [_last_reward(completion) for completion in completions]


def _last_reward(completion: Sequence[Mapping[str, Any]] | str) -> float | None:
    if isinstance(completion, str):
        return None
    rewards = [
        message["reward"]
        for message in completion
        if message.get("role") == "tool" and message.get("reward") is not None
    ]
    return _reward(rewards[-1]) if rewards else None


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgument(f"a reward must be a finite number or None, not {value!r}", reason="TERMINUS_REWARD")
    return float(value)
