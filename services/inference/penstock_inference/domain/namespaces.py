"""Names that are unique per namespace: of requests, sessions and adapters. An engine knows none of the namespaces.

The default namespace's names reach the engine as they are, unless they look like those of another namespace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock_chassis.auth import DEFAULT_NAMESPACE, Quotas, is_namespace
from penstock_chassis.errors import Unavailable


def scoped(namespace: str, name: str) -> str:
    """Returns a name for the engine, different from those of all other namespaces; empty stays empty."""
    if not name or (namespace == DEFAULT_NAMESPACE and parted(name) == (namespace, name)):
        return name
    return f"{namespace}/{name}"


def parted(name: str) -> tuple[str, str]:
    """Returns the namespace and the name that `scoped` was given."""
    namespace, slash, rest = name.partition("/")
    return (namespace, rest) if slash and is_namespace(namespace) else (DEFAULT_NAMESPACE, name)


class Served:
    """The requests that are being served, and the quotas for their number.

    Args:
        quotas: the most requests at once by namespace; a namespace without one is not limited.
    """

    def __init__(self, quotas: Mapping[str, int]) -> None:
        self._quotas = Quotas(quotas, "requests")
        self._ids: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._takes = True

    def take(self, takes: bool) -> None:
        """Takes new requests, or refuses them."""
        self._takes = takes

    def count(self) -> int:
        """Returns how many requests are being served."""
        return sum(ids.total() for ids in self._ids.values())

    @contextmanager
    def serving(self, namespace: str, request_id: str = "") -> Iterator[None]:
        """Counts a request while the context is open; `request_id` is the engine's.

        Raises ResourceExhausted (NAMESPACE_QUOTA), Unavailable (DRAINING).
        """
        if not self._takes:
            raise Unavailable("This service drains: it takes no requests.", reason="DRAINING", retry_after_s=5.0)
        ids = self._ids[namespace]
        self._quotas.check(namespace, ids.total())
        ids[request_id] += 1
        try:
            yield
        finally:
            ids[request_id] -= 1
            if not ids[request_id]:
                del ids[request_id]
            if not ids and self._ids[namespace] is ids:
                del self._ids[namespace]

    def ids(self, namespace: str) -> list[str]:
        """Returns the engine's ids of a namespace's generations."""
        return [request_id for request_id in self._ids.get(namespace, ()) if request_id]
