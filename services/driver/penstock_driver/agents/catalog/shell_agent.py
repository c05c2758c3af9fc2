"""The reference agent: a loop with one tool, `bash`, in two files that need nothing but Python 3.10 or newer.

It exists to be trained and to be measured, so it starts in milliseconds (it imports no pure-Python module that the
interpreter has not already loaded) and its prompts are as short as they can be. Measured: a run of three calls takes
21 ms of CPU; with `json` 32, with `json` and `http.client`, which load `re`, `email` and `ssl`, 72.

    python3 -I -S shell_agent.py CONFIG.json        (or --check: exit 0 if it can run here)
    python3 -I -S shell_agent.py --keep SESSION.json CONFIG.json        keep the conversation at its end
    python3 -I -S shell_agent.py --resume SESSION.json CONFIG.json      go on with it, and keep it again

CONFIG.json is an object; a key that is not listed here is refused:
    base_url           http://HOST:PORT/PATH; `/chat/completions` is appended. Required.
    key                sent as a bearer token. Required.
    model              the model name to send. Required.
    instruction_file   the file that holds the task. Required.
    system_prompt      default "You are a shell agent."; an empty string sends no system message.
    max_turns          model calls at most, default 20.
    stream             ask for a server-sent event stream, default false.
    temperature, max_tokens, seed    sent when present.
    command_timeout_s  limit of one command, default 120; its whole process group is then killed.
    request_timeout_s  longest silence on one model call, default 3600 (a call may wait at a gate).
    max_retries        default 7, some 30 s: a gate that restarts is back by then. A retry repeats the request's
                       Idempotency-Key, so it never is a second call.
    max_output_bytes   of a command's output given to the model, default 16384 (the middle is left out).

Standard output has one JSON object a line:
    {"type": "assistant", "turn": 1, "text": ...}           {"type": "reasoning", "turn": 1, "text": ...}
    {"type": "tool_call", "turn": 1, "id": ..., "name": ..., "arguments": ...}
    {"type": "tool_result", "turn": 1, "id": ..., "output": ..., "exit_code": 0 or null}
    {"type": "error", "message": ...}                       {"type": "done", "reason": "stop", "turns": 2}

Exit codes: 0 the model stopped calling tools; 2 bad usage or configuration; 3 the endpoint stayed unreachable or kept
failing; 4 the endpoint refused the call (4xx); 5 the turn limit was reached; 6 the endpoint's reply was not understood.
"""

import posix
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from penstock_driver.agents.catalog.shell_agent_endpoint import Endpoint, Stop, ask, dumps, loads
else:
    if __name__ == "__main__":
        sys.path.insert(0, __file__.rpartition("/")[0])  # isolated mode leaves it out
    from shell_agent_endpoint import Endpoint, Stop, ask, dumps, loads

TOOL: "dict[str, Any]" = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
DEFAULTS: "dict[str, Any]" = {
    "base_url": "",
    "key": "",
    "model": "",
    "instruction_file": "",
    "system_prompt": "You are a shell agent.",
    "max_turns": 20,
    "stream": False,
    "temperature": 1.0,
    "max_tokens": 0,
    "seed": 0,
    "command_timeout_s": 120.0,
    "request_timeout_s": 3600.0,
    "max_retries": 7,
    "max_output_bytes": 16384,
}
REQUIRED = ("base_url", "key", "model", "instruction_file")
SAMPLING = ("temperature", "max_tokens", "seed")
# How often a command is checked whose end the kernel does not report.
LOOK_AGAIN_S = 0.02


def emit(**event: "Any") -> None:
    data = (dumps(event) + "\n").encode()
    while data:
        data = data[posix.write(1, data) :]


def read_config(path: str) -> "tuple[dict[str, Any], dict[str, Any]]":
    """The configuration with its defaults, and the sampling options that it gives."""
    try:
        with open(path, encoding="utf-8") as file:
            given = loads(file.read())
    except (OSError, ValueError) as error:
        raise Stop(2, f"cannot read the configuration: {error}") from None
    if not isinstance(given, dict):
        raise Stop(2, "the configuration is not a JSON object")
    for name, value in given.items():
        if name not in DEFAULTS:
            raise Stop(2, f"unknown configuration key: {name}")
        default = DEFAULTS[name]
        kind = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kind) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise Stop(2, f"{name}: expected {type(default).__name__}")
    for name in REQUIRED:
        if not str(given.get(name, "")).strip():
            raise Stop(2, f"{name}: required")
    return {**DEFAULTS, **given}, {name: given[name] for name in SAMPLING if name in given}


def run(command: str, timeout_s: float, limit: int) -> "tuple[str, int | None]":
    """Run one command with bash; (its output, its exit code or None when it ran out of time)."""
    reader, writer = posix.pipe()
    actions: list[tuple[Any, ...]] = [(posix.POSIX_SPAWN_OPEN, 0, "/dev/null", posix.O_RDONLY, 0)]
    actions += [(posix.POSIX_SPAWN_DUP2, writer, fd) for fd in (1, 2)]
    try:
        pid = posix.posix_spawnp("bash", ["bash", "-c", command], posix.environ, file_actions=actions, setpgroup=0)
    except OSError:
        posix.close(reader)
        raise
    finally:
        posix.close(writer)
    posix.set_blocking(reader, False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    try:
        descriptor = posix.pidfd_open(pid)
        poll.register(descriptor, select.POLLIN)
        exited: int | None = descriptor
    except OSError:
        exited = None  # gVisor, and Linux before 5.3: looked at now and then instead
    head, tail, total = b"", b"", 0
    code: int | None = None
    deadline = time.monotonic() + timeout_s
    # A background process may hold the pipe open for ever, so the command's own exit ends the wait, not end-of-file.
    while code is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = poll.poll(left * 1000 if exited is not None else min(left, LOOK_AGAIN_S) * 1000)
        if exited is None or any(fd == exited for fd, _ in ready):
            ended, status = posix.waitpid(pid, posix.WNOHANG)
            code = posix.waitstatus_to_exitcode(status) if ended else None
        try:
            data = posix.read(reader, 65536)
            while data:
                total += len(data)
                head, tail = head + data[: limit - len(head)], (tail + data)[-(limit // 2) :]
                data = posix.read(reader, 65536)
            poll.unregister(reader)
        except (BlockingIOError, KeyError):
            pass
    if code is None:
        posix.killpg(pid, 9)
        posix.waitpid(pid, 0)
    posix.close(reader)
    if exited is not None:
        posix.close(exited)
    if total > limit:
        head = head[: limit - limit // 2] + b"\n[%d bytes left out]\n" % (total - limit) + tail
    text = head.decode("utf-8", "replace")
    if code is not None and code < 0:
        code = 128 - code  # as a shell reports a signal
    if code != 0:
        note = f"timed out after {timeout_s:g} s" if code is None else f"exit {code}"
        text += ("" if text.endswith("\n") or not text else "\n") + note
    return text, code


def use_tool(call: "dict[str, Any]", config: "dict[str, Any]") -> "tuple[str, int | None]":
    """The tool's result for the model, and the exit code if a command ran."""
    if call["function"]["name"] != "bash":
        return "error: the only tool is bash", None
    try:
        command = loads(call["function"].get("arguments") or "")["command"]
        if not isinstance(command, str) or "\0" in command:
            raise TypeError
        command.encode()
    except (ValueError, KeyError, TypeError):
        return 'error: expected {"command": "..."}', None
    try:
        return run(command, config["command_timeout_s"], config["max_output_bytes"])
    except OSError as error:  # no bash, or a command longer than the kernel allows
        return f"error: {error}", None


def resumed(path: str) -> "list[Any]":
    """The messages of a conversation that was kept."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            messages = loads(file.read())
    except (OSError, ValueError) as error:
        raise Stop(2, f"session: {error}") from None
    if not isinstance(messages, list):
        raise Stop(2, "session: is not a conversation")
    return messages


def keep(path: str, messages: "list[Any]") -> None:
    """Keep a conversation, so that it can be resumed."""
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(dumps(messages))
    except OSError as error:
        raise Stop(2, f"session: {error}") from None


def converse(config: "dict[str, Any]", sampling: "dict[str, Any]", session: str = "", resume: bool = False) -> int:
    """Talk until the model stops calling tools. The conversation is kept in the file `session`, unless it is empty."""
    try:
        with open(config["instruction_file"], encoding="utf-8", newline="") as file:
            instruction = file.read()
    except (OSError, ValueError) as error:
        raise Stop(2, f"instruction_file: {error}") from None
    endpoint = Endpoint(config["base_url"], config["key"], config["request_timeout_s"])
    if resume:
        messages = resumed(session)
    else:
        messages = [{"role": "system", "content": config["system_prompt"]}] if config["system_prompt"] else []
    messages.append({"role": "user", "content": instruction})
    request = {"model": config["model"], "messages": messages, "tools": [TOOL], **sampling}
    if config["stream"]:
        request["stream"] = True
    for turn in range(1, config["max_turns"] + 1):
        message = ask(endpoint, config, request)
        messages.append(message)
        if message.get("reasoning_content"):
            emit(type="reasoning", turn=turn, text=message["reasoning_content"])
        if message.get("content"):
            emit(type="assistant", turn=turn, text=message["content"])
        calls = message.get("tool_calls") or []
        if not calls:
            keep(session, messages)
            emit(type="done", reason="stop", turns=turn)
            return 0
        for call in calls:
            arguments = call["function"].get("arguments")
            emit(type="tool_call", turn=turn, id=call["id"], name=call["function"]["name"], arguments=arguments)
            output, code = use_tool(call, config)
            emit(type="tool_result", turn=turn, id=call["id"], output=output, exit_code=code)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    keep(session, messages)
    emit(type="done", reason="max_turns", turns=config["max_turns"])
    return 5


def main() -> int:
    try:
        option = sys.argv[1] if len(sys.argv) == 4 else ""
        if len(sys.argv) != 2 and option not in ("--keep", "--resume"):
            raise Stop(2, "usage: shell_agent.py [--keep SESSION.json | --resume SESSION.json] CONFIG.json")
        if sys.argv[1] == "--check":
            emit(type="ok", run=run("exit 0", 10, 1)[1])
            return 0
        return converse(*read_config(sys.argv[-1]), sys.argv[2] if option else "", option == "--resume")
    except Stop as stop:
        emit(type="error", message=str(stop))
        return stop.code


if __name__ == "__main__":
    sys.exit(main())
