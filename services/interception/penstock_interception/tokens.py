"""Tokens by which an agent is known: what one says, and how it is made and read without looking anything up (R4, R5).

A token carries its own id, scope and expiry under a MAC that covers the rollout's id too, so that one which is not good
for the address it came to is refused by computing alone, in constant time. What a rollout's tokens are is kept by their
ids, which are worth nothing without the key: no token is stored.
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
    """What a token's holder may do."""

    COMPLETIONS = "completions"
    READ = "read"
    TOOLS = "tools"


ALL: Final = frozenset(Scope)
_BITS: Final = {Scope.COMPLETIONS: 1, Scope.READ: 2, Scope.TOOLS: 4}


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a token is wanted for: no scopes are all of them; None lives as long as the rollout is open."""

    scopes: tuple[Scope, ...] = ()
    ttl_s: float | None = None


@dataclass(slots=True)
class Grant:
    """A token of a rollout, less its MAC. Times in ms since 1970; it is void from `dies_ms` on."""

    id: bytes
    scopes: frozenset[Scope]
    created_ms: int
    expires_ms: int | None = None
    dies_ms: int | None = None

    @property
    def ttl_ms(self) -> int | None:
        """How long it was made for."""
        return None if self.expires_ms is None else self.expires_ms - self.created_ms

    def retire(self, at_ms: int) -> bool:
        """Makes it void from then on, unless it is sooner; returns whether that changed anything."""
        if self.dies_ms is not None and self.dies_ms <= at_ms:
            return False
        self.dies_ms = at_ms
        return True


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says that was made here."""

    id: bytes
    scopes: frozenset[Scope]
    expires_ms: int | None


class TokenKey:
    """Makes and reads tokens under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, rollout_id: str, grant: Grant) -> str:
        """The token of a grant: always the same."""
        bits = sum(_BITS[scope] for scope in grant.scopes)
        head = _HEAD.pack(_VERSION, bits, grant.expires_ms or 0, grant.id)
        return _PREFIX + base64.urlsafe_b64encode(head + self._mac(rollout_id, head)).decode()

    def read(self, rollout_id: str, token: str) -> Claims | None:
        """What a token for this rollout says; None when it was not made here, or not for this rollout."""
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
        """The id of the token that a request asks for: the same whenever it is repeated."""
        return self._digest(f"token id\0{rollout_id}\0{request_id}".encode())[:ID_BYTES]

    def _mac(self, rollout_id: str, head: bytes) -> bytes:
        return self._digest(b"token\0" + rollout_id.encode(errors="replace") + b"\0" + head)

    def _digest(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)
