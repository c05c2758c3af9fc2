"""The first line of each connection to the proxy: whose it is, and what that sandbox may reach.

The service writes it, never the sandbox: the proxy keeps no list of sandboxes, and a narrowed policy counts from the
next connection on, since the service cuts the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

MAX_BYTES: Final = 64 * 1024


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

    def line(self) -> bytes:
        """Returns it as sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def parsed(line: bytes) -> Greeting:
    """Returns the greeting of a line. Raises ValueError, TypeError or KeyError: its writer is no service of ours."""
    fields = json.loads(line)
    return Greeting(
        sandbox_id=fields["sandbox_id"],
        recording=fields["recording"],
        hosts=tuple(fields["hosts"]),
        denied_hosts=tuple(fields["denied_hosts"]),
        ports=tuple(fields["ports"]),
        recorded_only=fields["recorded_only"],
        shared=fields["shared"],
    )
