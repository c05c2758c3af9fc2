"""Whether an agent repeats itself: one rollout whose sandbox is lost at its last call, and the replay in a fresh one.

The first attempt is answered by a script. At the script's last answer the sandbox is deleted, so the driver begins a
second attempt, which replays. If the agent repeats itself, the first call that is asked again is the last one, with the
prompt that it had. Otherwise the two attempts part at a call, and the difference says why.

Prompts are compared by their token ids, or by their messages and tools where the model's source has no tokenizer.
"""

import asyncio
import re
import secrets
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from penstock.agents.smoke_test import (
    LABEL,
    ROLLOUT_LABEL,
    Reply,
    Speak,
    TrialScript,
    in_words,
    takes_tools,
    trial_task,
)
from penstock.client.agents import Agent, CheckFinding
from penstock.client.connection import Penstock
from penstock.client.errors import CallEnded, FailedPrecondition
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.host_tools import HostTool
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import RolloutHandle
from penstock.client.tasks.spec import AgentChoice, ModelSource, SandboxChoice
from penstock.client.tasks.task import Task
from penstock.client.types import chat
from penstock.client.types.results import Progress, RolloutResult
from penstock.client.types.trajectories import Trajectory

Script = Callable[[ModelCall], Reply]
"""Returns the answer to a call; one whose `is_last` is set is not given: the sandbox is lost there."""

_AROUND: Final = 60
"""Characters that are shown on each side of a difference."""
_MAX_DIVERGENCES: Final = 16
_MAX_LINES: Final = 20_000
"""Lines of a message that are compared for their order."""


class Cause(StrEnum):
    """What a difference between two prompts looks like. It is a guess from the text around it."""

    DATE = "a date or time"
    DURATION = "a duration"
    TOOL_CALL_ID = "a tool call's id"
    RANDOM_ID = "a random id"
    AGENT_KEY = "the agent key"
    ORDER = "the order of lines, as of a directory"
    PORT = "a port"
    PROCESS = "a process id"
    PATH = "a path"
    TIMING = "output that was not complete yet"
    NUMBER = "a number"
    CLASS = "a call of another kind"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A call of the replay whose prompt no call of the first attempt had.

    Attributes:
        call: its index among the calls of the second attempt, from 0.
        token: the first token that differs, from 0; None without a tokenizer.
        recorded: the text around the difference in the most similar prompt of the first attempt.
        new: the same of this one.
        cause: what the difference looks like.
    """

    call: int
    token: int | None
    recorded: str
    new: str
    cause: Cause

    def __str__(self) -> str:
        where = f"call {self.call}" if self.token is None else f"call {self.call}, token {self.token}"
        return f"parts at {where}: {self.recorded!r} was recorded, {self.new!r} is new: probably {self.cause}"


@dataclass(frozen=True, slots=True)
class ReplayTrial:
    """How a replay went.

    Attributes:
        agent: its name.
        calls: calls of the first attempt until its loss, the last one included; titles and the like are left out.
        replayed: how many of them the gate answered again without asking.
        reached: whether the last call was asked again, with the prompt that it had.
        divergences: where the attempts part, in order; at most 16.
        result: how the rollout ended.
    """

    agent: str
    calls: int
    replayed: int
    reached: bool
    divergences: tuple[Divergence, ...]
    result: RolloutResult

    def finding(self) -> CheckFinding:
        """Returns whether the agent repeated itself, and if not, why."""
        if self.divergences:
            more = len(self.divergences) - 1
            others = f" ({more} more calls differ)" if more else ""
            return CheckFinding("replay", "failed", f"in a fresh sandbox it {self.divergences[0]}{others}")
        if not self.reached:
            failure = self.result.failure
            why = "its script never came to an end" if failure is None else f"{failure.reason}: {failure.message}"
            return CheckFinding("replay", "failed", f"the last call was not asked again: {why}")
        same = f"in a fresh sandbox it made the same {self.calls} calls"
        if self.replayed < self.calls - 1:
            message = (
                f"{same}, but {self.calls - 1 - self.replayed} requests differ where the model does not look: a model "
                "without a tokenizer (an upstream) is asked them again"
            )
            return CheckFinding("replay", "warning", message)
        return CheckFinding("replay", "ok", f"{same}: {self.replayed} were replayed, and the last one was the same")


async def check_replay(
    ps: Penstock,
    agent: Agent,
    *,
    backend: str = "",
    speak: Speak = in_words,
    source: ModelSource | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> ReplayTrial:
    """Runs the smoke test's task twice, the second time as a replay. Arguments and errors as of `run_replay`."""
    script = TrialScript(agent.spec)
    tools = [script.host_tool] if takes_tools(agent.spec) else []
    return await run_replay(
        ps,
        agent,
        trial_task(),
        script.reply,
        backend=backend,
        speak=speak,
        source=source,
        host_tools=tools,
        on_progress=on_progress,
    )


async def run_replay(
    ps: Penstock,
    agent: Agent,
    task: Task,
    script: Script,
    *,
    backend: str = "",
    speak: Speak = in_words,
    source: ModelSource | None = None,
    host_tools: Sequence[HostTool] = (),
    on_progress: Callable[[str], None] = lambda line: None,
) -> ReplayTrial:
    """Runs a task until the script's last answer, loses its sandbox there, and lets it be replayed.

    `source` is the model that the script stands for; None = the inference service's. `on_progress` gets progress
    messages. The caller's token must allow sandboxes to be deleted.

    Raises:
        PenstockError: the rollout could not be created, or its sandbox not deleted.
    """
    label = secrets.token_hex(16)
    options: RolloutOptions = {
        "labels": {LABEL: label},
        "sandbox": SandboxChoice(backend=backend),
        "max_attempts": 2,
    }
    if source is not None:
        options["source"] = source
    choice = AgentChoice(name=agent.name, skip_permissions=agent.can_skip_permissions)
    async with ps.intercept(labels={LABEL: label}, messages=True) as session:
        if host_tools:
            await session.offer_tools(list(host_tools))
        handle = await ps.rollouts.create(task, choice, **options)
        replay = _Replay(ps, script, speak)
        answering = asyncio.create_task(replay.answer(session))
        watching = asyncio.create_task(_watched(handle, on_progress))
        try:
            await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                answering.result()
            await watching
            result = await handle.result()
        finally:
            for work in (answering, watching):
                work.cancel()
            await asyncio.wait([answering, watching])
            await handle.cancel("TRIAL_OVER")
    replayed = 0 if (trajectory := await _trajectory(handle)) is None else _replayed(trajectory)
    return ReplayTrial(agent.name, len(replay.recorded), replayed, replay.reached, tuple(replay.divergences), result)


async def _watched(handle: RolloutHandle, on_progress: Callable[[str], None]) -> None:
    async for event in handle.events():
        if isinstance(event.payload, Progress):
            on_progress(event.payload.message)


async def _trajectory(handle: RolloutHandle) -> Trajectory | None:
    try:
        return await handle.trajectory()
    except FailedPrecondition:
        return None  # it ended before the gate was opened


def _replayed(trajectory: Trajectory) -> int:
    return sum(call.replayed_from is not None and call.call_class not in _SIDE for call in trajectory.calls)


_SIDE: Final = frozenset({"title", "probe"})


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What the model saw of a call; `ids` is empty where the source has no tokenizer."""

    ids: Any
    text: str
    completion: chat.Completion | None
    """The answer; None = the call at which the sandbox was lost."""

    def equals(self, other: "_Prompt") -> bool:
        """Whether the model saw the same."""
        if len(self.ids) or len(other.ids):
            return np.array_equal(self.ids, other.ids)
        return self.text == other.text


@dataclass
class _Replay:
    """Answers both attempts, and compares their calls."""

    ps: Penstock
    script: Script
    speak: Speak
    recorded: list[_Prompt] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    reached: bool = False
    lost: bool = False
    call_ids: set[str] = field(default_factory=set)

    async def answer(self, session: Any) -> None:
        """Until the session ends."""
        async for call in session.calls():
            try:
                await (self._again(call) if self.lost else self._first(call))
            except CallEnded:
                continue  # its attempt is over

    async def _first(self, call: ModelCall) -> None:
        reply = self.script(call)
        if reply.is_last and call.call_class not in _SIDE:
            self.lost = True
            self.recorded.append(_prompt(call, None))
            await self.ps.sandboxes.delete_all({ROLLOUT_LABEL: call.rollout_id})
            return
        completion = self.speak(call, reply)
        self._remember(call)
        await call.deliver(completion)
        if call.call_class not in _SIDE:
            self.recorded.append(_prompt(call, completion))

    async def _again(self, call: ModelCall) -> None:
        """Answers a call of the second attempt that the gate did not replay."""
        self._remember(call)
        prompt = _prompt(call, None)
        # After the last call of the script there is nothing to compare with: an agent may ask whether it is done.
        if call.call_class not in _SIDE and not call.ended and not self.reached:
            same = next((one for one in self.recorded if one.equals(prompt)), None)
            if same is not None and same.completion is not None:
                # The request differs where its model does not look: only without a tokenizer.
                await call.deliver(same.completion)
                return
            if same is not None:
                self.reached = True
            elif len(self.divergences) < _MAX_DIVERGENCES:
                self.divergences.append(self._difference(call.index, prompt))
        await call.deliver(self.speak(call, self.script(call)))

    def _remember(self, call: ModelCall) -> None:
        self.call_ids |= {part.id for message in call.messages for part in message.tool_calls if part.id}

    def _difference(self, index: int, prompt: _Prompt) -> Divergence:
        nearest = max(self.recorded, key=lambda one: _shared(one.text, prompt.text))
        at = _shared(nearest.text, prompt.text)
        token = None
        if len(prompt.ids) and len(nearest.ids):
            count = min(len(prompt.ids), len(nearest.ids))
            unequal = np.flatnonzero(nearest.ids[:count] != prompt.ids[:count])
            token = int(unequal[0]) if unequal.size else count
        cause = cause_of(nearest.text, prompt.text, at, self.call_ids)
        return Divergence(index, token, _window(nearest.text, at), _window(prompt.text, at), cause)


def _prompt(call: ModelCall, completion: chat.Completion | None) -> _Prompt:
    return _Prompt(call.prompt_token_ids, "\n".join(_lines(call)), completion)


def _lines(call: ModelCall) -> Iterator[str]:
    """What the model sees, as text: tools, then messages."""
    for tool in call.tools:
        yield f"tool {tool.name}: {tool.description}\n{tool.parameters_json_schema}"
    for message in call.messages:
        yield f"[{message.role}]"
        for part in message.parts:
            yield from _part(part)


def _part(part: chat.Part) -> Iterator[str]:
    match part:
        case chat.Text() | chat.Reasoning():
            yield part.text
        case chat.ToolCall():
            yield f"call {part.id} {part.name} {part.arguments_json}"
        case chat.ToolResult():
            yield f"result {part.tool_call_id}"
            for inner in part.parts:
                yield from _part(inner)
        case chat.Image():
            yield f"image {part.media_type} {part.url} {len(part.data)}"


def _shared(left: str, right: str) -> int:
    """Characters with which both begin."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _window(text: str, at: int) -> str:
    return text[max(0, at - _AROUND) : at + _AROUND]


_DATE: Final = re.compile(
    r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}/\d{1,2}/\d{4}|(?<!\d)\d{1,2}:\d\d(:\d\d([.,]\d+)?)?(?!\d)|"
    r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b \d|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)
_DURATION: Final = re.compile(
    r"\d+(\.\d+)?\s?(ms|s|sec|secs|seconds?|minutes?)\b|(?i:wall time|duration|elapsed|took)\D{0,12}\d"
)
_CALL_ID: Final = re.compile(r"\b(call|toolu|fc|tool)_[A-Za-z0-9]{6,}")
_KEY: Final = re.compile(r"pst_[A-Za-z0-9_=-]{8,}")
_PORT: Final = re.compile(r"(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):\d{2,5}|(?i:port)\D{0,3}\d{2,5}")
_PROCESS: Final = re.compile(r"(?i:\bpid\b|process|session id|session_id)\D{0,6}\d+")
_RANDOM: Final = re.compile(
    r"[0-9a-f]{6,}|[0-9a-f]{8}-[0-9a-f]{4}|(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{8,}"
)
_PATH: Final = re.compile(r"(?:\.{0,2}/|~/)[\w.@+-]+(?:/[\w.@+-]*)*")
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


def cause_of(recorded: str, new: str, at: int, call_ids: set[str] | frozenset[str] = frozenset()) -> Cause:
    """Guesses what made two prompts differ from character `at` on. `call_ids` are the known ids of tool calls."""
    if any(one in _window(text, at) for text in (recorded, new) for one in call_ids if _covers(text, at, one)):
        return Cause.TOOL_CALL_ID
    for pattern, cause in (
        (_KEY, Cause.AGENT_KEY),
        (_CALL_ID, Cause.TOOL_CALL_ID),
        (_DATE, Cause.DATE),
        (_DURATION, Cause.DURATION),
        (_PORT, Cause.PORT),
        (_PROCESS, Cause.PROCESS),
    ):
        if _is_at(pattern, recorded, at) and _is_at(pattern, new, at):
            return cause
    if _same_lines(recorded, new):
        return Cause.ORDER
    for pattern, cause in ((_PATH, Cause.PATH), (_RANDOM, Cause.RANDOM_ID), (_NUMBER, Cause.NUMBER)):
        if _is_at(pattern, recorded, at) and _is_at(pattern, new, at):
            return cause
    return Cause.TIMING if _is_cut(recorded, new, at) else Cause.UNKNOWN


_TEXT: Final = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_MOST_MESSAGE: Final = 4000
"""Characters: a gate's has two texts of up to 400, and a file may have any."""
_PARTED: Final = re.compile(rf"{_TEXT} was recorded, {_TEXT} is new\.$")


def cause_in_finding(message: str) -> Cause | None:
    """Guesses the cause from the gate's finding `REPLAY_DIVERGED`, which has the text around it on both sides.

    Returns:
        None where the message has no such texts, or they look like nothing that is known.
    """
    found = _PARTED.search(message) if len(message) <= _MOST_MESSAGE else None
    if found is None:
        return None
    try:
        recorded, new = map(literal_eval, found.groups())
    except (ValueError, SyntaxError):  # a file may come from anybody
        return None
    cause = cause_of(recorded, new, _shared(recorded, new))
    return None if cause is Cause.UNKNOWN else cause


def _covers(text: str, at: int, item: str) -> bool:
    found = text.find(item, max(0, at - len(item)), at + len(item))
    return found >= 0 and found <= at <= found + len(item)


def _is_at(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether a match covers the character, or ends right before it."""
    start = max(0, at - _AROUND)
    return any(one.start() <= at - start <= one.end() for one in pattern.finditer(text[start : at + _AROUND]))


def _same_lines(recorded: str, new: str) -> bool:
    left, right = recorded.splitlines(), new.splitlines()
    return len(left) == len(right) <= _MAX_LINES and sorted(left) == sorted(right)


def _is_cut(recorded: str, new: str, at: int) -> bool:
    """Whether one has lines where the other goes on with what comes after them."""
    for left, right in ((recorded, new), (new, recorded)):
        follows = left[at : at + _AROUND].strip()
        if follows and follows in right[at : at + 4096]:
            return True
    return False


def as_json(trial: ReplayTrial) -> dict[str, Any]:
    """A trial as a value of JSON."""
    return {
        "calls": trial.calls,
        "replayed": trial.replayed,
        "reached": trial.reached,
        "divergences": [
            {
                "call": one.call,
                "token": one.token,
                "recorded": one.recorded,
                "new": one.new,
                "cause": one.cause.name,
            }
            for one in trial.divergences
        ],
    }
