"""The HTTP client of the endpoint: pooled connections, bounded answers, and a typed error for every failure.

Redirects are not followed, since the key is for one address. A request is repeated only if a pooled connection, used
before, was closed before any response: servers close idle connections. On a new connection a break means that the
server may have received the prompt, and is raised like every other failure, with a delay if a retry can help. Leaving a
stream closes its connection, which aborts the generation upstream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import orjson
import structlog

from penstock_chassis.errors import (
    FailedPrecondition,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Violation,
)
from penstock_chassis.membership import session_header
from penstock_chassis.validation import invalid

MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_SHOWN = 300
MAX_DELAY_S = 3600.0
RETRY_S = 1.0
# Shorter than servers' keep-alive (uvicorn: 5 s), so that few connections die just as they are used.
KEEPALIVE_S = 4.0
STATUS = "http_status"
OPENAI_API = ("an OpenAI-compatible API", "Check base_url (it usually ends in /v1) and its server.")
"""The API of an endpoint, for messages, and what to check where its answer is not of that API."""
_FIELDS = {
    "prompt": "prompt_token_ids",
    "input_tokens": "prompt_token_ids",
    "max_completion_tokens": "sampling.max_tokens",
}
_DEAD = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)

_log = structlog.get_logger("penstock.inference")


class Endpoint:
    """One endpoint.

    Args:
        base_url: without a trailing slash.
        api_key: sent to this address only, and never shown.
        connections: maximum number at once.
        connect_s: timeout for connecting, in seconds.
        idle_s: an answer is aborted after this many seconds of silence.
        ca_file: a private CA.
        session_header_name: of the header that carries the session's id of a request; empty sends none.
        api: the API that it should have, as `OPENAI_API`.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        connections: int,
        connect_s: float,
        idle_s: float,
        ca_file: Path | None = None,
        session_header_name: str = "",
        api: tuple[str, str] = OPENAI_API,
    ) -> None:
        self.base_url = base_url
        self._api, self._advice = api
        self._session_header = session_header_name
        self._key = api_key
        context = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEEPALIVE_S, ssl=context),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=idle_s),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_reuse_trace()],
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def get(self, path: str, *, root: bool = False) -> Any:
        """Get a JSON value; `root` omits the base URL's path. Raises PenstockError."""
        base = self.base_url.removesuffix("/v1") if root else self.base_url
        async with self._answer("GET", f"{base}{path}", None) as answer:
            return await self._whole(answer)

    async def post(self, path: str, body: Mapping[str, Any], session_id: str = "") -> Any:
        """Post a body of a session and return the JSON answer. Raises PenstockError."""
        async with self._answer("POST", f"{self.base_url}{path}", body, session_id) as answer:
            return await self._whole(answer)

    async def command(self, path: str, body: Mapping[str, Any]) -> None:
        """Post a command whose answer has no content that matters. Raises PenstockError."""
        async with self._answer("POST", f"{self.base_url}{path}", body) as answer:
            await self._read(answer, MAX_ERROR_BYTES)

    async def events(self, path: str, body: Mapping[str, Any], session_id: str = "") -> AsyncGenerator[Any, None]:
        """Yield the JSON values of a stream, in order, until the endpoint's end mark.

        Raises PenstockError; Unavailable (UPSTREAM_CUT_OFF) for a stream without that mark.
        """
        async with self._answer("POST", f"{self.base_url}{path}", body, session_id) as answer:
            if answer.content_type == "application/json":
                # It does not stream: the whole answer is one event.
                yield await self._whole(answer)
                return
            if answer.content_type != "text/event-stream":
                raise self.invalid(f"a stream was requested, but the answer is {shown(answer.content_type)}")
            async for line in _lines(answer):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                value = self._json(data)
                if isinstance(value, dict) and value.get("error"):
                    raise self._refused(_code(value["error"]), value, {})
                yield value
        raise cut_off("its stream ended within an answer")

    def invalid(self, text: str, known: Mapping[str, str] | None = None) -> FailedPrecondition:
        """The error for an invalid answer."""
        return FailedPrecondition(
            f"The upstream's answer is not that of {self._api}: {text}. {self._advice}",
            reason="UPSTREAM_ANSWER_INVALID",
            metadata=known,
        )

    @asynccontextmanager
    async def _answer(
        self, method: str, url: str, body: Mapping[str, Any] | None, session_id: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200. Raises PenstockError, also for failures while it is read."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {} if data is None else {"content-type": "application/json"}
        headers |= session_header.headers(self._session_header, session_id)
        reused = asyncio.Event()

        def ask() -> Awaitable[aiohttp.ClientResponse]:
            return self._http.request(
                method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=reused
            )

        try:
            try:
                answer = await ask()
            except _DEAD:
                if not reused.is_set():
                    raise
                answer = await ask()
        except aiohttp.SocketTimeoutError as error:
            raise _silent() from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable(error) from error
        try:
            if answer.status != 200:
                raise await self._failure(answer)
            yield answer
        except aiohttp.SocketTimeoutError as error:
            raise _silent() from error
        except (aiohttp.ClientError, OSError) as error:
            raise cut_off("its connection broke within an answer") from error
        finally:
            # Closes the connection of an answer that was not read to its end; otherwise returns it to the pool.
            answer.release() if answer.content.at_eof() else answer.close()

    async def _whole(self, answer: aiohttp.ClientResponse) -> Any:
        return self._json(await self._read(answer, MAX_ANSWER_BYTES))

    async def _read(self, answer: aiohttp.ClientResponse, most: int) -> bytes:
        data = bytearray()
        async for chunk in answer.content.iter_any():
            data += chunk
            if len(data) > most:
                raise too_large()
        return bytes(data)

    def _json(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except ValueError:
            kind = "HTML" if data.lstrip()[:1] == b"<" else "no JSON"
            raise self.invalid(f"it is {kind}") from None

    async def _failure(self, answer: aiohttp.ClientResponse) -> PenstockError:
        """The error for a status other than 200."""
        try:
            value = orjson.loads(await self._read(answer, MAX_ERROR_BYTES))
        except (ValueError, PenstockError):
            value = None
        return self._refused(answer.status, value, answer.headers)

    def _refused(self, status: int, value: Any, headers: Mapping[str, str]) -> PenstockError:
        message, param = _error_message(value, self._key)
        known = {STATUS: str(status)}
        _log.warning("upstream refused a request", status=status)
        if status in (401, 403):
            return FailedPrecondition(
                f"The upstream refuses its key (HTTP {status}): check PENSTOCK_INFERENCE_UPSTREAM_API_KEY or "
                "api_key_file, and that the key is for this endpoint.",
                reason="UPSTREAM_KEY_REFUSED",
                metadata=known,
            )
        if status == 429:
            return ResourceExhausted(
                "The upstream's rate limit is reached (HTTP 429).",
                reason="UPSTREAM_RATE_LIMIT",
                metadata=known,
                retry_after_s=_delay(headers),
            )
        if status in (408, 409, 425) or status >= 500:
            return Unavailable(
                f"The upstream cannot answer now (HTTP {status}).",
                reason="UPSTREAM_FAILED",
                metadata=known,
                retry_after_s=_delay(headers),
            )
        if status == 404 and param == "model":
            return FailedPrecondition(
                f"The upstream has no such model: {message}", reason="UPSTREAM_MODEL_UNKNOWN", metadata=known
            )
        if status in (400, 413, 422):
            field = _FIELDS.get(param, f"sampling.{param}" if param else "sampling")
            return invalid(
                [Violation(field, message or "is refused by the upstream")],
                f"The upstream refuses the request: {message or f'HTTP {status}'}",
                known,
            )
        return self.invalid(f"HTTP {status}{': ' + message if message else ''}", known)


def _reuse_trace() -> aiohttp.TraceConfig:
    """Sets the event passed with a request if its connection came from the pool."""

    async def reused(session: Any, context: Any, params: Any) -> None:
        context.trace_request_ctx.set()

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


def cut_off(text: str) -> Unavailable:
    """The error for an incomplete answer; its part is dropped, since the rest is unknown."""
    return Unavailable(f"The upstream broke off: {text}.", reason="UPSTREAM_CUT_OFF", retry_after_s=RETRY_S)


def too_large() -> FailedPrecondition:
    """The error for an answer beyond the size limit."""
    return FailedPrecondition(
        f"The upstream's answer has more than {MAX_ANSWER_BYTES >> 20} MiB.", reason="UPSTREAM_ANSWER_TOO_LARGE"
    )


def _unreachable(error: Exception) -> Unavailable:
    what = type(error).__name__.removeprefix("Client").removesuffix("Error")
    return Unavailable(
        f"The upstream cannot be reached ({what}): check base_url and that its server runs.",
        reason="UPSTREAM_UNREACHABLE",
        retry_after_s=RETRY_S,
    )


def _silent() -> Unavailable:
    return Unavailable(
        "The upstream sent nothing for idle_timeout_s.",
        reason="UPSTREAM_SILENT",
        retry_after_s=RETRY_S,
    )


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length up to the bound: the first event of a stream repeats the whole prompt."""
    rest = bytearray()
    async for chunk in answer.content.iter_any():
        seen = len(rest)
        rest += chunk
        if b"\n" not in chunk:
            if len(rest) > MAX_ANSWER_BYTES:
                raise too_large()
            continue
        cut = rest.rindex(b"\n", seen) + 1
        for line in bytes(rest[:cut]).splitlines():
            yield line
        del rest[:cut]
    if rest:
        yield bytes(rest)


def _error_message(value: Any, key: str | None) -> tuple[str, str]:
    """The error message in the forms that servers use, safe to show, without the key; and the parameter it names."""
    error = None
    if isinstance(value, dict):
        error = value.get("error", value.get("message", value.get("error_message")))
    param = ""
    if isinstance(error, dict):
        given = error.get("param")
        param = given if isinstance(given, str) and given.isidentifier() else ""
        error = error.get("message")
    if not isinstance(error, str):
        return "", param
    # Before shortening, which could leave an unrecognizable part of the key.
    return shown(error.replace(key, "[key]") if key else error), param


def shown(text: str) -> str:
    """Foreign text made safe: one line, printable, not long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_SHOWN]).split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _delay(headers: Mapping[str, str]) -> float:
    """Retry-After, in seconds or as a date; one second if absent."""
    text = headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time()
        except (ValueError, TypeError):
            return RETRY_S
    return min(max(seconds, 0.0), MAX_DELAY_S) if seconds == seconds else RETRY_S
