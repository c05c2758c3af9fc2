"""Agent keys: their content, and how they are made and verified without a lookup (R4, R5).

A key carries its id, scopes and expiry, and a MAC that also covers the rollout's id. A key that is invalid for a
rollout's address is thus refused by computation alone, in constant time. The journal has only the ids of a rollout's
keys, which are worthless without the signing key: no agent key is stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ID_BYTES: Final = 16
_PREFIX: Final = "pst_"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(">HHQ16s")
"""Version, scopes, expiry in ms since 1970 (0: none), id."""
_MAC_BYTES: Final = 32
_LENGTH: Final = len(_PREFIX) + (_HEAD.size + _MAC_BYTES) * 4 // 3  # 60 bytes: base64 without padding or spare bits


class Scope(StrEnum):
    """The permissions of an agent key."""

    COMPLETIONS = "completions"
    READ = "read"
    TOOLS = "tools"


ALL: Final = frozenset(Scope)
_BITS: Final = {Scope.COMPLETIONS: 1, Scope.READ: 2, Scope.TOOLS: 4}


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The terms of a requested key: no scopes means all; `ttl_s` None means valid while the rollout is open."""

    scopes: tuple[Scope, ...] = ()
    ttl_s: float | None = None


@dataclass(slots=True)
class AgentKey:
    """A rollout's agent key without its MAC. Times in ms since 1970.

    It is void from `dies_ms` on. A negative `dies_ms` means void for good since its absolute value: setting the clock
    back does not revive the key.
    """

    id: bytes
    scopes: frozenset[Scope]
    created_ms: int
    expires_ms: int | None = None
    dies_ms: int | None = None

    @property
    def ttl_ms(self) -> int | None:
        """The lifetime that it was issued with."""
        return None if self.expires_ms is None else self.expires_ms - self.created_ms

    @property
    def revoked_ms(self) -> int | None:
        """The time from which it is void; None if it was not revoked."""
        return None if self.dies_ms is None else abs(self.dies_ms)

    def retire(self, now_ms: int, after_ms: int) -> bool:
        """Makes it void after `after_ms`, unless it is void earlier; returns whether anything changed."""
        at_ms = now_ms + after_ms if after_ms > 0 else -now_ms
        if self.dies_ms is not None and (self.dies_ms < 0 or self.dies_ms <= at_ms):
            return False
        self.dies_ms = at_ms
        return True


@dataclass(frozen=True, slots=True)
class Claims:
    """The content of a verified key."""

    id: bytes
    scopes: frozenset[Scope]
    expires_ms: int | None


class KeySigner:
    """Makes and verifies agent keys with one signing key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, rollout_id: str, grant: AgentKey) -> str:
        """Returns the text of a key; deterministic."""
        bits = sum(_BITS[scope] for scope in grant.scopes)
        head = _HEAD.pack(_VERSION, bits, grant.expires_ms or 0, grant.id)
        return _PREFIX + base64.urlsafe_b64encode(head + self._mac(rollout_id, head)).decode()

    def read(self, rollout_id: str, token: str) -> Claims | None:
        """Returns the content of a key for this rollout; None if it was not made here for this rollout."""
        if len(token) != _LENGTH or not token.startswith(_PREFIX) or not token.isascii():
            return None
        try:
            data = base64.b64decode(token[len(_PREFIX) :].encode(), altchars=b"-_", validate=True)
        except binascii.Error:
            return None
        head, mac = data[: _HEAD.size], data[_HEAD.size :]
        if not hmac.compare_digest(mac, self._mac(rollout_id, head)):
            return None
        _, bits, expires, id_ = _HEAD.unpack(head)
        scopes = frozenset(scope for scope, bit in _BITS.items() if bits & bit)
        return Claims(id_, scopes, expires or None)

    def derived_id(self, rollout_id: str, request_id: str) -> bytes:
        """Returns the id of the key that a request issues; the same for a repeated request."""
        return self._digest(f"token id\0{rollout_id}\0{request_id}".encode())[:ID_BYTES]

    def _mac(self, rollout_id: str, head: bytes) -> bytes:
        return self._digest(b"token\0" + rollout_id.encode(errors="replace") + b"\0" + head)

    def _digest(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)
