"""The operator's limits of a sandbox, and the validation of specs (R54, R64).

Invariant: each decision uses the spec and the settings alone, before anything is started.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.sandbox.v1 import sandbox_pb2
from penstock.values import companions, hosts, to_proto
from penstock_chassis.errors import FailedPrecondition, Violation
from penstock_chassis.validation import invalid
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.model import (
    DEFAULT_PORTS,
    LEAST_DISK_BYTES,
    LEAST_INODES,
    LEAST_MEMORY_BYTES,
    LEAST_PIDS,
    NetworkKind,
    NetworkPolicy,
    Resources,
    SandboxSpec,
)

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")
_MOST_PORTS = 256

_NONE = Resources()


@dataclass(frozen=True, slots=True)
class Limits:
    max_sandboxes: int
    default_lease_s: float
    max_lease_s: float
    default_resources: Resources
    allowed_upstreams: tuple[str, ...]
    max_lifetime_s: float | None = None
    owner_label: str = "owner"
    max_sandboxes_per_owner: int | None = None
    max_queued: int = 1024
    queue_timeout_s: float = 30.0
    upstream_ca: str = ""
    egress_hosts: tuple[str, ...] = ()
    min_free_bytes: int = 0
    min_free_inodes: int = 0
    max_resources: Resources = _NONE
    quotas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Most concurrent sandboxes by namespace, for the namespaces that have a limit."""


class Policy:
    """Checks specs against the operator's limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def with_defaults(self, backend: Backend, asked: Resources) -> Resources:
        """Returns the requested limits, completed with the operator's defaults that the backend can enforce."""
        can, default = backend.capabilities, self.limits.default_resources
        return Resources(
            cpu=asked.cpu if asked.cpu is not None else default.cpu if can.limit_cpu else None,
            memory_bytes=asked.memory_bytes
            if asked.memory_bytes is not None
            else default.memory_bytes
            if can.limit_memory
            else None,
            pids=asked.pids if asked.pids is not None else default.pids if can.limit_pids else None,
            disk_bytes=asked.disk_bytes
            if asked.disk_bytes is not None
            else default.disk_bytes
            if can.limit_disk
            else None,
            inodes=asked.inodes if asked.inodes is not None else default.inodes if can.limit_inodes else None,
        )

    def not_held(self, backend: Backend) -> list[str]:
        """Returns the fields of the operator's default limits that this backend cannot enforce."""
        default, held = self.limits.default_resources, self.with_defaults(backend, Resources())
        return [
            field.name
            for field in dataclasses.fields(Resources)
            if getattr(default, field.name) is not None and getattr(held, field.name) is None
        ]

    def check_values(self, spec: SandboxSpec, lease_s: float) -> None:
        """Raises InvalidArgument (FIELD_INVALID), with a violation for each invalid field."""
        problems = []
        if not 0 < lease_s <= self.limits.max_lease_s:
            problems.append(Violation("spec.lease", f"must be positive and at most {self.limits.max_lease_s:g} s"))
        for key, value in spec.labels.items():
            if not _LABEL.fullmatch(key) or not _LABEL.fullmatch(value):
                problems.append(Violation("spec.labels", f"{key!r}: keys and values must match {_LABEL.pattern}"))
        for name, value in spec.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                problems.append(Violation("spec.env", "a name is empty or has '=', or a name or value has a NUL byte"))
        problems += self._resource_problems(spec.resources, "spec")
        described = [to_proto(companion, sandbox_pb2.Companion) for companion in spec.companions]
        problems += [Violation(f"spec.companions{place}", why) for place, why in companions.problems(described)]
        for index, companion in enumerate(spec.companions):
            problems += self._resource_problems(companion.resources, f"spec.companions[{index}]")
        if spec.image and spec.snapshot_id:
            problems.append(Violation("spec.base", "set an image or a snapshot, not both"))
        problems += network_problems(spec.network)
        if problems:
            raise invalid(problems)

    def _resource_problems(self, limits: Resources, where: str) -> list[Violation]:
        problems = []
        for field, amount, least in (
            ("cpu", limits.cpu, 0.01),
            ("memory_bytes", limits.memory_bytes, LEAST_MEMORY_BYTES),
            ("pids", limits.pids, LEAST_PIDS),
            ("disk_bytes", limits.disk_bytes, LEAST_DISK_BYTES),
            ("inodes", limits.inodes, LEAST_INODES),
        ):
            most: float | None = getattr(self.limits.max_resources, field)
            if amount is not None and not amount >= least:
                problems.append(Violation(f"{where}.resources.{field}", f"must be at least {least}"))
            elif amount is not None and most is not None and amount > most:
                problems.append(
                    Violation(f"{where}.resources.{field}", f"must be at most {most}, the operator's max_{field}")
                )
        return problems

    def check_together(self, spec: SandboxSpec) -> None:
        """Raises InvalidArgument if a complete spec's sandbox and companions exceed the operator's maximum together."""
        if not spec.companions:
            return
        problems = []
        for field in dataclasses.fields(Resources):
            most: float | None = getattr(self.limits.max_resources, field.name)
            parts = [spec.resources, *(companion.resources for companion in spec.companions)]
            total = sum(amount for part in parts if (amount := getattr(part, field.name)) is not None)
            if most is not None and total > most:
                problems.append(
                    Violation(
                        "spec.companions",
                        f"with the sandbox's they have {field.name} {total:g}, and the operator's max_{field.name} is "
                        f"{most:g}: give each its share in resources",
                    )
                )
        if problems:
            raise invalid(problems)

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raises FailedPrecondition for what the operator has not listed (UPSTREAM_NOT_ALLOWED, HOST_NOT_ALLOWED)."""
        if policy.kind is NetworkKind.ALLOWLIST:
            if missing := hosts.not_permitted(policy.hosts, self.limits.egress_hosts):
                raise FailedPrecondition(
                    f"sandboxes may not reach {', '.join(missing)}; the operator's egress_hosts must cover it",
                    reason="HOST_NOT_ALLOWED",
                    metadata={"hosts": ",".join(missing)},
                )
            if policy.one_endpoint is not None:
                self.check_network(policy.one_endpoint)
        if policy.kind is NetworkKind.ONE_ENDPOINT and not any(
            fnmatch.fnmatchcase(policy.upstream, pattern) for pattern in self.limits.allowed_upstreams
        ):
            raise FailedPrecondition(
                f"sandboxes may not be connected to {policy.upstream}; the operator's allowed_upstreams must name it",
                reason="UPSTREAM_NOT_ALLOWED",
                metadata={"upstream": policy.upstream},
            )

    def completed(self, policy: NetworkPolicy) -> NetworkPolicy:
        """Returns the policy with the operator's CA file for upstreams, and the operator's hosts if it names none."""
        one = policy.one_endpoint
        named = policy.hosts or (self.limits.egress_hosts if policy.kind is NetworkKind.ALLOWLIST else ())
        return replace(
            policy,
            hosts=named,
            upstream_ca=self.limits.upstream_ca,
            one_endpoint=None if one is None else replace(one, upstream_ca=self.limits.upstream_ca),
        )


def is_narrower(policy: NetworkPolicy, present: NetworkPolicy) -> bool:
    """Whether a policy allows nothing that the present one does not. Both are completed."""
    if policy.kind is not present.kind or policy.kind is not NetworkKind.ALLOWLIST:
        return policy.kind.value < present.kind.value
    return (
        hosts.is_narrower(policy.hosts, policy.denied_hosts, present.hosts, present.denied_hosts)
        and set(ports_of(policy)) <= set(ports_of(present))
        and (policy.recorded_only or not present.recorded_only)
        and policy.recording == present.recording
        and policy.one_endpoint in (None, present.one_endpoint)
    )


def ports_of(policy: NetworkPolicy) -> tuple[int, ...]:
    """Returns the ports that an allow-list allows."""
    return policy.ports or DEFAULT_PORTS


def network_problems(policy: NetworkPolicy) -> list[Violation]:
    """Returns what is malformed in a policy, independent of the operator's limits."""
    if policy.kind is NetworkKind.ALLOWLIST:
        return _allowlist_problems(policy)
    if policy.kind is not NetworkKind.ONE_ENDPOINT:
        return []
    problems = []
    if not 1024 <= policy.local_port <= 65535:
        problems.append(Violation("spec.network.one_endpoint.local_port", "must be 1024 to 65535"))
    place, _, port = policy.upstream.removeprefix("tls:").rpartition(":")
    name, at, host = place.rpartition("@")
    is_named = bool(name) and policy.upstream.startswith("tls:")
    unix = policy.upstream.startswith("unix:/")
    if not unix and not (host and bool(at) == is_named and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        problems.append(
            Violation(
                "spec.network.one_endpoint.upstream",
                'must be "host:port", "tls:host:port", "tls:name@host:port" or "unix:/path"',
            )
        )
    return problems


def _allowlist_problems(policy: NetworkPolicy) -> list[Violation]:
    field = "spec.network.allowlist"
    problems = [
        Violation(f"{field}.{name}" if index is None else f"{field}.{name}[{index}]", why)
        for name, index, why in hosts.problems(policy.hosts, policy.denied_hosts)
    ]
    if len(policy.ports) > _MOST_PORTS or not all(0 < port < 65536 for port in policy.ports):
        problems.append(Violation(f"{field}.ports", "must be 1 to 65535"))
    if not 1024 <= policy.local_port <= 65535:
        problems.append(Violation(f"{field}.proxy_port", "must be 1024 to 65535, or 0 for the default"))
    if policy.recording and not _LABEL.fullmatch(policy.recording):
        problems.append(Violation(f"{field}.recording", f"must match {_LABEL.pattern}"))
    one = policy.one_endpoint
    if one is not None:
        if one.local_port == policy.local_port:
            problems.append(Violation(f"{field}.one_endpoint.local_port", "must be another one than the proxy's"))
        problems += network_problems(one)
    return problems
