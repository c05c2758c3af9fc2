"""What can be known before a rollout is started: that the services and the model's source answer, and that the backend
can do what is asked.

A shortfall is an error of the creating call, never a rollout that fails later for a reason that was known (R27, R46).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.single_flight import SingleFlight
from penstock_driver.launches import check_host_tools
from penstock_driver.ports import BackendFacts, Gate, Sandboxes, SandboxTerms
from penstock_driver.rollouts import RolloutOrder
from penstock_driver.specs import Delivery

FRESH_S: Final = 2.0
"""How long the sandbox service's answer is believed: a burst of creations asks once."""


class Preflight:
    """Checks orders against what the sandbox service and the gate say."""

    def __init__(self, sandboxes: Sandboxes, gate: Gate) -> None:
        self._sandboxes = sandboxes
        self._gate = gate
        self._backends: SingleFlight[None, Sequence[BackendFacts]] = SingleFlight(fresh_s=FRESH_S)

    async def check(self, order: RolloutOrder, rollout_id: str, group_id: str | None = None) -> RolloutOrder:
        """The order, with what depends on the backend filled in.

        Unavailable (SANDBOX_UNREACHABLE); FailedPrecondition (BACKEND_UNKNOWN, BACKEND_UNAVAILABLE,
        CAPABILITY_MISSING, AGENT_NEEDS_ROOT, AGENT_WITHOUT_MCP); what `Gate.check` raises.
        """
        placed = check_backend(order, await self._backends.get(None, self._sandboxes.backends))
        offered = await self._gate.check(
            order.gate_terms, rollout_id=rollout_id, group_id=group_id, labels=order.labels
        )
        check_host_tools(order.agent.spec, offered)
        return placed

    async def check_terminal(self, terms: SandboxTerms) -> None:
        """The same for a terminal episode, which has no agent and no model."""
        backend = _available(terms.backend, await self._backends.get(None, self._sandboxes.backends))
        _check_capabilities(backend, terms, {"fork": backend.forks, "stdin_stream": backend.stdin})


def check_backend(order: RolloutOrder, backends: Sequence[BackendFacts]) -> RolloutOrder:
    """Whether the backend that the order means can do what the order needs; the order, with what it leaves to that."""
    backend = _available(order.sandbox.backend, backends)
    spec = order.agent.spec
    if spec.needs_root and not backend.root:
        raise FailedPrecondition(
            f"agent {spec.name} needs root in its sandbox, and backend {backend.name} has none",
            reason="AGENT_NEEDS_ROOT",
        )
    verifier = order.task.verifier
    needed = {
        "one_endpoint": backend.one_endpoint,
        "fork": backend.forks,
        "toolboxes": backend.toolboxes,
        "diff": backend.diff or not (verifier and (verifier.fresh_fork or verifier.changes_below)),
        "stdin_stream": backend.stdin or spec.instruction.method is not Delivery.STDIN,
    }
    _check_capabilities(backend, order.sandbox, needed)
    if verifier and verifier.fresh_fork is None:
        order = replace(order, task=replace(order.task, verifier=replace(verifier, fresh_fork=backend.diff)))
    return replace(order, tells_changes=backend.diff)


def _available(wanted: str, backends: Sequence[BackendFacts]) -> BackendFacts:
    backend = next((item for item in backends if (item.name == wanted if wanted else item.is_default)), None)
    known = ", ".join(item.name for item in backends) or "none"
    if backend is None:
        what = f"backend {wanted}" if wanted else "a default backend"
        raise FailedPrecondition(f"the sandbox service has no {what}; it has: {known}", reason="BACKEND_UNKNOWN")
    if not backend.available:
        raise FailedPrecondition(
            f"backend {backend.name} is not available: {backend.unavailable_reason}", reason="BACKEND_UNAVAILABLE"
        )
    return backend


def _check_capabilities(backend: BackendFacts, terms: SandboxTerms, needed: Mapping[str, bool]) -> None:
    missing = [name for name, is_there in needed.items() if not is_there]
    missing += [
        f"a limit of {name}"
        for name in ("cpu", "memory_bytes", "pids", "disk_bytes", "inodes")
        if getattr(terms, name) is not None and name not in backend.limits
    ]
    if missing:
        raise FailedPrecondition(
            f"backend {backend.name} lacks what is needed: {', '.join(missing)}", reason="CAPABILITY_MISSING"
        )
