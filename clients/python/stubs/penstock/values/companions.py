"""The rules of a sandbox's companions, for clients and services alike.

Invariants: each rule needs the list alone; what a backend or an operator allows is decided elsewhere.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.sandbox.v1 import sandbox_pb2
from penstock.values.times import seconds

MOST: Final = 8
MOST_ALIASES: Final = 16
MOST_VARIABLES: Final = 256
MOST_BYTES: Final = 64 * 1024
"""Of one companion, as a message."""
MOST_TIMEOUT_S: Final = 300.0
MOST_RETRIES: Final = 1000
RESERVED: Final = frozenset({"localhost", "sandbox"})
"""Names that lead to the sandbox itself."""

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ALIAS: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ADDRESS: Final = re.compile(r"[0-9.]+")
_LARGEST_S: Final = 86_400.0


def problems(companions: Sequence[sandbox_pb2.Companion]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong: the field, such as `[0].name` (empty: the list itself), and the reason."""
    if len(companions) > MOST:
        yield "", f"must be at most {MOST}"
        return
    before: set[str] = set()
    for index, companion in enumerate(companions):
        here = f"[{index}]"
        if not _NAME.fullmatch(companion.name) or _ADDRESS.fullmatch(companion.name):
            yield f"{here}.name", "must be lower-case letters, digits and '-', at most 63, and not only digits"
        elif companion.name in RESERVED:
            yield f"{here}.name", f"must not be {companion.name}, which is the sandbox itself"
        elif companion.name in before:
            yield f"{here}.name", f"{companion.name} is used twice"
        yield from _one(companion, here, before)
        before.add(companion.name)


def _one(companion: sandbox_pb2.Companion, here: str, before: set[str]) -> Iterator[tuple[str, str]]:
    if companion.ByteSize() > MOST_BYTES:
        yield here, f"must have at most {MOST_BYTES} bytes"
        return
    if len(companion.aliases) > MOST_ALIASES:
        yield f"{here}.aliases", f"must be at most {MOST_ALIASES}"
    for alias in companion.aliases:
        if not _ALIAS.fullmatch(alias) or _ADDRESS.fullmatch(alias) or alias in RESERVED:
            yield f"{here}.aliases", f"{alias!r} is not the name of a host, or is the sandbox's own"
    if not companion.image:
        yield f"{here}.image", "is required"
    for name in ("image", "user", "workdir"):
        if not _plain(getattr(companion, name)):
            yield f"{here}.{name}", "must not have NUL or line breaks in it"
    if companion.workdir and not companion.workdir.startswith("/"):
        yield f"{here}.workdir", "must be an absolute path"
    check = companion.health_check
    for name, words in (
        ("entrypoint", companion.entrypoint),
        ("command", companion.command),
        ("health_check.argv", check.argv),
    ):
        if any("\0" in word for word in words):
            yield f"{here}.{name}", "must not have NUL in it"
        elif words and not words[0] and name != "command":
            yield f"{here}.{name}", "must begin with a program"
    yield from _variables(companion.env, here)
    yield from _times(check, f"{here}.health_check")
    for limit, amount in companion.resources.ListFields():
        if not (math.isfinite(amount) and amount > 0):
            yield f"{here}.resources.{limit.name}", "must be a positive number"
    for name in companion.after:
        if name not in before:
            yield f"{here}.after", f"{name!r} is not a companion that comes before it in the list"


def _plain(text: str) -> bool:
    return not any(sign in text for sign in "\0\r\n")


def _variables(env: Mapping[str, str], here: str) -> Iterator[tuple[str, str]]:
    if len(env) > MOST_VARIABLES:
        yield f"{here}.env", f"must be at most {MOST_VARIABLES} variables"
    if any(not name or "=" in name or not _plain(name) or "\0" in value for name, value in env.items()):
        yield f"{here}.env", "a name is empty or has '=', or a name or value has a NUL byte"


def _times(check: sandbox_pb2.HealthCheck, here: str) -> Iterator[tuple[str, str]]:
    if check.HasField("start_period") and not 0 <= seconds(check.start_period) <= _LARGEST_S:
        yield f"{here}.start_period", f"must be 0 to {_LARGEST_S:g} s"
    if check.HasField("interval") and not 0 < seconds(check.interval) <= _LARGEST_S:
        yield f"{here}.interval", f"must be more than 0 and at most {_LARGEST_S:g} s"
    if check.HasField("timeout") and not 0 < seconds(check.timeout) <= MOST_TIMEOUT_S:
        yield f"{here}.timeout", f"must be more than 0 and at most {MOST_TIMEOUT_S:g} s"
    if check.HasField("retries") and not 1 <= check.retries <= MOST_RETRIES:
        yield f"{here}.retries", f"must be 1 to {MOST_RETRIES}"
