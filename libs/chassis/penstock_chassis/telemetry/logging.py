"""Structured logs: one JSON object per line on standard error (standard output is for programs that read addresses).

Call `configure` once per process, then `structlog.get_logger()` anywhere, with facts as keyword arguments:
`log.info("sandbox created", sandbox_id=id)`. Ids bound with `telemetry.bound` are on every line of the task. Values of
keys that look like secrets are masked whatever the caller passes (R8), and so are fields of messages that the protos
mark as secret. Bodies are never logged at info or above; that is the caller's duty.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TextIO, cast

import orjson
import structlog
from google.protobuf.message import Message
from structlog.typing import EventDict, Processor, WrappedLogger

from penstock.values import redacted
from penstock_chassis.telemetry import bound

MASK: Final = "***"

_SECRET_KEY: Final = re.compile(
    r"(?:^|_)(?:authorization|bearer|cookie|credentials?|passw(?:or)?d|passphrase|private_key|secrets?|secret_env|token"
    r"|api_?key)$"
)
_DEPTH: Final = 6
_PLAIN: Final = frozenset({str, int, float, bool})
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    style: Literal["json", "console"] = "json",
    *,
    stream: TextIO | None = None,
) -> None:
    """Sets up structlog for the process.

    Args:
        level: least severe level that is written; a call below it costs a method call.
        style: "json" for machines, "console" for people.
        stream: where lines go; standard error by default.
    """
    out = stream if stream is not None else sys.stderr
    shared: list[Processor] = [
        bound.merge,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    last: list[Processor]
    if style == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_dump)]
    else:
        # Its own choice shows each frame's variables, with keys and bodies, and takes seconds where those are large.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Enduring(out))),
        cache_logger_on_first_use=True,
    )


class _Enduring:
    """A stream wrapper that drops and counts lines that cannot be written (a full disk): the logging work goes on, and
    the next line that can be written reports how many were lost.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lost = 0

    def write(self, line: str) -> int:
        """As a stream's `write`."""
        try:
            if self._lost:
                entry = {"event": "log lines were lost", "level": "warning", "lost": self._lost}
                self._out.write(orjson.dumps(entry).decode() + "\n")
                self._out.flush()
                self._lost = 0
            return self._out.write(line)
        except OSError:
            self._lost += 1
            return len(line)

    def flush(self) -> None:
        """As a stream's `flush`."""
        try:
            self._out.flush()
        except OSError:
            self._lost += 1


@dataclass(slots=True)
class Meter:
    """Rate-limits lines that callers can provoke: at most `burst` at once, then one in `interval_s`. Lines left out are
    counted, and the next line reports the count.

    Args:
        burst: lines that may be written at once.
        interval_s: seconds for each further one.
    """

    burst: int
    interval_s: float
    _level: float = field(init=False)
    _at: float | None = field(init=False, default=None)
    _left_out: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._level = float(self.burst)

    def allows(self, now: float) -> bool:
        """Whether a line may be written; `now` is in seconds, of a monotonic clock."""
        if self._at is not None:
            self._level = min(float(self.burst), self._level + (now - self._at) / self.interval_s)
        self._at = now
        if self._level < 1.0:
            self._left_out += 1
            return False
        self._level -= 1.0
        return True

    def left_out(self) -> int:
        """Returns how many lines were left out, for the line that is written now."""
        count, self._left_out = self._left_out, 0
        return count


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Masks the values of keys that name a secret, and the secrets of messages, in nested mappings and lists too."""
    return {key: _masked(key, value, _DEPTH) for key, value in event.items()}


def _masked(key: str, value: object, depth: int) -> object:
    if value is not None and _names_secret(key):
        return MASK
    if type(value) in _PLAIN:
        return value  # most are, and the Mapping check is slow
    if isinstance(value, Mapping) and depth:
        return {str(k): _masked(str(k), v, depth - 1) for k, v in value.items()}
    if isinstance(value, Message):
        return redacted(value)
    if isinstance(value, list | tuple) and depth:
        return [_masked("", item, depth - 1) for item in value]
    return value


@functools.lru_cache(maxsize=4096)
def _names_secret(key: str) -> bool:
    return _SECRET_KEY.search(key.lower().replace("-", "_")) is not None


def _dump(event: EventDict, **_options: Callable[..., Any]) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
