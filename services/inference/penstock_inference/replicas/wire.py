"""The messages between the service and a replica's process, and their encoding.

Both are one program: the service starts the process and holds the other end of an unnamed socket pair that no other
process can open. So messages may be pickled: none comes from anywhere else.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock_chassis import errors
from penstock_chassis.errors import Internal, PenstockError, Violation
from penstock_inference.domain.engine_info import EngineInfo, EngineStats
from penstock_inference.domain.weights import UpdateFormat
from penstock_inference.engines.base import EngineOptions

_LENGTH = struct.Struct("!I")
_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not PenstockError
}


@dataclass(frozen=True, slots=True)
class Open:
    """The first message to a replica: its engine. `level` and `style` are its log's."""

    engine: str
    options: EngineOptions
    level: Literal["debug", "info", "warning", "error"]
    style: Literal["json", "console"]


@dataclass(frozen=True, slots=True)
class Ready:
    """The first response if the engine opened; otherwise it is a `Failed`."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Call:
    """A call; answered by `Answer` or `Failed` with the same number, a generation by one `Answer` per event."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels a call whose caller no longer waits."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, or an event of a generation."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's current counters."""

    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """A `PenstockError` in a form that can be pickled."""

    number: int
    kind: str
    message: str
    reason: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None

    @classmethod
    def of(cls, number: int, error: PenstockError) -> Failed:
        """The message for an error."""
        kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS), Internal.__name__)
        return cls(
            number,
            kind,
            error.message,
            error.reason,
            dict(error.metadata),
            error.violations,
            error.retry_after_s,
        )

    def error(self) -> PenstockError:
        return _KINDS[self.kind](
            self.message,
            reason=self.reason,
            metadata=self.metadata,
            violations=self.violations,
            retry_after_s=self.retry_after_s,
        )


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file that stays in place, and the names of its tensors to use."""

    path: Path
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """An update to stage: its files in the order in which they arrived."""

    version: int
    label: str
    update_format: UpdateFormat
    files: tuple[WeightFile, ...]


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message; a caller that sends many waits for `writer.drain` between them."""
    data = pickle.dumps(message, protocol=5)
    writer.write(_LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the peer is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))  # noqa: S301 - see the module's docstring
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
