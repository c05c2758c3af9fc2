"""Checks before a rollout starts that the services and the model source answer, and that the backend has the
capabilities.

A shortfall is an error of the creating call, never a rollout that fails later for a reason already known (R27, R46).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.sandbox.v1 import sandbox_pb2
from penstock.values import hosts
from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import FailedPrecondition
from penstock_driver.agents.launch import check_host_tools
from penstock_driver.agents.specs import PromptDelivery
from penstock_driver.domain.ports import (
    LIMITED,
    NO_PACKAGES,
    BackendFacts,
    GateCheck,
    Packages,
    Sandboxes,
    SandboxTerms,
)
from penstock_driver.domain.rollout import RolloutSpec, judge_id
from penstock_driver.domain.users import user_id

FRESH_S: Final = 2.0
"""How long the sandbox service's answer is reused: a burst of creations asks once."""


class Preflight:
    """Checks specs against the capabilities that the sandbox service and the gate report."""

    def __init__(self, sandboxes: Sandboxes, gate: GateCheck) -> None:
        self._sandboxes = sandboxes
        self._gate = gate
        self._backends: SingleFlight[None, Sequence[BackendFacts]] = SingleFlight(fresh_s=FRESH_S)

    async def check(self, spec: RolloutSpec, rollout_id: str, group_id: str | None = None) -> RolloutSpec:
        """Return the spec with its backend named, and the fields that depend on it filled in.

        Unavailable (SANDBOX_UNREACHABLE); FailedPrecondition (BACKEND_UNKNOWN, BACKEND_UNAVAILABLE, CAPABILITY_MISSING,
        HOST_NOT_ALLOWED, AGENT_NEEDS_ROOT, AGENT_WITHOUT_MCP); the errors of `Gate.check`.
        """
        placed = check_backend(spec, await self._backends.get(None, self._sandboxes.backends))
        offered = await self._gate.check(spec.gate_terms, rollout_id=rollout_id, group_id=group_id, labels=spec.labels)
        check_host_tools(spec.agent.spec, offered)
        verifier = spec.task.verifier
        if verifier is not None and verifier.judge is not None:
            await self._gate.check(verifier.judge, rollout_id=judge_id(rollout_id), group_id=None, labels={})
        if spec.user is not None and spec.user.model is not None:
            await self._gate.check(spec.user.model.terms, rollout_id=user_id(rollout_id), group_id=None, labels={})
        return placed

    async def check_terminal(self, terms: SandboxTerms, packages: Packages = NO_PACKAGES) -> SandboxTerms:
        """Check a terminal episode, which has no agent and no model; return its terms with the backend named."""
        backend = _available(terms.backend, await self._backends.get(None, self._sandboxes.backends))
        needed = {"fork": backend.forks, "stdin_stream": backend.stdin, "toolboxes": backend.toolboxes or not packages}
        _check_capabilities(backend, terms, needed)
        _check_debian(backend, packages)
        _check_hosts(backend, _listed(terms))
        return replace(terms, backend=backend.name)


def check_backend(spec: RolloutSpec, backends: Sequence[BackendFacts]) -> RolloutSpec:
    """Check that the spec's backend can run it; return the spec with the backend and its defaults filled in.

    A default backend is named from here on: throttles and prepared states are kept by the backend's name.
    """
    backend = _available(spec.sandbox.backend, backends)
    agent = spec.agent.spec
    if agent.needs_root and not backend.root:
        raise FailedPrecondition(
            f"agent {agent.name} needs root in its sandbox, and backend {backend.name} has none",
            reason="AGENT_NEEDS_ROOT",
        )
    verifier = spec.task.verifier
    in_a_fork = verifier and (
        verifier.fresh_fork or verifier.changes_below or verifier.needs_fork or spec.verifier_network is not None
    )
    takes_changes = verifier and in_a_fork and verifier.takes_changes
    needed = {
        "one_endpoint": backend.one_endpoint,
        "fork": backend.forks,
        "toolboxes": backend.toolboxes,
        "diff": backend.diff or not (spec.keep_end_state or takes_changes),
        "stdin_stream": backend.stdin or agent.instruction.method is not PromptDelivery.STDIN,
    }
    _check_capabilities(backend, spec.sandbox, needed)
    _check_debian(backend, spec.packages)
    if verifier:
        _check_capabilities(backend, verifier.sandbox, {})
    _check_hosts(backend, _listed(spec.sandbox), spec.agent_network, spec.verifier_network)
    if verifier and verifier.fresh_fork is None:
        fresh_fork = backend.diff or bool(in_a_fork)
        spec = replace(spec, task=replace(spec.task, verifier=replace(verifier, fresh_fork=fresh_fork)))
    return replace(spec, sandbox=replace(spec.sandbox, backend=backend.name), reports_changes=backend.diff)


def _available(wanted: str, backends: Sequence[BackendFacts]) -> BackendFacts:
    backend = next((item for item in backends if (item.name == wanted if wanted else item.is_default)), None)
    known = ", ".join(item.name for item in backends) or "none"
    if backend is None:
        what = f"backend {wanted}" if wanted else "a default backend"
        raise FailedPrecondition(
            f"the sandbox service has no {what}; known backends: {known}", reason="BACKEND_UNKNOWN"
        )
    if not backend.available:
        raise FailedPrecondition(
            f"backend {backend.name} is not available: {backend.unavailable_reason}", reason="BACKEND_UNAVAILABLE"
        )
    return backend


def _check_capabilities(backend: BackendFacts, terms: SandboxTerms, needed: Mapping[str, bool]) -> None:
    missing = [name for name, is_there in needed.items() if not is_there]
    missing += [
        f"a limit of {name}" for name in LIMITED if getattr(terms, name) is not None and name not in backend.limits
    ]
    if terms.companions and not backend.companions:
        missing.append("companions")
    limited = {field.name for one in terms.companions for field, _ in one.resources.ListFields()}
    missing += [f"a limit of {name} of companions" for name in sorted(limited - backend.limits)]
    if missing:
        raise FailedPrecondition(
            f"backend {backend.name} lacks capabilities that are needed: {', '.join(missing)}",
            reason="CAPABILITY_MISSING",
        )


def _check_debian(backend: BackendFacts, packages: Packages) -> None:
    if packages.debian and not backend.debian_packages:
        raise FailedPrecondition(
            f"backend {backend.name} installs no Debian packages (sandbox.packages.debian): use an image with them; "
            "operators: debian_mirrors of a sandbox service with the local backend",
            reason="CAPABILITY_MISSING",
        )


def _listed(terms: SandboxTerms) -> sandbox_pb2.Allowlist | None:
    setup = terms.setup_network
    return setup.allowlist if setup is not None and setup.HasField("allowlist") else None


def _check_hosts(backend: BackendFacts, *lists: sandbox_pb2.Allowlist | None) -> None:
    given = [listed for listed in lists if listed is not None]
    if given and not backend.egress_hosts:
        raise FailedPrecondition(
            f"backend {backend.name} lacks capabilities that are needed: network ALLOWLIST", reason="CAPABILITY_MISSING"
        )
    if missing := hosts.not_permitted([host for listed in given for host in listed.hosts], backend.egress_hosts):
        raise FailedPrecondition(
            f"sandboxes may not reach {', '.join(missing)}; the operator's egress_hosts must cover it",
            reason="HOST_NOT_ALLOWED",
            metadata={"hosts": ",".join(missing)},
        )
