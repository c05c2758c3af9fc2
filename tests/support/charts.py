"""The chart of deploy/helm, rendered by Helm: its manifests as values, and the configurations that tests go through."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from tools import helm

NAMESPACE: Final = "penstock"
SERVICES: Final = ("driver", "interception", "sandbox", "inference")

MODEL: Final[Mapping[str, Any]] = {"inference": {"model": {"claim": "model"}}}
"""The one value that has no default."""

CLAIMS: Final[Mapping[str, Any]] = {"warmPool": "penstock", "apiServer": [{"cidr": "10.0.0.1/32", "port": 6443}]}
"""What the backend kubernetes must be told."""

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "as it comes": {},
    "docker": {"sandbox": {"backend": "docker", "engine": {"runtime": "runsc"}}},
    "a daemon set": {"sandbox": {"kind": "DaemonSet", "runtimeClassName": "kata"}},
    "sandboxes in a namespace of their own": {"sandbox": {"namespace": "penstock-sandboxes"}},
    "an engine elsewhere": {"inference": {"enabled": False, "address": "gpu.example:7704"}},
    "engines elsewhere": {"inference": {"enabled": False, "address": "static:e0=gpu-a:7704,e1=gpu-b:7704"}},
    "several engines": {"inference": {"replicas": 3}},
    "claimed sandboxes": {"sandbox": {"backend": "kubernetes", "kubernetes": CLAIMS}},
    "claimed sandboxes in namespaces of their own": {
        "sandbox": {
            "backend": "kubernetes",
            "namespace": "penstock-sandboxes",
            "kubernetes": {**CLAIMS, "namespace": "pods", "keysSecret": "keys", "allowedWarmPools": ["team-*"]},
        }
    },
    "claimed sandboxes by rights of others": {
        "sandbox": {"backend": "kubernetes", "kubernetes": {**CLAIMS, "rbac": False}}
    },
    "settings": {
        "driver": {"settings": {"max_running": 512, "peers": {"d9": "host:7702"}}, "nodeSelector": {"disk": "ssd"}},
        "interception": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        "inference": {
            "engine": "vllm",
            "engineOptions": {"dtype": "bfloat16"},
            "settings": {"replicas": 2, "replica_devices": ["0", "1"]},
            "resources": {"limits": {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": 2}},
        },
        "image": {"pullSecrets": ["registry"]},
    },
    "keda": {"autoscaling": {"mode": "keda", "authentication": "prometheus"}},
    "hpa": {"autoscaling": {"mode": "hpa"}},
    "cert-manager and the Prometheus operator": {
        "credentials": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}, "dnsNames": ["rl.example"]}},
        "metrics": {"podMonitor": {"enabled": True, "tokenSecret": "scrape", "labels": {"team": "rl"}}},
        "sandbox": {"namespace": "penstock-sandboxes"},
    },
    "closed": {"networkPolicy": {"clients": [], "monitoring": []}, "sandbox": {"egress": []}},
}
"""What tests render beside the default, by name: every branch of the templates is in one of them."""


class ChartRefused(Exception):
    """Helm refused the values; the message is its own."""


@dataclass(frozen=True)
class Rendered:
    """The manifests of one configuration."""

    manifests: Sequence[Mapping[str, Any]]
    by_name: Mapping[tuple[str, str], Mapping[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        names = {(one["kind"], one["metadata"]["name"]): one for one in self.manifests}
        assert len(names) == len(self.manifests), "two manifests have the same kind and name"
        object.__setattr__(self, "by_name", names)

    def kind(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The manifests of these kinds."""
        return [one for one in self.manifests if one["kind"] in kinds]

    def workloads(self) -> dict[str, Mapping[str, Any]]:
        """The StatefulSets and DaemonSets, by service."""
        return {component(one): one for one in self.kind("StatefulSet", "DaemonSet")}

    def pod_templates(self) -> dict[str, Mapping[str, Any]]:
        """What pods are made from, by service: a change of it restarts them."""
        return {service: one["spec"]["template"] for service, one in self.workloads().items()}

    def pods(self) -> dict[str, Mapping[str, Any]]:
        """The pods' specs, by service."""
        return {service: one["spec"] for service, one in self.pod_templates().items()}


def component(manifest: Mapping[str, Any]) -> str:
    """The service that a manifest is of."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def render(
    values: Mapping[str, Any],
    *options: str,
    release: str = "penstock",
    program: str = "helm",
    chart: Path = helm.CHART,
) -> Rendered:
    """Renders the chart, or another of its versions, with these values over the model's claim. Raises ChartRefused."""
    text = _template(json.dumps(_merged(MODEL, values)), options, release, program, chart)
    return Rendered(list(yaml.load_all(text, yaml.CSafeLoader)))  # in C: a tenth of the time of the one in Python


@lru_cache
def _template(values: str, options: tuple[str, ...], release: str, program: str, chart: Path) -> str:
    command = [str(helm.program(program)), "template", release, str(chart), "--namespace", NAMESPACE]
    done = subprocess.run(
        [*command, "--values", "-", *options], input=values, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ChartRefused(done.stderr)
    return done.stdout


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second where they differ, as Helm merges values."""
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def defaults() -> dict[str, Any]:
    """The chart's values.yaml."""
    found: dict[str, Any] = yaml.safe_load((Path(helm.CHART) / "values.yaml").read_text(encoding="utf-8"))
    return found
