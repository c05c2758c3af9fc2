"""Agent smoke test: one real rollout with a scripted model, and the findings about the agent's spec.

The script does one small task with the tools that the agent offers its model, or as the spec's `trial` defines. The
instruction contains everything that quoting gets wrong, and there is a host tool if the agent supports MCP. Nothing
here depends on a particular agent: the checks hold for every spec.
"""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.client.agents import Agent, CheckFinding
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, PenstockError
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.host_tools import HostTool, HostToolCall
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.rollouts.handles import RolloutHandle
from penstock.client.tasks.spec import AgentChoice, Command, ModelSource, SandboxChoice, SeedFile, Upstream, Verifier
from penstock.client.tasks.task import Task
from penstock.client.types import chat
from penstock.client.types.results import AgentEvent, Progress, RolloutEvent, RolloutResult
from penstock.driver.v1 import agent_pb2

NO_UNASKED: Final = frozenset({"UPSTREAM_UNREACHABLE", "UPSTREAM_NOT_ALLOWED"})
"""Reasons why a rollout cannot use it: the gate is on another machine, or the operator does not allow the endpoint."""
_UNASKED_MODEL: Final = "scripted"
_BODY: Final = b'{"object":"list","data":[]}'
_MODELS_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    % (len(_BODY), _BODY)
)
_HEAD_BYTES: Final = 64 << 10

LABEL: Final = "penstock-trial"
ROLLOUT_LABEL: Final = "penstock_rollout"
"""The driver's label on a rollout's sandbox."""
WORD: Final = "kiwi"
WORD_HERE: Final = "{{word}}"
"""In a spec's `trial.work`: the agent writes the file itself, from one answer, which it does not follow up."""
WORK_OUTPUT: Final = "the-work-is-done"
MAX_CALLS: Final = 40
"""Model calls after which the script stops answering: an agent that makes no progress would call forever."""

_SENTENCE: Final = "Run work.sh with bash: it copies the word in note.txt to out.txt."
_AWKWARD: Final = (
    '- It\'s a "task" -- $(touch pwned) `touch pwned` ${HOME} \\n \\ %s {x} {{x}} <b>&amp;</b> #1 !x\n'
    "--help\n\n\tünïcödé 漢字 🥝, a tab, two  spaces; 'single' | > pwned\n"
)
_LONG_BYTES: Final = 100 << 10
_TOOL: Final = "open_drawer"
_SHELL_NAMES: Final = re.compile(r"(?i)bash|shell|exec|terminal|command")
_COMMAND_FIELDS: Final = ("command", "cmd", "script", "commands")
_LOOK: Final = "for file in /proc/[0-9]*/cmdline; do tr '\\0' '\\n' <$file; echo; done 2>/dev/null"
_TOKEN: Final = re.compile(r"pst_[A-Za-z0-9_=-]{16,}")
"""An agent key in the gate's format."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the scripted model: a text, or a tool call; `is_last`: the script has no further one."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    is_last: bool = False


Speak = Callable[[ModelCall, Reply], chat.Completion]
"""Makes a completion of an answer."""


def in_words(call: ModelCall, reply: Reply) -> chat.Completion:
    """Returns a completion without tokens: the agent reads it whatever the model behind the gate is."""
    calls = (
        [chat.ToolCall(f"call_{secrets.token_hex(8)}", reply.tool, json.dumps(reply.arguments))] if reply.tool else []
    )
    return chat.Completion.of_text(reply.text, calls, engine="trial")


@dataclass
class Trial:
    """A finished trial with its observations."""

    agent: Agent
    instruction: str
    handle: RolloutHandle
    result: RolloutResult
    events: Sequence[RolloutEvent]
    calls: Sequence[ModelCall]
    answers: dict[str, chat.Completion]
    argv: str | None
    """The arguments of all processes of the sandbox while the agent ran; None if they could not be read."""
    tool_calls: int
    over_context: int = 0
    """Tokens of the longest prompt that the gate refused because it exceeds the served model's context; 0 = none."""
    max_context: int | None = None
    """That model's context in tokens; None = unknown."""

    @property
    def agent_events(self) -> list[AgentEvent]:
        """The agent's reported events."""
        return [event.payload for event in self.events if isinstance(event.payload, AgentEvent)]

    def findings(self) -> list[CheckFinding]:
        """Returns the passed and failed checks, in the order in which one would fix them.

        A model context too short for the agent's prompt explains all other failures, and is then the only finding.
        """
        found = self._found()
        if self.over_context and any(finding.outcome == "failed" for finding in found):
            return [self._context()]
        return found

    def _context(self) -> CheckFinding:
        has = "fewer" if self.max_context is None else f"{self.max_context:,} tokens"
        return _failed(
            "context",
            f"the served model's context ({has}) is too short for this agent's prompt ({self.over_context:,} tokens),"
            " so the agent was not tested: serve a model with a longer context (`penstock up --model-dir DIR`) and"
            " check again",
        )

    def _found(self) -> list[CheckFinding]:
        return [
            self._endpoint(),
            self._instruction(),
            self._work(),
            self._exit(),
            self._reported(),
            self._secrets(),
            *([self._tools()] if takes_tools(self.agent.spec) else []),
        ]

    def _endpoint(self) -> CheckFinding:
        if not self.calls:
            advice = "no model call reached the gate: check where the spec uses {{base_url}} and {{api_key}}"
            return _failed("endpoint", f"{advice}. The end of its output: {self._last_words()}")
        spoken = {call.dialect for call in self.calls}
        if strange := spoken - set(self.agent.dialects):
            return _failed("endpoint", f"it speaks {', '.join(sorted(strange))}, which is not among its dialects")
        return _ok("endpoint", f"{len(self.calls)} model calls at the gate, in {', '.join(sorted(spoken))}")

    def _instruction(self) -> CheckFinding:
        main = [call for call in self.calls if call.call_class == "main"]
        texts = [text_of(message) for call in main[:1] for message in call.messages]
        if any(self.instruction in text for text in texts):
            return _ok("instruction", f"{len(self.instruction.encode())} bytes of it arrived byte for byte")
        if any(self.instruction.strip() in text for text in texts):
            return _ok("instruction", "it arrived complete, without the whitespace at its ends")
        return _failed(
            "instruction", "the model got another instruction: another instruction.method may keep it complete"
        )

    def _work(self) -> CheckFinding:
        reward = self.result.reward
        if reward is not None and reward.value == 1.0:
            return _ok("work", "it ran the model's command")
        if self.calls and not any(call.tools for call in self.calls) and not self.agent.spec.trial.work:
            return _failed("work", "it offers its model no tools: set trial.work to an answer that makes it act")
        advice = "set skip_permissions_argv if it asks for permission, and trial if its model has no tool for commands"
        return _failed(
            "work", f"the model's command was not run: {advice}. The end of its output: {self._last_words()}"
        )

    def _exit(self) -> CheckFinding:
        failure, end = self.result.failure, self.result.outcome.agent_exit
        if failure is not None:
            return _failed("exit", f"{failure.reason}: {failure.message}. The end of its output: {self._last_words()}")
        return _ok("exit", f"{end}")

    def _reported(self) -> CheckFinding:
        kinds = Counter(event.kind for event in self.agent_events)
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) or "none"
        if self.agent.spec.events.source in (
            agent_pb2.EventMapping.SOURCE_UNSPECIFIED,
            agent_pb2.EventMapping.SOURCE_NONE,
        ):
            return CheckFinding(
                "events", "warning", "the spec maps no events, so its progress is unknown while it runs"
            )
        if not (kinds["tool_call"] or kinds["tool_result"]) or not kinds["assistant"]:
            missing = "tool_call or tool_result" if kinds["assistant"] else "assistant"
            return _failed("events", f"no event is {missing} ({counts}): check its output lines and events.rules")
        if kinds["other"]:
            line = next(event.raw_line for event in self.agent_events if event.kind == "other")
            shown = line[:200].decode(errors="replace")
            return CheckFinding("events", "warning", f"{counts}; no rule matches lines such as {shown}")
        return _ok("events", counts)

    def _secrets(self) -> CheckFinding:
        if self.argv is None:
            return CheckFinding(
                "secrets", "warning", "its processes could not be listed: this needs an operator's token"
            )
        if _TOKEN.search(self.argv):
            return _failed("secrets", "the agent key is an argument of a process, visible in the list of processes")
        return _ok("secrets", "no process has the key among its arguments")

    def _tools(self) -> CheckFinding:
        if self.tool_calls:
            return _ok("tools", "it called a tool over MCP")
        return _failed("tools", "the model was not offered the tool of an MCP server: check mcp.path, key and entry")

    def _last_words(self) -> str:
        lines = [event.raw_line for event in self.agent_events[-3:]]
        words = b" / ".join(lines) + b" / " + self.result.outcome.agent_stderr[-600:]
        return words.decode(errors="replace").strip(" /\n") or "none"


async def run_trial(
    ps: Penstock,
    agent: Agent,
    *,
    backend: str = "",
    speak: Speak = in_words,
    source: ModelSource | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Trial:
    """Runs one; installs the agent if needed. `on_progress` gets progress messages.

    `source` is the model that the script stands for; None = the inference service's, whose context bounds the prompt.

    Raises:
        PenstockError: the rollout could not be created; a failed rollout is a finding.
    """
    label, spec = secrets.token_hex(16), agent.spec
    long = "" if spec.instruction.method == agent_pb2.InstructionDelivery.METHOD_ARGV else _filler()
    instruction = f"{_AWKWARD}{long}{_SENTENCE}\n"
    choice = AgentChoice(name=agent.name, skip_permissions=agent.can_skip_permissions)
    script = TrialScript(spec)
    argv: list[str] = []
    async with ps.intercept(labels={LABEL: label}, messages=True) as session:
        if takes_tools(spec):
            await session.offer_tools([script.host_tool])
        options: RolloutOptions = {"labels": {LABEL: label}, "sandbox": SandboxChoice(backend=backend)}
        if source is not None:
            options["source"] = source
        handle = await ps.rollouts.create(trial_task(instruction), choice, **options)
        answering = asyncio.create_task(_answer(ps, session, script, speak, argv))
        watching = asyncio.create_task(_watched(handle, on_progress))
        try:
            await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                answering.result()
            events = await watching
            result = await handle.result()
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.wait([answering, watching])
            await handle.cancel("TRIAL_OVER")
    looked = argv[0] if argv else None
    trial = Trial(agent, instruction, handle, result, events, script.calls, script.answers, looked, script.tool_calls)
    trial.over_context = await _over_context(handle)
    if trial.over_context and ps.endpoints.inference:
        trial.max_context = (await ps.inference.info()).max_context_tokens or None
    return trial


async def _over_context(handle: RolloutHandle) -> int:
    try:
        calls = (await handle.trajectory()).calls
    except FailedPrecondition:
        return 0  # it ended before the gate was opened
    return max((call.prompt_count for call in calls if call.end_reason == "CONTEXT_EXCEEDED"), default=0)


async def _watched(handle: RolloutHandle, on_progress: Callable[[str], None]) -> list[RolloutEvent]:
    events = []
    async for event in handle.events():
        events.append(event)
        if isinstance(event.payload, Progress):
            on_progress(event.payload.message)
    return events


async def _answer(ps: Penstock, session: Any, script: "TrialScript", speak: Speak, argv: list[str]) -> None:
    async for call in session.calls():
        if not argv and (looked := await _arguments(ps, call.rollout_id)) is not None:
            argv.append(looked)
        reply = script.reply(call)
        completion = script.answers[call.call_id] = speak(call, reply)
        await call.deliver(completion)


async def _arguments(ps: Penstock, rollout_id: str) -> str | None:
    """Returns the arguments of every process in the rollout's sandbox, while the agent waits for its model."""
    try:
        async for sandbox_id, _ in ps.sandboxes.list(labels={ROLLOUT_LABEL: rollout_id}):
            sandbox = await ps.sandboxes.attach(sandbox_id)
            return (await sandbox.run(["sh", "-c", _LOOK], timeout=60.0)).stdout.decode(errors="replace")
    except PenstockError:
        pass  # an observer's token, or no reachable sandbox service: the finding reports that nothing could be read
    return None


class TrialScript:
    """The model: uses the host tool, if the agent takes one, does the work, reports that it is done."""

    def __init__(self, spec: agent_pb2.AgentSpec) -> None:
        self._trial = spec.trial
        self._code = f"code{secrets.token_hex(4)}"
        self._tools = takes_tools(spec)
        self.calls: list[ModelCall] = []
        self.answers: dict[str, chat.Completion] = {}
        self.tool_calls = 0

    @property
    def host_tool(self) -> HostTool:
        """The tool that the script calls."""
        schema = {"type": "object", "properties": {"drawer": {"type": "integer"}}, "required": ["drawer"]}
        return HostTool(name=_TOOL, function=self._open, description="Returns a drawer's code.", parameters=schema)

    async def _open(self, call: HostToolCall[Any]) -> str:
        self.tool_calls += 1
        return f"the code is {self._code}"

    def reply(self, call: ModelCall) -> Reply:
        """Returns the answer to a call, by what its conversation has already."""
        self.calls.append(call)
        if call.call_class == "title":
            return Reply("A title")
        conversation = "\n".join(text_of(message) for message in call.messages)
        # Some agents only list a server's tools, and load one when it is called.
        offered = next((tool for tool in call.tools if tool.name.endswith(_TOOL)), None)
        tool = offered.name if offered else _mentioned(conversation)
        if self._tools and tool and self._code not in conversation and len(self.calls) < MAX_CALLS:
            # Some agents add arguments of their own to every tool.
            added = _required(_schema(offered), "drawer") if offered else {}
            return Reply(tool=tool, arguments={"drawer": 7, **added})
        if WORK_OUTPUT in conversation or self._wrote(call) or len(self.calls) > MAX_CALLS:
            return self._end(call)
        return self._run(call, "bash work.sh")

    def _wrote(self, call: ModelCall) -> bool:
        """Whether a step that writes the file itself, and so has no output, was answered before."""
        work = self._trial.work
        return WORD_HERE in work and any(text_of(m) == _filled(work) for m in call.messages if m.role == "assistant")

    def _end(self, call: ModelCall) -> Reply:
        if self._trial.end_command:
            return replace(self._run(call, self._trial.end_command), is_last=True)
        return Reply(self._trial.end or "The word is copied.", is_last=True)

    def _run(self, call: ModelCall, command: str) -> Reply:
        return acting(self._trial, call, command)


def acting(trial: agent_pb2.AgentTrial, call: ModelCall, command: str) -> Reply:
    """Returns the answer that has an agent run a command: by its spec's `trial`, or with a tool that it offers."""
    if trial.work:
        return Reply(_filled(trial.work, command), is_last=WORD_HERE in trial.work)
    schemas = {tool.name: _schema(tool) for tool in call.tools}
    found = [
        (not _SHELL_NAMES.search(name), name, key)
        for name, schema in schemas.items()
        for key in _COMMAND_FIELDS
        if key in schema.get("properties", {})
    ]
    if not found:
        return Reply("There is no tool that runs a command.")
    _, name, key = min(found)
    schema = schemas[name]
    value = [command] if schema["properties"][key].get("type") == "array" else command
    return Reply(tool=name, arguments={key: value, **_required(schema, key)})


def _mentioned(conversation: str) -> str:
    found = re.search(rf"\w*{_TOOL}\b", conversation)
    return found[0] if found else ""


def trial_task(instruction: str = f"{_SENTENCE}\n") -> Task:
    """Returns the task of the script: graded by whether the word was copied, and nothing else touched."""
    return Task(
        task_id="trial",
        instruction=instruction,
        files=[
            SeedFile(
                "work.sh", f"cat note.txt > out.txt\nprintf '%s-%s\\n' {WORK_OUTPUT[:8]} {WORK_OUTPUT[9:]}\n".encode()
            ),
            SeedFile("note.txt", f"{WORD}\n".encode()),
        ],
        verifier=Verifier(
            commands=[
                Command(["sh", "-c", f'[ "$(cat out.txt)" = {WORD} ]']),
                Command(["sh", "-c", "[ ! -e pwned ] && [ ! -e ~/pwned ]"]),
            ]
        ),
    )


def _filler() -> str:
    lines = [f"{number:05}: this line means nothing.\n" for number in range(_LONG_BYTES // 32)]
    return "".join(lines)


def _filled(work: str, command: str = "") -> str:
    return work.replace("{{command}}", command).replace(WORD_HERE, WORD)


def text_of(message: chat.Message) -> str:
    """Returns the text of a message, results of tools included, without calls."""
    parts = []
    for part in message.parts:
        if isinstance(part, chat.Text):
            parts.append(part.text)
        elif isinstance(part, chat.ToolResult):
            parts += [inner.text for inner in part.parts if isinstance(inner, chat.Text)]
    return "\n".join(parts)


def _schema(tool: chat.Tool) -> dict[str, Any]:
    try:
        schema = json.loads(tool.parameters_json_schema or "{}")
    except ValueError:
        return {}
    return schema if isinstance(schema, dict) else {}


def _required(schema: dict[str, Any], given: str) -> dict[str, Any]:
    """Returns values for the required arguments other than `given`."""
    properties = schema.get("properties", {})
    return {item: _any(properties.get(item, {})) for item in schema.get("required", []) if item != given}


def _any(schema: dict[str, Any]) -> Any:
    """Returns a valid value for a required argument."""
    if schema.get("enum"):
        return schema["enum"][0]
    return {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}.get(schema.get("type", ""), "Works")


def takes_tools(spec: agent_pb2.AgentSpec) -> bool:
    """Whether host tools reach the agent: its server entry has a URL and headers."""
    return spec.HasField("mcp") and "url" in spec.mcp.entry and "headers" in spec.mcp.entry


def _ok(step: str, message: str) -> CheckFinding:
    return CheckFinding(step, "ok", message)


def _failed(step: str, message: str) -> CheckFinding:
    return CheckFinding(step, "failed", message)


@asynccontextmanager
async def unasked_model() -> AsyncIterator[Upstream]:
    """A placeholder endpoint for rollouts whose caller answers every call; yields their source while it is open.

    A rollout without a model is refused, and a real one would impose its context and tokenizer on calls that it never
    answers. This listens on loopback for the one request of a gate on this machine: its reachability check.
    """
    server = await asyncio.start_server(_answer_check, "127.0.0.1", 0, limit=_HEAD_BYTES)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Upstream(base_url=f"http://127.0.0.1:{port}/v1", model=_UNASKED_MODEL)


async def _answer_check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_MODELS_ANSWER)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # such a client is not the gate
    finally:
        writer.close()
