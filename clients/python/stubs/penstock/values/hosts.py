"""Allow-lists of hosts: what a name or an address matches, and whether one list is within another (R141).

Invariants: a pattern is a name (`pypi.org`), every name below one (`*.pythonhosted.org`), a CIDR block, or `*`, which
is for operators; what is malformed matches nothing; decisions use the written host alone, never a name server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

ANY: Final = "*"
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Block = ipaddress.IPv4Network | ipaddress.IPv6Network


def block(pattern: str) -> Block | None:
    """Returns a pattern's CIDR block, or that of one address; None for a name."""
    try:
        return ipaddress.ip_network(pattern)
    except ValueError:
        return None


def address(host: str) -> Address | None:
    """Returns the address that a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_name(host: str) -> bool:
    """Whether a host is a well-formed name in lower case."""
    labels = host.split(".")
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()


def is_pattern(pattern: str) -> bool:
    """Whether an allow-list may have this entry."""
    return block(pattern) is not None or is_name(pattern.removeprefix("*."))


def covers(wide: str, narrow: str) -> bool:
    """Whether all that the pattern ``narrow`` matches is matched by ``wide``."""
    if wide in (ANY, narrow):
        return True
    outer, inner = block(wide), block(narrow)
    if outer is not None or inner is not None:
        return (
            outer is not None and inner is not None and outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]
        )
    return wide.startswith("*.") and narrow.removeprefix("*.").endswith(wide[1:])


def uncovered(narrow: Iterable[str], wide: Sequence[str]) -> list[str]:
    """Returns those patterns of ``narrow`` that no pattern of ``wide`` covers."""
    return [pattern for pattern in narrow if not any(covers(outer, pattern) for outer in wide)]


def matches(host: str, patterns: Iterable[str]) -> bool:
    """Whether a host as a request writes it, a name in lower case or an address, matches a pattern."""
    written = address(host)
    for pattern in patterns:
        found = block(pattern)
        if written is not None:
            if pattern == ANY or (found is not None and written in found):
                return True
        elif found is None and (pattern in (ANY, host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))):
            return True
    return False
