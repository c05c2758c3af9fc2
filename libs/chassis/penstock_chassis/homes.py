"""A service's own name, the ids that it makes, and requests that belong to another service of its kind.

The name is the `name` setting, or made at the first start and kept in the state directory. All names that the state
directory has had are the service's own: ids made under an earlier one stay valid.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.values import ids, routes
from penstock_chassis.errors import FailedPrecondition

MAX_REPLICAS: Final = 1000
"""The most processes that share a state directory."""
_FILE: Final = "names"
_TAKEN: Final = "replica.lock"
# Random bytes are read for many ids at once: each read releases the GIL, which a waiting thread then takes.
_AT_ONCE: Final = 256

# Popping one and adding more are atomic, so this is thread-safe.
_stock: deque[str] = deque()
os.register_at_fork(after_in_child=_stock.clear)


@dataclass(frozen=True, slots=True)
class Home:
    """One service among those of its kind.

    Attributes:
        service: "driver", "sandbox", "interception" or "inference".
        name: its own; in new ids and in records.
        former: names that it had.
        peers: addresses of others of its kind, by name.
    """

    service: str
    name: str
    former: frozenset[str] = frozenset()
    peers: Mapping[str, str] = field(default_factory=dict)

    def new_id(self, kind: str) -> str:
        """Returns a new id that names this service; see `penstock.values.ids`."""
        return ids.make(kind, self.name, random_id())

    def check(self, method: str, request: Any) -> None:
        """Checks the ids that route a request.

        Raises:
            FailedPrecondition: `HOME_ELSEWHERE`: another service made one of them. The metadata has its name as `home`,
                and its `address` if this service's `peers` have it.
        """
        for _, value in routes.headers(method, request):
            found = ids.home_of(value)
            if found is None or found[0] != self.service or found[1] == self.name or found[1] in self.former:
                continue
            address = self.peers.get(found[1], "")
            message = f"The {self.service} service {found[1]!r} has this, not {self.name!r}"
            raise FailedPrecondition(
                f"{message}: send the request to {address}." if address else f"{message}, whose `peers` lack it.",
                reason="HOME_ELSEWHERE",
                metadata={"home": found[1]} | ({"address": address} if address else {}),
            )


def open_home(service: str, name: str, peers: Mapping[str, str], state_dir: Path) -> Home:
    """Returns the home of a service, and records its name in the state directory.

    Args:
        service: see Home.
        name: its `name` setting. Empty = the latest recorded name, or a new one.
        peers: its `peers` setting.
        state_dir: its state directory, which no other service uses.
    """
    file = state_dir / _FILE
    known = file.read_text(encoding="ascii").split() if file.exists() else []
    own = name or (known[-1] if known else f"{service[0]}{secrets.token_hex(4)}")
    if not known or known[-1] != own:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = [item for item in known if item != own] + [own]
        partial = file.with_suffix(".new")
        partial.write_text("\n".join(known) + "\n", encoding="ascii")
        partial.replace(file)
    return Home(service, own, frozenset(known) - {own}, dict(peers))


class StateDir:
    """The state directory of one of several replicas, which no other takes until `close` or the end of the process.

    A replica that is made anew takes a directory that is free, and so the name and the work of one that is gone.
    """

    def __init__(self, shared: Path) -> None:
        """Takes the first free one of `shared` and its `replica-N`.

        Raises FailedPrecondition (STATE_DIRS_IN_USE); OSError on disk errors.
        """
        for place in (shared, *(shared / f"replica-{number}" for number in range(1, MAX_REPLICAS))):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(place / _TAKEN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                continue
            self.path = place
            return
        raise FailedPrecondition(
            f"{MAX_REPLICAS} other processes use {shared}: stop one, or use another state_dir.",
            reason="STATE_DIRS_IN_USE",
        )

    def close(self) -> None:
        """Gives the directory back."""
        os.close(self._lock)


def valid_name(value: str) -> str:
    """Returns a service's name. Raises ValueError."""
    if value and not re.fullmatch(ids.NAME, value):
        raise ValueError("must be 1 to 32 of a-z, 0-9 and -, and not begin with -")
    return value


def random_id() -> str:
    """128 random bits as 32 hexadecimal digits, as good as those of `secrets` and never returned twice."""
    try:
        return _stock.popleft()
    except IndexError:
        digits = os.urandom(16 * _AT_ONCE).hex()
        _stock.extend(digits[at : at + 32] for at in range(32, len(digits), 32))
        return digits[:32]
