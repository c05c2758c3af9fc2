"""Who calls, and in which namespace. A namespace separates teams that share services (R107).

Every resource belongs to the namespace in which it was made. A token of a trainer or observer belongs to one namespace
and reaches nothing else. An operator may name a namespace in the metadata, and then acts as if the token belonged to
it. An operator who names none reaches every resource by its id; lists, watches and selections are of the default
namespace even then, unless the request asks for all explicitly.

While an RPC is served, `caller` is its caller. A call to another service carries the namespace that is bound to the
task (`acting_in`), so that what is made there belongs to the same namespace.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from penstock_chassis.auth.roles import Role
from penstock_chassis.errors import PermissionDenied, ResourceExhausted

DEFAULT_NAMESPACE: Final = "default"
"""The namespace of tokens and resources for which none is named."""

NAMESPACE_HEADER: Final = "x-penstock-namespace"
"""Metadata key of the namespace in which an operator acts."""

_NAMESPACE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def is_namespace(word: str) -> bool:
    """Returns whether this can be a namespace's name."""
    return _NAMESPACE.fullmatch(word) is not None


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller; `namespace` is None for an operator who named none."""

    role: Role
    namespace: str | None

    @property
    def home(self) -> str:
        """The namespace of what this caller makes."""
        return self.namespace or DEFAULT_NAMESPACE

    def scope(self, all_namespaces: bool) -> str | None:
        """Returns the namespace to which a selection is limited; None = all of them.

        Raises PermissionDenied `NAMESPACE_NOT_ALLOWED` if all are asked for by a caller of one namespace.
        """
        if not all_namespaces:
            return self.home
        if self.namespace is not None:
            raise PermissionDenied(
                "all_namespaces is for operators who name no namespace.", reason="NAMESPACE_NOT_ALLOWED"
            )
        return None

    def may_reach(self, namespace: str) -> bool:
        """Returns whether a resource of this namespace exists for the caller."""
        return self.namespace in (None, namespace)


_NOBODY: Final = Caller(Role.OPERATOR, None)
"""Work that no RPC began: the service's own."""
_caller: Final[ContextVar[Caller]] = ContextVar("caller", default=_NOBODY)
_acting: Final[ContextVar[str | None]] = ContextVar("acting", default=None)


def caller() -> Caller:
    """Returns the caller of the RPC that is being served. For servicers; work below gets a namespace as an argument."""
    return _caller.get()


def serve_for(found: Caller) -> None:
    """Binds the caller to this task, which serves its RPC, and to the tasks that it starts."""
    _caller.set(found)
    _acting.set(found.namespace)


def acts_in() -> str | None:
    """Returns the namespace that calls to other services name; None = none."""
    return _acting.get()


@contextmanager
def acting_in(namespace: str | None) -> Iterator[None]:
    """Calls to other services inside, also those of tasks started inside, name this namespace; None names none."""
    token = _acting.set(namespace)
    try:
        yield
    finally:
        _acting.reset(token)


class Quotas:
    """How much each namespace may hold at once of what a service counts.

    Args:
        quotas: by namespace, at least 0; a namespace without one is not limited.
        what: the plural of what is counted, for messages: "rollouts".
    """

    def __init__(self, quotas: Mapping[str, int], what: str) -> None:
        self._quotas = dict(quotas)
        self._what = what

    def check(self, namespace: str, held: int, more: int = 1) -> None:
        """Raises ResourceExhausted `NAMESPACE_QUOTA` if `more` than `held` would exceed the namespace's quota."""
        quota = self._quotas.get(namespace)
        if quota is not None and held + more > quota:
            raise ResourceExhausted(
                f"The namespace {namespace} may hold {quota} {self._what} at once and has {held}. "
                "Wait until some have ended, or ask the operator for a larger quota.",
                reason="NAMESPACE_QUOTA",
                retry_after_s=1.0,
            )
