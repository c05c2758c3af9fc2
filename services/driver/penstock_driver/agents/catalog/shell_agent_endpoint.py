"""How the reference agent speaks to its model: JSON, one HTTP connection, a call that is retried until it is answered.

Invariants: nothing is imported that the interpreter has not loaded or built in (see `shell_agent.py`); a retry repeats
the call's Idempotency-Key; what cannot be mended by another attempt is a `Stop` with the program's exit code.
"""

import _json
import _socket
import posix
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


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


class Endpoint:
    """One keep-alive HTTP/1.1 connection to the model endpoint."""

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        scheme, _, rest = base_url.partition("://")
        authority, slash, path = rest.partition("/")
        host, colon, port = authority.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = authority, "80"
        if (
            scheme != "http"
            or not host
            or not (port.isascii() and port.isdigit())
            or any(c <= " " or c == "\x7f" for c in base_url)
        ):
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
            raise Retry(f"{status} {text[:500]}", float(after) if after.isascii() and after.isdigit() else None)
        except ValueError as error:
            raise Stop(6, f"the reply is not JSON: {error}") from None
        except Retry as failure:
            endpoint.close()
            if attempt == config["max_retries"]:
                raise Stop(3, str(failure)) from None
            time.sleep(min(0.25 * 2**attempt if failure.after is None else failure.after, 60))
        attempt += 1
