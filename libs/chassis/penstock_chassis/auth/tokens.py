"""Authenticates callers.

A caller sends a bearer token in the metadata key `authorization`. A token belongs to one role and, unless it is an
operator's, to one namespace. The decision is made before the request is read (R5).
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from penstock_chassis.auth.callers import DEFAULT_NAMESPACE, NAMESPACE_HEADER, Caller, is_namespace
from penstock_chassis.auth.roles import Role
from penstock_chassis.errors import InvalidArgument, PermissionDenied, Unauthenticated

HEADER: Final = "authorization"
"""Metadata key of the token: `Bearer <token>`."""

HEALTH: Final = frozenset({"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"})
"""The methods without a credential: they report liveness and nothing else (R7). gRPC's load balancers send none."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token and what it proves. The namespace of an operator's is ignored: an operator may act in every one."""

    role: Role
    namespace: str
    secret: str = field(repr=False)


class Authenticator:
    """Authenticates a call's metadata and returns its caller.

    Tokens are kept as SHA-256 digests. Every comparison takes the same time, and all are made (no early exit).

    Args:
        tokens: a token per role, for the default namespace; roles without a token cannot be used. Raises ValueError for
            a blank token (R3), or one given twice.
        more: the tokens of other namespaces.
        anonymous: treat callers without a token as operator. A wrong token is still refused.
    """

    __slots__ = ("_anonymous", "_digests")

    def __init__(self, tokens: Mapping[Role, str], *, more: Iterable[Token] = (), anonymous: bool = False) -> None:
        known = [*(Token(role, DEFAULT_NAMESPACE, secret) for role, secret in tokens.items()), *more]
        if any(not token.secret.strip() for token in known):
            raise ValueError("a token must not be blank")
        if len({token.secret for token in known}) != len(known):
            raise ValueError("two roles or namespaces have the same token")
        if not known and not anonymous:
            raise ValueError("neither a token nor anonymous is set: no caller could authenticate")
        self._digests = [(token, sha256(token.secret.encode()).digest()) for token in known]
        self._anonymous = anonymous

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Returns the caller that the metadata proves.

        Raises:
            Unauthenticated: `CREDENTIAL_MISSING` without a token; `CREDENTIAL_INVALID` for a token that is malformed,
                sent twice or unknown.
            PermissionDenied: `NAMESPACE_NOT_ALLOWED` if the token belongs to another namespace than the one named.
            InvalidArgument: `NAMESPACE_INVALID` for a namespace that is malformed or named twice.
        """
        metadata = list(metadata)
        values = [value for key, value in metadata if key == HEADER]
        named = [str(value) for key, value in metadata if key == NAMESPACE_HEADER]
        if not values:
            if self._anonymous:
                return _as_operator(named)
            raise Unauthenticated(
                "A token is needed: send the metadata `authorization: Bearer <token>`.", reason="CREDENTIAL_MISSING"
            )
        scheme, _, secret = str(values[0]).partition(" ")
        found: Token | None = None
        digest = sha256(secret.encode("utf-8", errors="replace")).digest()
        for token, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = token
        if found is None or len(values) > 1 or scheme.lower() != "bearer":
            raise Unauthenticated("The token is invalid for this service.", reason="CREDENTIAL_INVALID")
        if found.role is Role.OPERATOR:
            return _as_operator(named)
        if named not in ([], [found.namespace]):
            raise PermissionDenied(
                f"The token belongs to another namespace than {NAMESPACE_HEADER} names. Use a token of that "
                "namespace, or leave the header out.",
                reason="NAMESPACE_NOT_ALLOWED",
            )
        return Caller(found.role, found.namespace)


def _as_operator(named: list[str]) -> Caller:
    if not named:
        return Caller(Role.OPERATOR, None)
    if len(named) > 1 or not is_namespace(named[0]):
        raise InvalidArgument(
            f"{NAMESPACE_HEADER} must be one namespace: 1 to 63 of a-z, 0-9 and -, the first a letter or digit.",
            reason="NAMESPACE_INVALID",
        )
    return Caller(Role.OPERATOR, named[0])
