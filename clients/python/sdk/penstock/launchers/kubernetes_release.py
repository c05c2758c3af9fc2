"""The release of a stack on Kubernetes: values of the chart, Secrets of its services, and how far its pods are.

Everything secret is in the Secrets: Helm keeps a release's values, and shows them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES, ServiceName
from penstock.local.certificates import Authority
from penstock.local.processes import toml

INSTANCE: Final = "app.kubernetes.io/instance"
"""Label with the release's name, of everything that it has."""
COMPONENT: Final = "app.kubernetes.io/component"
"""Label of a pod with its service."""
SECRET: Final = re.compile(r"(^|_)(tokens?|keys?|passwords?|secrets?|credentials)$|^(namespaces|upstreams|inference)$")
"""Names of settings that the chart refuses among its values, because they can hold a secret: but those of `OPEN`."""
OPEN: Final = re.compile(r"^max_[a-z_]*tokens$|^kubernetes_keys$")
"""Names that end as those of secrets do: limits of tokens, and a directory that the chart itself sets."""
_DRAIN_S: Final = 5
_STOP_S: Final = 10
_GRACE_S: Final = 30
_GPU: Final = "nvidia.com/gpu"
_CRASHES: Final = 3
_HOPELESS: Final = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)
_LONGEST: Final = 300

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Release:
    """One installation of the chart. `values` are those that Helm gets."""

    name: str
    namespace: str
    values: Object

    @property
    def services(self) -> Sequence[ServiceName]:
        """The services that the release has."""
        enabled = self.values["inference"]["enabled"]
        return tuple(name for name in SERVICES if enabled or name != "inference")

    def namespace_of(self, service: ServiceName) -> str:
        """Returns where a service's pods are."""
        other = self.values.get("sandbox", {}).get("namespace") if service == "sandbox" else None
        return str(other or self.namespace)

    @property
    def namespaces(self) -> Sequence[str]:
        """All that it has something in."""
        return sorted({self.namespace_of(service) for service in self.services})

    def host(self, service: ServiceName) -> str:
        """Returns the name of a service within the cluster."""
        return f"{self.name}-{service}.{self.namespace_of(service)}.svc"

    def client_host(self, service: ServiceName) -> str:
        """Returns the name that clients in the cluster call a service by.

        It is that of the clients' Service, which has pods of its own namespace only.
        """
        near = self.namespace_of(service) == self.namespace
        return f"{self.name}.{self.namespace}.svc" if near else self.host(service)

    @property
    def selector(self) -> str:
        """Of everything that it has, as kubectl takes it."""
        return f"{INSTANCE}={self.name}"

    @property
    def claims(self) -> bool:
        """Whether its sandboxes are pods that its sandbox services have claimed, and must delete."""
        return bool(self.values.get("sandbox", {}).get("backend") == "kubernetes")

    @property
    def stop_s(self) -> float:
        """Seconds after which the cluster has killed the last of its pods."""
        tables = [self.values.get(name, {}) for name in self.services]
        return float(
            max(one.get("drainSeconds", _DRAIN_S) + one.get("stopSeconds", _STOP_S) for one in tables) + _GRACE_S
        )


def may_be_secret(setting: str) -> bool:
    """Returns whether a setting of this name can hold a secret, so that it belongs into a Secret of the cluster."""
    return SECRET.search(setting) is not None and OPEN.search(setting) is None


def read_values(given: Mapping[str, Any] | Path | str | None) -> Object:
    """Returns values that are given, or stand in a YAML file. Raises ConfigurationError."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    try:
        found = yaml.safe_load(Path(given).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"values: {given} cannot be read as YAML: {error}", reason="STACK_OPTION") from None
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"values: {given} is not a YAML mapping", reason="STACK_OPTION")
    return found


def chart_values(
    given: Object, *, nodes: int | None, gpus: int, settings: Mapping[str, Mapping[str, Any]], outside: bool
) -> Object:
    """Returns what Helm gets: the stack's own values, over them those given, over them the options.

    Args:
        given: of the user, as in the chart's values.yaml.
        nodes: sandbox services; None = as given.
        gpus: of the inference service; 0 = as given.
        settings: by service; those that may be secret are left out (`settings_tables` has them).
        outside: whether the stack is used from outside the cluster, where one service of each kind is reached.

    Raises:
        ConfigurationError: values and options do not go together; the message names them.
    """
    if "credentials" in given:
        raise _wrong("values: credentials: a stack makes its own Secrets; leave it out")
    claim = _part(_part(given, "inference"), "model").get("claim")
    values: dict[str, Any] = {
        "driver": {"replicas": 1, "drainSeconds": _DRAIN_S},
        "interception": {"replicas": 1, "drainSeconds": _DRAIN_S},
        "sandbox": {"drainSeconds": _DRAIN_S},
        "inference": {"enabled": bool(claim), "replicas": 1, "drainSeconds": _DRAIN_S},
    }
    values = _merged(values, given)
    if gpus:
        if not claim:
            raise _wrong(
                f"gpus={gpus}: they are for the inference service, which needs inference.model.claim in values"
            )
        values = _merged(values, {"inference": {"resources": {"limits": {_GPU: gpus}}}})
    if nodes is not None:
        values = _merged(values, {"sandbox": {"replicas": nodes}})
    for service, table in settings.items():
        open_ones = {name: value for name, value in table.items() if not may_be_secret(name)}
        values = _merged(values, {service: {"settings": open_ones}})
    scaling = _part(values, "autoscaling")
    for service in ("driver", "interception", "inference") if outside else ():
        # The chart scales drivers and gates unless its values say otherwise, and no inference services.
        may_scale = service != "inference" and scaling.get("mode", "none") != "none"
        scaled = may_scale and _part(scaling, service).get("enabled", True)
        if values[service]["replicas"] != 1 or scaled:
            raise _wrong(
                f"values: {service}: from outside the cluster one is reached, so that there may be one only; leave "
                f"out {service}.replicas and autoscaling, or start the stack in a pod of the cluster"
            )
    return values


def settings_tables(
    release: Release,
    settings: Mapping[str, Mapping[str, Any]],
    upstreams: Mapping[str, Mapping[str, str]],
    *,
    operator: str,
    trainer: str,
    node: str,
) -> Mapping[ServiceName, Mapping[str, Any]]:
    """Returns what each service finds in its settings file: tokens, and whatever else may be secret.

    Args:
        release: whose services they are.
        settings: of the user, by service.
        upstreams: endpoints of the gates, by name.
        operator, trainer: tokens that drivers, gates and engines accept.
        node: the operator's token of the sandbox services, which accept the trainer's beside it and no other: an agent
            that breaks out of its sandbox finds no token of drivers and gates.
    """
    both = {"operator_token": operator, "trainer_token": trainer}
    own: dict[ServiceName, dict[str, Any]] = {
        "sandbox": {"operator_token": node, "trainer_token": trainer},
        "driver": {**both, "sandbox_token": node, "interception_token": operator},
        "interception": {
            **both,
            **({"inference_token": operator} if "inference" in release.services else {}),
            **({"upstreams": upstreams} if upstreams else {}),
        },
        "inference": both,
    }
    hidden = {
        service: {name: value for name, value in settings.get(service, {}).items() if may_be_secret(name)}
        for service in own
    }
    return {service: {**own[service], **hidden[service]} for service in release.services}


def secrets_of(
    release: Release, authority: Authority, tables: Mapping[ServiceName, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Returns the Secrets that the chart's pods mount, one for each service, as a List."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [_secret(release, service, authority, table) for service, table in tables.items()],
    }


def _secret(release: Release, service: ServiceName, authority: Authority, table: Mapping[str, Any]) -> Object:
    host = release.host(service)
    names = ["localhost", "127.0.0.1", f"{release.name}.{release.namespace}.svc", host, f"*.{host}"]
    signed = authority.sign(service, names)
    lines = "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": f"{release.name}-{service}",
            "namespace": release.namespace_of(service),
            "labels": {"app.kubernetes.io/name": "penstock", INSTANCE: release.name},
        },
        "stringData": {
            "config.toml": f"[{service}]\n{lines}",
            "tls.crt": signed.certificate.decode(),
            "tls.key": signed.key.decode(),
            "ca.crt": authority.certificate.decode(),
        },
    }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the pods of a release are."""

    wanted: int
    ready: int
    waits: Sequence[str] = field(default=())
    """Why pods are not ready, as far as the cluster says."""
    hopeless: str = ""
    """Why one of them will not be; empty = nothing says so."""
    crashed: tuple[str, str, str] | None = None
    """Namespace, pod and container of one that ends again and again: its log says why."""

    @property
    def complete(self) -> bool:
        """Whether all are ready."""
        return 0 < self.wanted <= self.ready


def progress(listed: Sequence[Object], workloads: int) -> Progress:
    """Judges StatefulSets, DaemonSets and pods of a release, of which there must be so many workloads."""
    wanted = ready = found = 0
    waits: list[str] = []
    hopeless, crashed = "", None
    for one in listed:
        status = one.get("status") or {}
        if one["kind"] == "StatefulSet":
            found += 1
            wanted += one["spec"]["replicas"]
            ready += status.get("readyReplicas", 0)
        elif one["kind"] == "DaemonSet":
            found += 1
            wanted += max(1, status.get("desiredNumberScheduled", 0))
            ready += status.get("numberReady", 0)
        elif one["kind"] == "Pod":
            name = one["metadata"]["name"]
            waits += [
                f"{name} has no machine: {_cut(condition.get('message'))}"
                for condition in status.get("conditions") or ()
                if condition["type"] == "PodScheduled" and condition["status"] == "False"
            ]
            for container in status.get("containerStatuses") or ():
                waiting = (container.get("state") or {}).get("waiting") or {}
                reason = waiting.get("reason", "")
                text = f"{name} does not start ({reason}): {_cut(waiting.get('message'))}"
                if reason in _HOPELESS:
                    hopeless = hopeless or text
                elif reason == "CrashLoopBackOff" and container.get("restartCount", 0) >= _CRASHES:
                    hopeless = hopeless or text
                    crashed = crashed or (one["metadata"]["namespace"], name, container["name"])
                elif reason not in ("", "ContainerCreating", "PodInitializing"):
                    waits.append(text)
    return Progress(wanted if found >= workloads else 0, ready, waits, hopeless, crashed)


def _part(table: Object, name: str) -> Object:
    found = table.get(name, {})
    if not isinstance(found, Mapping):
        raise _wrong(f"values: {name} is not a mapping")
    return found


def _merged(first: Object, second: Object) -> dict[str, Any]:
    """Both, the second where they differ, as Helm merges values."""
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _wrong(text: str) -> ConfigurationError:
    return ConfigurationError(text, reason="STACK_OPTION")


def _cut(text: str | None) -> str:
    return " ".join((text or "no message").split())[:_LONGEST]
