"""Authenticates callers and decides what each role may call.

A caller sends a bearer token in the metadata key `authorization`. Each token belongs to one role; each service has a
table of the roles that may call each method. The decision is made before the request is read (R5). An operator may call
everything. A method that is missing from the table is for operators only, so a forgotten line denies access.
"""

import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import Final

from penstock_chassis.errors import PermissionDenied, Unauthenticated

HEADER: Final = "authorization"
"""Metadata key of the token: `Bearer <token>`."""

HEALTH: Final = frozenset({"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"})
"""The methods without a credential: they report liveness and nothing else (R7). gRPC's load balancers send none."""


class Role(StrEnum):
    """What a caller may do; each service's role table has the details."""

    OPERATOR = "operator"
    TRAINER = "trainer"
    OBSERVER = "observer"


_OPERATOR_ONLY: Final = frozenset({Role.OPERATOR})


class RoleTable:
    """Which roles may call which method.

    Keys are `package.Service` for all methods of a service or `package.Service/Method` for one, which then wins.
    """

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[str, Iterable[Role]]) -> None:
        self._table = {key.removeprefix("/"): frozenset({*roles, Role.OPERATOR}) for key, roles in table.items()}

    def allowed(self, method: str) -> frozenset[Role]:
        """The roles that may call `method`, given as `/package.Service/Method` or without the first slash."""
        name = method.removeprefix("/")
        roles = self._table.get(name)
        if roles is None:
            roles = self._table.get(name.partition("/")[0], _OPERATOR_ONLY)
        return roles

    def unknown(self, methods: Iterable[str]) -> list[str]:
        """The keys that match no method of the server: misspellings, to be refused at start."""
        known = {method.removeprefix("/") for method in methods}
        known |= {method.partition("/")[0] for method in known}
        return sorted(self._table.keys() - known)


class Authenticator:
    """Authenticates a call's metadata and returns its caller's role.

    Tokens are kept as SHA-256 digests. Every comparison takes the same time, and all are made (no early exit).

    Args:
        tokens: a token per role; roles without a token cannot be used. Raises ValueError for a blank token (R3).
        anonymous: treat callers without a token as operator. A wrong token is still refused.
    """

    __slots__ = ("_anonymous", "_digests")

    def __init__(self, tokens: Mapping[Role, str], *, anonymous: bool = False) -> None:
        if any(not token.strip() for token in tokens.values()):
            raise ValueError("a token must not be blank")
        if not tokens and not anonymous:
            raise ValueError("neither a token nor anonymous is set: no caller could authenticate")
        self._digests = [(role, sha256(token.encode()).digest()) for role, token in tokens.items()]
        self._anonymous = anonymous

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Role:
        """Returns the role that the metadata proves.

        Raises:
            Unauthenticated: `CREDENTIAL_MISSING` without a token; `CREDENTIAL_INVALID` for a token that is malformed,
                sent twice or unknown.
        """
        values = [value for key, value in metadata if key == HEADER]
        if not values:
            if self._anonymous:
                return Role.OPERATOR
            raise Unauthenticated(
                "A token is needed: send the metadata `authorization: Bearer <token>`.", reason="CREDENTIAL_MISSING"
            )
        scheme, _, token = str(values[0]).partition(" ")
        found: Role | None = None
        digest = sha256(token.encode("utf-8", errors="replace")).digest()
        for role, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = role
        if found is None or len(values) > 1 or scheme.lower() != "bearer":
            raise Unauthenticated("The token is invalid for this service.", reason="CREDENTIAL_INVALID")
        return found


def authorize(role: Role, method: str, table: RoleTable) -> None:
    """Raises PermissionDenied `ROLE_NOT_ALLOWED` if `role` may not call `method`."""
    if role not in table.allowed(method):
        raise PermissionDenied(f"The role {role} may not call this method.", reason="ROLE_NOT_ALLOWED")
