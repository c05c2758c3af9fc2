"""The beginning of each connection to the proxy: whose it is, and what that sandbox may reach.

The service writes it, never the sandbox: the proxy keeps no list of sandboxes, and a narrowed policy counts from the
next connection on, since the service cuts the others.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Final

_SIZE_BYTES: Final = 4
_MAX_BYTES: Final = 1024 * 1024
"""More than the longest list has, with an operator's longest `egress_hosts`."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """``recording`` is unique over namespaces. ``shared``: other sandboxes use it too."""

    sandbox_id: str
    recording: str
    hosts: tuple[str, ...]
    denied_hosts: tuple[str, ...]
    ports: tuple[int, ...]
    recorded_only: bool
    shared: bool = False

    def encoded(self) -> bytes:
        """Returns it as sent: its size, and JSON."""
        content = json.dumps(asdict(self)).encode()
        return len(content).to_bytes(_SIZE_BYTES) + content


async def received(reader: asyncio.StreamReader) -> Greeting:
    """Returns the greeting of a connection.

    Raises IncompleteReadError; ValueError, TypeError or KeyError: its writer is no service of ours.
    """
    size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
    if size > _MAX_BYTES:
        raise ValueError(f"a greeting has at most {_MAX_BYTES} bytes, not {size}")
    fields = json.loads(await reader.readexactly(size))
    return Greeting(
        sandbox_id=fields["sandbox_id"],
        recording=fields["recording"],
        hosts=tuple(fields["hosts"]),
        denied_hosts=tuple(fields["denied_hosts"]),
        ports=tuple(fields["ports"]),
        recorded_only=fields["recorded_only"],
        shared=fields["shared"],
    )
