"""Allow-lists of hosts: what a name or an address matches, and whether one list is within another (R141).

Invariants: a pattern is a name (`pypi.org`), every name below one (`*.pythonhosted.org`), a CIDR block, or `*`, every
name; what is malformed matches nothing; decisions use the written host alone, never a name server. Of two patterns that
match a common host, one covers the other.

A list allows what `hosts` matches and `denied_hosts` does not. Without `hosts` it allows what the operator does, but
what is denied. `*` matches no address, or a name that is denied would be reached by its address; an operator's `*`
permits lists to name any.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

ANY: Final = "*"
MOST: Final = 256
"""Entries of a list, and as many that are denied."""
_SHOWN: Final = 80
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""What resolvers take for a part of an address, in last place."""
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
    return len(host) <= 253 and all(map(_LABEL.fullmatch, labels)) and not _NUMBER.fullmatch(labels[-1])


def is_pattern(pattern: str) -> bool:
    """Whether this names some hosts: it is well-formed, and not `*`."""
    return block(pattern) is not None or is_name(pattern.removeprefix("*."))


def problems(allowed: Sequence[str], denied: Sequence[str]) -> Iterator[tuple[str, int | None, str]]:
    """Yields what is wrong with a list: the field (`hosts` or `denied_hosts`), the entry's index if any, and why."""
    if not (allowed or denied):
        yield "hosts", None, "name at least one host; or name denied_hosts, for all that the operator allows but these"
    for field, patterns in (("hosts", allowed), ("denied_hosts", denied)):
        if len(patterns) > MOST:
            yield field, None, f"at most {MOST} entries are possible"
            continue
        for index, pattern in enumerate(patterns):
            if not is_pattern(pattern) and not (pattern == ANY and field == "hosts"):
                any_too = ', or "*" for every name' if field == "hosts" else ""
                why = f'expected "name", "*.name" (in lower case) or a CIDR block{any_too}'
                yield field, index, f"{pattern[:_SHOWN]!r}: {why}"


def covers(wide: str, narrow: str) -> bool:
    """Whether all that the pattern ``narrow`` matches is matched by ``wide``."""
    if wide == narrow:
        return True
    outer, inner = block(wide), block(narrow)
    if wide == ANY:
        return inner is None
    if outer is not None or inner is not None:
        return (
            outer is not None and inner is not None and outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]
        )
    return wide.startswith("*.") and narrow.removeprefix("*.").endswith(wide[1:])


def uncovered(narrow: Iterable[str], wide: Sequence[str]) -> list[str]:
    """Returns those patterns of ``narrow`` that no pattern of ``wide`` covers."""
    return [pattern for pattern in narrow if not any(covers(outer, pattern) for outer in wide)]


def not_permitted(allowed: Iterable[str], operators: Sequence[str]) -> list[str]:
    """Returns those patterns of a list that the operator's do not permit it to name."""
    return [] if ANY in operators else uncovered(allowed, operators)


def is_narrower(
    allowed: Sequence[str], denied: Sequence[str], allowed_before: Sequence[str], denied_before: Sequence[str]
) -> bool:
    """Whether a list allows no host that another one does not; false also if no single pattern shows it."""
    if uncovered(allowed, allowed_before):
        return False
    still = [pattern for pattern in denied_before if any(_overlap(pattern, one) for one in allowed)]
    return not uncovered(still, denied)


def _overlap(one: str, other: str) -> bool:
    return covers(one, other) or covers(other, one)


def matches(host: str, patterns: Iterable[str]) -> bool:
    """Whether a host as a request writes it, a name in lower case or an address, matches a pattern."""
    written = address(host)
    if written is not None:
        return any(found is not None and written in found for found in map(block, patterns))
    return any(_names(pattern, host) for pattern in patterns)


def _names(pattern: str, host: str) -> bool:
    if pattern == ANY:
        return is_name(host)
    return block(pattern) is None and (pattern == host or (pattern.startswith("*.") and host.endswith(pattern[1:])))
