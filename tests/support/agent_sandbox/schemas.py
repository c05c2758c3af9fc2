"""The parts of agent-sandbox's CRDs that a user of the API may send, as JSON Schema, and nothing else.

Written after `k8s/crds` of release 0.5.6: names, types, enums, patterns and required fields are theirs. A pod's spec
(8,000 lines there) is cut to the fields that our template uses. Where the CRD prunes unknown fields, this refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "integer"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_DECIMAL = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
_QUANTITY: Schema = {
    "type": "string",
    "pattern": rf"^(\+|-)?{_DECIMAL}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{_DECIMAL}))?$",
}
_QUANTITIES: Schema = {"type": "object", "additionalProperties": _QUANTITY}


def _closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _many(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _kind(group_version: str, kind: str, spec: Schema) -> Schema:
    name = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
    value = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
    return _closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": group_version},
        kind={"const": kind},
        metadata=_closed(
            ("name",),
            name={"type": "string", "pattern": name, "maxLength": 63},
            namespace=_TEXT,
            labels={"type": "object", "additionalProperties": {"type": "string", "pattern": value, "maxLength": 63}},
            annotations=_TEXTS,
        ),
        spec=spec,
    )


_NAMED = _closed(("name",), name=_TEXT)
_SELECTOR = _closed(matchLabels=_TEXTS)
_CONTAINER = _closed(
    ("name",),
    name=_TEXT,
    image=_TEXT,
    command=_many(_TEXT),
    env=_many(_closed(("name",), name=_TEXT, valueFrom=_closed(fieldRef=_closed(("fieldPath",), fieldPath=_TEXT)))),
    ports=_many(_closed(("containerPort",), containerPort=_NUMBER, protocol=_TEXT)),
    readinessProbe=_closed(tcpSocket=_closed(("port",), port=_NUMBER), periodSeconds=_NUMBER),
    resources=_closed(requests=_QUANTITIES, limits=_QUANTITIES),
    securityContext=_closed(
        runAsUser=_NUMBER,
        runAsGroup=_NUMBER,
        allowPrivilegeEscalation=_FLAG,
        capabilities=_closed(drop=_many(_TEXT), add=_many(_TEXT)),
        seccompProfile=_closed(("type",), type=_TEXT),
    ),
    volumeMounts=_many(_closed(("mountPath", "name"), name=_TEXT, mountPath=_TEXT, readOnly=_FLAG)),
)
_POD = _closed(
    ("containers",),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    automountServiceAccountToken=_FLAG,
    enableServiceLinks=_FLAG,
    hostUsers=_FLAG,
    runtimeClassName=_TEXT,
    terminationGracePeriodSeconds=_NUMBER,
    containers=_many(_CONTAINER),
    volumes=_many(
        _closed(
            ("name",),
            name=_TEXT,
            configMap=_closed(name=_TEXT),
            secret=_closed(secretName=_TEXT, defaultMode=_NUMBER),
        )
    ),
)
_EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"

SCHEMAS: Mapping[str, Schema] = {
    "sandboxclaims": _kind(
        _EXTENSIONS,
        "SandboxClaim",
        _closed(
            ("warmPoolRef",),
            warmPoolRef=_NAMED,
            lifecycle=_closed(
                shutdownTime={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
                shutdownPolicy={"enum": ["Delete", "DeleteForeground", "Retain"]},
                ttlSecondsAfterFinished={"type": "integer", "minimum": 0},
            ),
        ),
    ),
    "sandboxwarmpools": _kind(
        _EXTENSIONS,
        "SandboxWarmPool",
        _closed(
            ("sandboxTemplateRef",),
            replicas={"type": "integer", "minimum": 0},
            sandboxTemplateRef=_NAMED,
            updateStrategy=_closed(type={"enum": ["Recreate", "OnReplenish"]}),
        ),
    ),
    "sandboxtemplates": _kind(
        _EXTENSIONS,
        "SandboxTemplate",
        _closed(
            ("podTemplate",),
            podTemplate=_closed(("spec",), spec=_POD),
            networkPolicyManagement={"enum": ["Managed", "Unmanaged"]},
            networkPolicy=_closed(
                ingress=_many(
                    {
                        "type": "object",
                        "properties": {
                            "from": _many(_closed(podSelector=_SELECTOR, namespaceSelector=_SELECTOR)),
                            "ports": _many(_closed(protocol=_TEXT, port=_NUMBER)),
                        },
                        "additionalProperties": False,
                    }
                ),
                egress=_many({"type": "object"}),
            ),
        ),
    ),
}
"""By the plural of a resource."""
