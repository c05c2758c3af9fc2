"""What a sandbox could reach: the addresses of this host, and a script that an agent runs to try them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

METADATA: Final = "169.254.169.254"
"""Where clouds tell a machine's credentials to whoever asks from inside."""

AGENT_PORT: Final = 7780
"""Where the agent finds its one endpoint, in the driver's default settings."""


def host_addresses() -> list[str]:
    """Every IPv4 address of this host's interfaces."""
    found: set[str] = set()
    address = ""
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        if match := re.search(r"[-|]-- (\d+\.\d+\.\d+\.\d+)", line):
            address = match[1]
        elif "/32 host LOCAL" in line:
            found.add(address)
    return sorted(found)


def targets(ports: Iterable[int]) -> list[tuple[str, int]]:
    """Every address of this host with every one of `ports`, and the metadata address."""
    return [(address, port) for address in host_addresses() for port in sorted(ports)] + [(METADATA, 80)]


def probe_script(where: Iterable[tuple[str, int]]) -> str:
    """A bash script: `open ADDRESS PORT` for whatever takes a connection, then what listens and what interfaces are."""
    tries = "\n".join(f"try {address} {port}" for address, port in where)
    return f"""
try() {{ (exec 3<>/dev/tcp/$1/$2) 2>/dev/null && echo "open $1 $2" || echo "closed $1 $2"; }}
{tries}
while read -r _ local _ state _; do [ "$state" = 0A ] && echo "listens $((16#${{local##*:}}))"; done < /proc/net/tcp
while read -r _ local _ state _; do [ "$state" = 0A ] && echo "listens $((16#${{local##*:}}))"; done < /proc/net/tcp6
while read -r name _; do case "$name" in *:*) echo "interface ${{name%%:*}}";; esac; done < /proc/net/dev
"""


def said(report: str, word: str) -> list[str]:
    """What follows `word` on the lines of the script's report that begin with it."""
    return [line.removeprefix(word + " ") for line in report.splitlines() if line.startswith(word + " ")]
