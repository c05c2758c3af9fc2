"""The objects that a cluster needs for this backend: template, warm pool, keys, entrypoint, and the service's rights.

`python -m penstock_sandbox.backends.kubernetes` prints them for `kubectl apply -f -`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock_sandbox.backends.kubernetes import entrypoint
from penstock_sandbox.backends.kubernetes.cluster import CORE_GROUP, GROUP, VERSION
from penstock_sandbox.backends.kubernetes.keys import self_signed

PROGRAM_FOLDER: Final = "/etc/penstock/program"
KEYS_FOLDER: Final = "/etc/penstock/keys"
_KEY_DAYS: Final = 3650
_ROOT_ONLY: Final = 0o400
# What the entrypoint and the guest need to be root beside another user; the workload has none of them.
_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID")

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choices:
    """What differs between clusters. ``service_labels`` are those of the sandbox service's own pods."""

    name: str = "penstock"
    namespace: str = "default"
    image: str = "python:3.13-slim-bookworm"
    warm: int = 2
    cpu: str = "1"
    memory: str = "2Gi"
    runtime_class: str = ""
    user_namespaces: bool = False
    service_account: str = "penstock-sandbox"
    service_namespace: str = ""
    service_labels: tuple[tuple[str, str], ...] = (("app.kubernetes.io/component", "sandbox"),)


def manifests(choices: Choices) -> Object:
    """Returns all objects as one List, with new keys."""
    pod_crt, pod_key = self_signed("penstock-pod", _KEY_DAYS)
    service_crt, service_key = self_signed("penstock-service", _KEY_DAYS)
    items: Sequence[Object] = [
        _object(choices, "v1", "ConfigMap", "entrypoint", data={"entrypoint.py": _program()}),
        _secret(choices, "pod", {"pod.pem": pod_key + pod_crt, "service.crt": service_crt}),
        # Where the service's pods are, which mount it.
        _secret(
            replace(choices, namespace=choices.service_namespace or choices.namespace),
            "service",
            {"service.pem": service_key + service_crt, "pod.crt": pod_crt},
        ),
        _object(choices, f"{GROUP}/{VERSION}", "SandboxTemplate", "", spec=_template(choices)),
        _object(
            choices,
            f"{GROUP}/{VERSION}",
            "SandboxWarmPool",
            "",
            # Recreate: pods of an older entrypoint or with older keys are of no use.
            spec={
                "replicas": choices.warm,
                "sandboxTemplateRef": {"name": choices.name},
                "updateStrategy": {"type": "Recreate"},
            },
        ),
        _object(choices, "rbac.authorization.k8s.io/v1", "Role", "service", rules=RULES),
        _object(
            choices,
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            "service",
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": f"{choices.name}-service"},
            subjects=[
                {
                    "kind": "ServiceAccount",
                    "name": choices.service_account,
                    "namespace": choices.service_namespace or choices.namespace,
                }
            ],
        ),
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


RULES: Final[Sequence[Object]] = (
    {
        "apiGroups": [GROUP],
        "resources": ["sandboxclaims"],
        "verbs": ["create", "get", "list", "watch", "patch", "delete"],
    },
    {"apiGroups": [GROUP], "resources": ["sandboxwarmpools", "sandboxtemplates"], "verbs": ["get"]},
    {"apiGroups": [CORE_GROUP], "resources": ["sandboxes"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
)
"""All that the service may do in the cluster: no exec, no secrets, no pods of its own making."""


def _program() -> str:
    return Path(entrypoint.__file__).read_text(encoding="utf-8")


def _object(choices: Choices, version: str, kind: str, part: str, **content: Any) -> Object:
    name = f"{choices.name}-{part}" if part else choices.name
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": choices.namespace},
        **content,
    }


def _secret(choices: Choices, part: str, files: Mapping[str, str]) -> Object:
    return _object(choices, "v1", "Secret", part, type="Opaque", stringData=files)


def _template(choices: Choices) -> Object:
    source: dict[str, Any] = {"podSelector": {"matchLabels": dict(choices.service_labels)}}
    if choices.service_namespace:
        source["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": choices.service_namespace}}
    amounts = {"cpu": choices.cpu, "memory": choices.memory}
    container = {
        "name": "sandbox",
        "image": choices.image,
        "command": ["python3", "-I", "-S", f"{PROGRAM_FOLDER}/entrypoint.py", "--keys", KEYS_FOLDER],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [{"containerPort": entrypoint.PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": entrypoint.PORT}, "periodSeconds": 1},
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(_CAPABILITIES)},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "program", "mountPath": PROGRAM_FOLDER, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
        ],
    }
    pod: dict[str, Any] = {
        # A second life of the container would have none of its sandbox.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [
            {"name": "program", "configMap": {"name": f"{choices.name}-entrypoint"}},
            {"name": "keys", "secret": {"secretName": f"{choices.name}-pod", "defaultMode": _ROOT_ONLY}},
        ],
    }
    if choices.runtime_class:
        pod["runtimeClassName"] = choices.runtime_class
    if choices.user_namespaces:
        pod["hostUsers"] = False
    return {
        "podTemplate": {"spec": pod},
        "networkPolicyManagement": "Managed",
        "networkPolicy": {
            "ingress": [{"from": [source], "ports": [{"protocol": "TCP", "port": entrypoint.PORT}]}],
            "egress": [],
        },
    }
