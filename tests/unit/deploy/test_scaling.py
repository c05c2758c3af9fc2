"""What the chart scales, and by what: existing metrics, existing workloads, never below one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

import promql_parser
import pytest
from tests.support.charts import CASES, Rendered, component, defaults, render
from tests.unit.docs.test_operate import PROCESS, families

SCALED: Final = {"driver", "interception", "sandbox"}
TRIGGERS: Final = [
    (service, trigger["name"], trigger["query"])
    for service in sorted(SCALED)
    for trigger in defaults()["autoscaling"][service]["triggers"]
]


@pytest.mark.parametrize(("service", "name", "query"), TRIGGERS)
def test_scaling_queries_use_existing_metrics_and_labels(service: str, name: str, query: str) -> None:
    """A query of what nobody tells would never scale anything."""
    assert promql_parser.parse(query) is not None
    names = re.findall(r"\b((?:penstock|process)_\w+)", query)
    assert names
    for found in names:
        base = re.sub(r"_(bucket|sum|count)$", "", found)
        assert found in PROCESS or found in families() or families()[base].kind == "histogram", found
    selectors = re.findall(r"\{([^}]*)\}", query)
    assert len(selectors) == len(names)  # each is of this release, and of what the PodMonitor adds
    for selector in selectors:
        labels = dict(re.findall(r'(\w+)="(\w+)"', selector))
        assert labels["release"] == "RELEASE" and labels.get("service", service) == service
        assert set(labels) <= {"release", "service"}
    assert name.startswith("penstock_")


def targets(rendered: Rendered) -> dict[str, tuple[str, str]]:
    """Kind and name of what each scaler scales, by service."""
    found = {}
    for one in rendered.kind("ScaledObject", "HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        assert target["apiVersion"] == "apps/v1"
        found[component(one)] = (target["kind"], target["name"])
    return found


@pytest.mark.parametrize("mode", ["keda", "hpa"])
def test_a_scaler_has_the_number_of_pods_alone(mode: str) -> None:
    """An upgrade that named a number of the values would undo it; without scalers the chart names it."""
    rendered = render(CASES[mode])
    assert targets(rendered) == {service: ("StatefulSet", f"penstock-{service}") for service in SCALED}
    for service, workload in rendered.workloads().items():
        assert ("replicas" in workload["spec"]) == (service not in SCALED)
    fixed = render({})
    assert not targets(fixed)
    assert all("replicas" in one["spec"] for one in fixed.workloads().values())
    partly = render({"autoscaling": {"mode": mode, "driver": {"enabled": False}}})
    assert set(targets(partly)) == SCALED - {"driver"}
    assert partly.workloads()["driver"]["spec"]["replicas"] == 2


KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "v1": {"Service": "services", "ServiceAccount": "serviceaccounts"},
    "apps/v1": {"StatefulSet": "statefulsets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}
"""What an API server knows of what the chart makes, by version."""


def _group(version: str) -> Mapping[str, Any]:
    """An API group as the server lists it."""
    name, _, number = version.partition("/")
    preferred = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [preferred], "preferredVersion": preferred}


@contextmanager
def cluster(replicas: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """An API server that has StatefulSets with these numbers of pods, by namespace and name; yields its URL."""
    answers: dict[str, Mapping[str, Any]] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name) for name in KINDS if "/" in name],
        },
    }
    for version, kinds in KINDS.items():
        answers[f"/apis/{version}" if "/" in version else f"/api/{version}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": [
                {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
                for kind, plural in kinds.items()
            ],
        }
    for (namespace, name), count in replicas.items():
        answers[f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"] = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": count},
        }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(found or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("program", ["helm3", "helm"])
def test_scaling_that_is_switched_on_keeps_the_pods_that_run(program: str) -> None:
    """A number that is there and is left out becomes 1: all other pods would be stopped, with their work."""
    there = {("penstock", "penstock-driver"): 5, ("penstock-sandboxes", "penstock-sandbox"): 0}
    values = {"autoscaling": {"mode": "hpa"}, "sandbox": {"namespace": "penstock-sandboxes", "replicas": 7}}
    with cluster(there) as url:
        options = ["--is-upgrade", "--dry-run=server", f"--kube-apiserver={url}", "--disable-openapi-validation"]
        workloads = render(values, *options, program=program).workloads()
    assert workloads["driver"]["spec"]["replicas"] == 5
    assert workloads["sandbox"]["spec"]["replicas"] == 0
    assert "replicas" not in workloads["interception"]["spec"]  # it is not there yet: the autoscaler's least


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("mode", ["keda", "hpa"])
def test_a_driver_that_a_scaler_takes_away_waits_for_its_rollouts(mode: str) -> None:
    """A pod that a scaler removes has no next one, which would go on with what it leaves."""
    pod = render({"autoscaling": {"mode": mode}}).pods()["driver"]
    told = _environment(pod)
    assert told["PENSTOCK_DRIVER_ON_STOP"] == ["drain"]
    assert pod["terminationGracePeriodSeconds"] > int(told["PENSTOCK_DRIVER_DRAIN_S"][0])
    own = {"autoscaling": {"mode": mode}, "driver": {"settings": {"on_stop": "leave"}}}
    assert _environment(render(own).pods()["driver"])["PENSTOCK_DRIVER_ON_STOP"] == ["leave"]
    for fixed in ({}, {"autoscaling": {"mode": mode, "driver": {"enabled": False}}}):
        assert "PENSTOCK_DRIVER_ON_STOP" not in _environment(render(fixed).pods()["driver"])


def _environment(pod: Mapping[str, Any]) -> dict[str, list[str]]:
    """The values of each variable of the first container: more than one is a mistake."""
    found: dict[str, list[str]] = {}
    for one in pod["containers"][0]["env"]:
        found.setdefault(one["name"], []).append(one.get("value", ""))
    return found


@pytest.mark.parametrize("mode", ["keda", "hpa"])
def test_machines_leave_one_at_a_time_and_never_all(mode: str) -> None:
    """The one with the highest ordinal, which drains."""
    for one in render(CASES[mode]).kind("ScaledObject", "HorizontalPodAutoscaler"):
        spec = one["spec"]
        least = spec.get("minReplicaCount", spec.get("minReplicas"))
        behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert least >= 1
        (policy,) = behavior["scaleDown"]["policies"]
        assert policy["type"] == "Pods" and policy["value"] == 1


def test_both_ways_of_scaling_have_the_same_signals() -> None:
    """A trigger's name is the adapter's metric."""
    keda, hpa = render(CASES["keda"]), render(CASES["hpa"])
    for service in SCALED:
        name = f"penstock-{service}"
        triggers = keda.by_name["ScaledObject", name]["spec"]["triggers"]
        metrics = hpa.by_name["HorizontalPodAutoscaler", name]["spec"]["metrics"]
        assert [one["name"] for one in triggers] == [one["external"]["metric"]["name"] for one in metrics]
        for trigger, metric in zip(triggers, metrics, strict=True):
            target = metric["external"]["target"]
            assert target["type"] == trigger["metricType"]
            assert target["value" if target["type"] == "Value" else "averageValue"] == trigger["metadata"]["threshold"]
            assert 'release="penstock"' in trigger["metadata"]["query"]
            assert trigger["authenticationRef"] == {"name": "prometheus"}


def test_prometheus_adds_the_labels_that_queries_and_dashboard_ask_for() -> None:
    """From each pod's metrics port, over TLS with the certificate's name, by the observer's token."""
    rendered = render(CASES["cert-manager and the Prometheus operator"])
    for one in rendered.kind("PodMonitor"):
        service = component(one)
        (endpoint,) = one["spec"]["podMetricsEndpoints"]
        added = {item["targetLabel"]: item["replacement"] for item in endpoint["relabelings"]}
        assert added == {"service": service, "release": "penstock"}
        workload = rendered.workloads()[service]
        assert one["spec"]["selector"] == workload["spec"]["selector"]
        assert one["metadata"]["namespace"] == workload["metadata"]["namespace"]
        names = [port["name"] for port in rendered.pods()[service]["containers"][0]["ports"]]
        assert endpoint["scheme"] == "https" and endpoint["port"] in names
        certificate = rendered.by_name["Certificate", f"penstock-{service}"]["spec"]
        assert endpoint["tlsConfig"]["serverName"] in certificate["dnsNames"]
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == certificate["secretName"]
        assert endpoint["authorization"]["credentials"] == {"name": "scrape", "key": "observer.token"}
