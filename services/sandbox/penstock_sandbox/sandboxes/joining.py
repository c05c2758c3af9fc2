"""Sandboxes that join the network of another one, to reach its companions as they are: the place of a verifier.

Invariants
- Only a sandbox of the same namespace, owner and backend is joined, and by one at a time.
- The one that joins takes no place of a limit of sandboxes: the other keeps its own meanwhile, and work that waited for
  a second place while it held the first could wait for ever. So the other's programs are ended.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.model import NetworkKind, SandboxSpec
from penstock_sandbox.sandboxes.table import Table, unknown

_RETRY_AFTER_S = 1.0


class Joins:
    """Which sandboxes have another one in their network. ``owner_label`` is the label that names an owner."""

    def __init__(self, table: Table, owner_label: str) -> None:
        self._table = table
        self._owner_label = owner_label
        self._joined: set[str] = set()

    def take(self, spec: SandboxSpec, namespace: str, backend: Backend) -> Callable[[], None]:
        """Marks the sandbox that a spec joins; returns a function that ends that.

        Raises InvalidArgument (FIELD_INVALID), NotFound (SANDBOX_UNKNOWN), FailedPrecondition (SANDBOX_LOST,
        SANDBOX_NOT_READY, SANDBOX_PAUSED), ResourceExhausted (SANDBOX_JOINED).
        """
        joined = spec.joins
        if spec.network.kind is not NetworkKind.NONE:
            raise invalid_field("spec.network", "must be unset beside join_sandbox_id: it has that sandbox's network")
        if self._table.find(joined, namespace) is None:
            raise unknown(joined)
        live, _, _ = self._table.usable(joined)
        other = live.view.spec
        if live.backend is not backend or not other.companions:
            raise invalid_field("join_sandbox_id", "must be a sandbox of the same backend that has companions")
        if other.labels.get(self._owner_label) != spec.labels.get(self._owner_label):
            raise invalid_field("join_sandbox_id", f"must have the same label {self._owner_label!r}")
        if joined in self._joined:
            raise ResourceExhausted(
                "another sandbox has joined that one: delete it first",
                reason="SANDBOX_JOINED",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._joined.add(joined)
        return lambda: self._joined.discard(joined)
