"""The reference agent: a loop with one tool, `bash`, in one file that needs nothing but Python 3.10 or newer.

It exists to be trained and to be measured, so it starts in milliseconds (it imports no pure-Python module that the
interpreter has not already loaded: `json` alone would double its start-up) and its prompts are as short as they can be.

    python3 -I -S shell_agent.py CONFIG.json        (or --check: exit 0 if it can run here)

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

import _json
import _socket
import posix
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

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
# How often a command is looked at that the kernel does not tell the end of.
LOOK_AGAIN_S = 0.02


class Stop(Exception):
    """Ends the program with an exit code and an error event."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Retry(Exception):
    """One attempt failed in a way that another may not; `after` is the server's wish in seconds, or None."""

    def __init__(self, message: str, after: "float | None" = None) -> None:
        super().__init__(message)
        self.after = after


class _Strict:
    """What the C scanner asks its context for: the values that `json.JSONDecoder()` would have."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float
    memo: "dict[str, str]" = {}  # noqa: RUF012 - the scanner wants an attribute


_scan = _json.make_scanner(_Strict)  # type: ignore[arg-type]
_quote = _json.encode_basestring_ascii


def loads(text: str) -> "Any":
    """Decode one JSON value; ValueError when the text is not exactly one."""
    text = text.strip()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError):
        # SystemError: the scanner looks for the exception class of `json.decoder`, which is not imported here.
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if end != len(text):
        raise ValueError("data after the JSON value")
    return value


def dumps(value: "Any") -> str:
    """Encode str, int, float, bool, None, list and dict."""
    if isinstance(value, str):
        return _quote(value)
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join([_quote(k) + ": " + dumps(v) for k, v in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join([dumps(v) for v in value]) + "]"
    return repr(value)


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


class Endpoint:
    """One keep-alive HTTP/1.1 connection to the model endpoint."""

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        scheme, _, rest = base_url.partition("://")
        authority, slash, path = rest.partition("/")
        host, colon, port = authority.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = authority, "80"
        if scheme != "http" or not host or not port.isdigit() or any(c <= " " or c == "\x7f" for c in base_url):
            raise Stop(2, "base_url: expected http://HOST:PORT/PATH without spaces or control characters")
        if any(c < " " or c == "\x7f" for c in key):
            raise Stop(2, "key: control characters are not allowed")
        self._address = (host.strip("[]"), int(port))
        self._family = _socket.AF_INET6 if host.startswith("[") else _socket.AF_INET
        self._head = (
            f"POST {slash}{path.rstrip('/')}/chat/completions HTTP/1.1\r\nHost: {authority}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\nUser-Agent: penstock-shell-agent/1\r\n"
        )
        self._timeout_s = timeout_s
        self._socket: Any = None
        self._buffer = b""

    def post(self, body: bytes, idempotency_key: str, attempt: int) -> "tuple[int, dict[str, str], Iterator[bytes]]":
        """Send one request and return (status, headers, chunks of the body)."""
        head = (
            f"{self._head}Idempotency-Key: {idempotency_key}\r\nX-Retry-Count: {attempt}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        reused = self._socket is not None
        try:
            return self._exchange(head.encode() + body)
        except OSError as error:
            self.close()
            if not reused:
                raise Retry(f"cannot reach the endpoint: {error}") from None
        # The server may close an idle connection at any time: that is no failure, so it costs no retry.
        try:
            return self._exchange(head.encode() + body)
        except OSError as error:
            self.close()
            raise Retry(f"cannot reach the endpoint: {error}") from None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def _exchange(self, request: bytes) -> "tuple[int, dict[str, str], Iterator[bytes]]":
        if self._socket is None:
            self._socket = _socket.socket(self._family, _socket.SOCK_STREAM)
            self._socket.settimeout(self._timeout_s)
            self._socket.connect(self._address)
            self._socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._socket.sendall(request)
        status = 100
        headers: dict[str, str] = {}
        while 100 <= status < 200:
            line = self._line()
            if line[:5] != "HTTP/":
                raise OSError("not an HTTP reply")
            status, headers = int(line.split(" ")[1]), {}
            line = self._line()
            while line:
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
                line = self._line()
        return status, headers, self._body(headers)

    def _body(self, headers: "dict[str, str]") -> "Iterator[bytes]":
        """Yield the body as it comes; the connection is kept only after a complete body."""
        try:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                size = int(self._line().partition(";")[0], 16)
                while size:
                    yield self._exactly(size)
                    self._line()
                    size = int(self._line().partition(";")[0], 16)
                while self._line():
                    pass
            elif "content-length" in headers:
                yield self._exactly(int(headers["content-length"]))
            else:
                headers["connection"] = "close"
                yield self._buffer
                data = self._socket.recv(65536)
                while data:
                    yield data
                    data = self._socket.recv(65536)
        except (OSError, ValueError) as error:
            self.close()
            raise Retry(f"the reply broke off: {error}") from None
        if headers.get("connection", "").lower() == "close":
            self.close()

    def _fill(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise OSError("the endpoint closed the connection")
        self._buffer += data

    def _line(self) -> str:
        while b"\n" not in self._buffer:
            if len(self._buffer) > 65536:
                raise OSError("a header line is too long")
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.rstrip(b"\r").decode("latin-1")

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data


def message_of(reply: "Any") -> "dict[str, Any]":
    """The assistant message of a chat completion."""
    try:
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not all(isinstance(call["id"], str) and isinstance(call["function"]["name"], str) for call in calls):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Stop(6, f"the reply is not a chat completion: {dumps(reply)[:500]}") from None
    return message  # type: ignore[no-any-return]


def message_of_stream(chunks: "Iterator[bytes]") -> "dict[str, Any]":
    """The assistant message that the deltas of an event stream add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, Any] = {}
    done, pending = False, b""
    for data in chunks:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                continue
            event = loads(payload.decode("utf-8", "replace"))
            if event.get("error"):
                raise Retry(f"the stream reported an error: {dumps(event['error'])[:500]}")
            for choice in event.get("choices") or []:
                add_delta(message, calls, choice.get("delta") or {})
    if not done:
        raise Retry("the stream ended early")
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def add_delta(message: "dict[str, Any]", calls: "dict[int, Any]", delta: "dict[str, Any]") -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or []:
        function = part.get("function") or {}
        call = calls.setdefault(
            part.get("index", len(calls)), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = call["id"] or part.get("id") or ""
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def ask(endpoint: Endpoint, config: "dict[str, Any]", request: "dict[str, Any]") -> "dict[str, Any]":
    """One model call, retried until it is answered, refused or out of attempts."""
    body, idempotency_key = dumps(request).encode(), posix.urandom(16).hex()
    attempt = 0
    while True:
        try:
            status, headers, chunks = endpoint.post(body, idempotency_key, attempt)
            if status == 200 and config["stream"]:
                return message_of({"choices": [{"message": message_of_stream(chunks)}]})
            text = b"".join(chunks).decode("utf-8", "replace")
            if status == 200:
                return message_of(loads(text))
            if status not in (408, 409, 425, 429) and status < 500:
                raise Stop(4, f"the endpoint refused the call: {status} {text[:500]}")
            after = headers.get("retry-after", "")
            raise Retry(f"{status} {text[:500]}", float(after) if after.isdigit() else None)
        except ValueError as error:
            raise Stop(6, f"the reply is not JSON: {error}") from None
        except Retry as failure:
            endpoint.close()
            if attempt == config["max_retries"]:
                raise Stop(3, str(failure)) from None
            time.sleep(min(0.25 * 2**attempt if failure.after is None else failure.after, 60))
        attempt += 1


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


def converse(config: "dict[str, Any]", sampling: "dict[str, Any]") -> int:
    """Talk until the model stops calling tools."""
    try:
        with open(config["instruction_file"], encoding="utf-8", newline="") as file:
            instruction = file.read()
    except (OSError, ValueError) as error:
        raise Stop(2, f"instruction_file: {error}") from None
    endpoint = Endpoint(config["base_url"], config["key"], config["request_timeout_s"])
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
            emit(type="done", reason="stop", turns=turn)
            return 0
        for call in calls:
            arguments = call["function"].get("arguments")
            emit(type="tool_call", turn=turn, id=call["id"], name=call["function"]["name"], arguments=arguments)
            output, code = use_tool(call, config)
            emit(type="tool_result", turn=turn, id=call["id"], output=output, exit_code=code)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    emit(type="done", reason="max_turns", turns=config["max_turns"])
    return 5


def main() -> int:
    try:
        if len(sys.argv) != 2:
            raise Stop(2, "usage: shell_agent.py CONFIG.json")
        if sys.argv[1] == "--check":
            emit(type="ok", run=run("exit 0", 10, 1)[1])
            return 0
        return converse(*read_config(sys.argv[1]))
    except Stop as stop:
        emit(type="error", message=str(stop))
        return stop.code


if __name__ == "__main__":
    sys.exit(main())
