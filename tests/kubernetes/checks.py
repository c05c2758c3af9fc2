"""What must hold of the chart on a real API server. Each check is a function; its first line says what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import yaml
from tests.kubernetes import stacks
from tests.kubernetes.server import Cluster
from tests.support.charts import CASES, MODEL, NAMESPACE, SERVICES, component

from tools.helm import CHART

SANDBOXES: Final = "penstock-sandboxes"
CLAIMED: Final = "pods"
"""The namespaces that CASES name."""
_OPERATORS: Final = (
    ("keda.sh", "v1alpha1", "ScaledObject"),
    ("cert-manager.io", "v1", "Certificate"),
    ("monitoring.coreos.com", "v1", "PodMonitor"),
)
"""Kinds of operators that the chart renders. Here they take any field; tests/unit/deploy has their schemas."""


def values(case: Mapping[str, Any]) -> str:
    """A configuration as a file of values."""
    return json.dumps({**case, "inference": {**MODEL["inference"], **case.get("inference", {})}})


def prepared(cluster: Cluster) -> None:
    """Namespaces; a user with the role `admin` in them and no right elsewhere; the kinds of operators."""
    kinds = {"apiVersion": "v1", "kind": "List", "items": [_definition(*one) for one in _OPERATORS]}
    cluster.kubectl("apply", "-f", "-", data=json.dumps(kinds))
    for _, _, kind in _OPERATORS:
        cluster.eventually(lambda kind=kind: kind in cluster.kubectl("api-resources"), kind)  # type: ignore[misc]
    for namespace in (NAMESPACE, SANDBOXES, CLAIMED):
        cluster.kubectl("create", "namespace", namespace)
        cluster.kubectl(
            "--namespace", namespace, "create", "rolebinding", "installer", "--clusterrole=admin", "--user=installer"
        )
    cluster.eventually(
        lambda: cluster.kubectl("auth", "can-i", "create", "statefulsets.apps", "-n", NAMESPACE, user="installer",
                                check=False).startswith("yes"),
        "the installer's rights",
    )  # fmt: skip


def _definition(group: str, version: str, kind: str) -> Mapping[str, Any]:
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


def the_server_accepts_every_manifest(cluster: Cluster) -> str:
    """All configurations, rendered for this server and validated by it."""
    accepted = 0
    for case in CASES.values():
        place = ("penstock", str(CHART), "-n", NAMESPACE, "--values", "-", "--dry-run=server")
        manifests = list(yaml.safe_load_all(cluster.helm("template", *place, data=values(case))))
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        cluster.kubectl("apply", "--dry-run=server", "-f", "-", data=json.dumps(listed))
        accepted += len(manifests)
    return f"{accepted} manifests of {len(CASES)} configurations"


def both_helms_install_upgrade_and_remove(cluster: Cluster) -> str:
    """As a user who is `admin` in two namespaces only; budgets and autoscalers are this server's betas."""
    split = values({"sandbox": {"namespace": SANDBOXES, "replicas": 4}, "autoscaling": {"mode": "hpa"}})
    for program in ("helm3", "helm"):
        place = ("penstock", str(CHART), "-n", NAMESPACE, "--values", "-")
        cluster.helm("install", *place, user="installer", program=program, data=values({"driver": {"replicas": 3}}))
        cluster.helm("upgrade", *place, user="installer", program=program, data=values(CASES["hpa"]))
        # Scaling that is switched on keeps what runs: of a number that is left out the server makes 1.
        assert cluster.get("statefulset", "penstock-driver", "-n", NAMESPACE)["spec"]["replicas"] == 3
        budgets = cluster.get("poddisruptionbudgets", "-n", NAMESPACE)
        assert {one["metadata"]["name"] for one in budgets["items"]} == {f"penstock-{name}" for name in SERVICES}
        assert {one["apiVersion"] for one in budgets["items"]} == {"policy/v1beta1"}
        scalers = cluster.get("hpa", "-n", NAMESPACE)["items"]
        assert len(scalers) == 3
        cluster.helm("upgrade", *place, user="installer", program=program, data=split)
        assert len(cluster.get("statefulset", "-n", NAMESPACE)["items"]) == 3
        assert len(cluster.get("statefulset", "-n", SANDBOXES)["items"]) == 1
        cluster.helm("uninstall", "penstock", "-n", NAMESPACE, user="installer", program=program)
        cluster.eventually(lambda: not _pods(cluster), "the end of all pods")
        left = cluster.get("statefulset,service,networkpolicy,serviceaccount,hpa", "-n", NAMESPACE)["items"]
        assert not [one for one in left if "penstock" in one["metadata"]["name"]]
    return "Helm 3 and Helm 4"


def stacks_are_placed_waited_for_and_removed(cluster: Cluster) -> str:
    """`Stack(on="kubernetes")`, which leaves nothing, whether it started or not."""
    return stacks.check(cluster)


def accounts_have_no_right(cluster: Cluster) -> str:
    """Each service's account may do what an account that nobody gave anything may do, and no more."""

    def allowed(account: str) -> set[str]:
        listed = cluster.kubectl(
            "auth", "can-i", "--list", "-n", NAMESPACE, "--as", f"system:serviceaccount:{NAMESPACE}:{account}",
            "--as-group=system:serviceaccounts", "--as-group=system:authenticated",
        )  # fmt: skip
        return {" ".join(line.split()) for line in listed.splitlines()}

    plain = allowed("nobody")
    assert not any("secrets" in line or "pods" in line for line in plain)
    for service in SERVICES:
        assert allowed(f"penstock-{service}") == plain, service
    return f"{len(SERVICES)} accounts"


def names_have_members_that_drain_and_clients_have_those_that_are_ready(cluster: Cluster) -> str:
    """EndpointSlices by the real controller: a member that is not ready, or is being stopped, keeps its name."""
    ready = [f"penstock-{service}-{n}" for service in SERVICES for n in range(_count(service))]
    for number, pod in enumerate(ready):
        cluster.eventually(lambda pod=pod: pod in _pods(cluster), f"pod {pod}")  # type: ignore[misc]
        run_pod(cluster, pod, f"10.1.0.{number + 1}", ready=True)
    run_pod(cluster, "penstock-driver-1", f"10.1.0.{ready.index('penstock-driver-1') + 1}", ready=False)
    for service in SERVICES:
        everyone = {name for name in ready if name.startswith(f"penstock-{service}-")}
        cluster.eventually(
            lambda service=service, everyone=everyone: _told(cluster, f"penstock-{service}") == everyone,  # type: ignore[misc]
            f"the members of {service}",
        )
    served = {"driver": {"penstock-driver-0"}} | {
        service: {name for name in ready if name.startswith(f"penstock-{service}-")} for service in SERVICES[1:]
    }
    for service, names in served.items():
        cluster.eventually(
            lambda service=service, names=names: _told(cluster, "penstock", service) == names,  # type: ignore[misc]
            f"the client's port of {service}",
        )
    cluster.kubectl("scale", "statefulset", "penstock-sandbox", "--replicas=2", "-n", NAMESPACE)
    cluster.eventually(
        lambda: "deletionTimestamp" in _pods(cluster)["penstock-sandbox-2"]["metadata"],
        "the stop of the highest ordinal",
    )
    leaving = _pods(cluster)["penstock-sandbox-2"]
    assert leaving["metadata"]["deletionGracePeriodSeconds"] == 3640
    cluster.eventually(lambda: len(_told(cluster, "penstock", "sandbox")) == 2, "the client's port without it")
    assert "penstock-sandbox-2" in _told(cluster, "penstock-sandbox")
    return f"{len(ready)} pods, one not ready, one leaving"


def budgets_allow_one_eviction_at_a_time(cluster: Cluster) -> str:
    """Of two gates that are ready, the second is refused while the first leaves."""

    def evicted(pod: str) -> str:
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        return cluster.kubectl("create", "--raw", path, "-f", "-", data=json.dumps(body), check=False)

    cluster.eventually(
        lambda: cluster.get("pdb", "penstock-interception", "-n", NAMESPACE)["status"].get("disruptionsAllowed") == 1,
        "the budget of the gates",
    )
    assert '"Success"' in evicted("penstock-interception-0")
    refused = evicted("penstock-interception-1")
    assert "disruption budget" in refused, refused
    return "interception"


def _count(service: str) -> int:
    return {"driver": 2, "interception": 2, "sandbox": 3, "inference": 1}[service]


def _pods(cluster: Cluster) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in cluster.get("pods", "-n", NAMESPACE)["items"]}


def run_pod(
    cluster: Cluster, name: str, address: str, *, ready: bool, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """What a scheduler and a kubelet would say of a pod."""
    pod = _pods(cluster)[name]
    if "nodeName" not in pod["spec"]:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-of-{name}"}}
        cluster.kubectl("apply", "-f", "-", data=json.dumps(node))
        binding = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": f"node-of-{name}"},
        }  # fmt: skip
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/binding"
        cluster.kubectl("create", "--raw", path, "-f", "-", data=json.dumps(binding))
    status = {
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready)}], **more,
        }
    }  # fmt: skip
    cluster.kubectl("patch", "pod", name, "-n", NAMESPACE, "--subresource=status", "--patch", json.dumps(status))


def _told(cluster: Cluster, service: str, port: str = "") -> set[str]:
    """The pods that a Service leads to: of one port, those that its slices call ready; without, all that DNS tells."""
    found = set()
    path = f"/apis/discovery.k8s.io/v1beta1/namespaces/{NAMESPACE}/endpointslices"
    slices = json.loads(cluster.kubectl("get", "--raw", path))["items"]
    for one in slices:
        if one["metadata"]["labels"]["kubernetes.io/service-name"] != service:
            continue
        if port and port not in {item["name"] for item in one.get("ports") or ()}:
            continue
        found |= {
            item["targetRef"]["name"]
            for item in one.get("endpoints") or ()
            if item["conditions"].get("ready") is not False
        }
    return found


CHECKS: Final[Sequence[Callable[[Cluster], str]]] = (
    the_server_accepts_every_manifest,
    both_helms_install_upgrade_and_remove,
    stacks_are_placed_waited_for_and_removed,
    accounts_have_no_right,
    names_have_members_that_drain_and_clients_have_those_that_are_ready,
    budgets_allow_one_eviction_at_a_time,
)


def run(cluster: Cluster) -> Sequence[str]:
    """Runs all checks in order; returns what each showed. Raises AssertionError at the first that fails."""
    prepared(cluster)
    said = []
    for check in CHECKS:
        if check is accounts_have_no_right:  # this release stays for the rest
            place = ("penstock", str(CHART), "-n", NAMESPACE, "--values", "-")
            cluster.helm("install", *place, user="installer", data=values({}))
            assert {component(one) for one in cluster.get("statefulset", "-n", NAMESPACE)["items"]} == set(SERVICES)
        line = f"{check.__name__.replace('_', ' ')}: {check(cluster)}"
        print(line, flush=True)
        said.append(line)
    return said
