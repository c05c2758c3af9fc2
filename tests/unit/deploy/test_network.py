"""Who may speak to whom, by the chart's policies: each pair that the services use, and nothing more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import pytest
from tests.support.charts import CASES, MODEL, NAMESPACE, Rendered, component, render
from tests.unit.deploy.test_pods import environment
from tests.unit.docs.test_commands import SETTINGS

from penstock_chassis.membership import members
from tools import helm

Edge = tuple[str, str, int]
INSIDE: Final[frozenset[Edge]] = frozenset(
    {
        ("driver", "sandbox", 7701),
        ("driver", "driver", 7702),
        ("driver", "interception", 7703),
        ("sandbox", "interception", 7780),
        ("interception", "inference", 7704),
    }
)
"""docs/interfaces.md: which service calls which."""
CLIENTS: Final = {"driver": 7702, "interception": 7703, "sandbox": 7701, "inference": 7704}
METRICS: Final = {"driver": 7712, "interception": 7713, "sandbox": 7711, "inference": 7714}


SANDBOX_PORT: Final = 7790
"""Of the entrypoint of a claimed pod."""


def services_of(peer: Mapping[str, Any], rendered: Rendered, home: str) -> set[str]:
    """The services whose pods a peer means; empty where it means others."""
    if "app.kubernetes.io/component" not in peer.get("podSelector", {}).get("matchLabels", {}):
        return set()
    wanted = peer["podSelector"]["matchLabels"]
    place = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", home)
    return {
        service
        for service, one in rendered.workloads().items()
        if wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        and one["metadata"]["namespace"] == place
    }


def ports(rule: Mapping[str, Any]) -> list[tuple[str, int]]:
    """A rule's protocols and ports: it must name some."""
    return [(one["protocol"], one["port"]) for one in rule["ports"]]


def edges(rendered: Rendered, direction: str, key: str) -> set[Edge]:
    """The pairs within the release that one direction of all policies allows."""
    found: set[Edge] = set()
    for policy in rendered.kind("NetworkPolicy"):
        service, home = component(policy), policy["metadata"]["namespace"]
        for rule in policy["spec"].get(direction, []):
            assert rule[key], "a rule without peers is of everyone"
            for peer in rule[key]:
                for other in services_of(peer, rendered, home):
                    pair = (other, service) if direction == "ingress" else (service, other)
                    found |= {(*pair, port) for _, port in ports(rule)}
    return found


def outside(rendered: Rendered, direction: str, key: str) -> Iterable[tuple[str, Any, tuple[str, int]]]:
    """What one direction allows with others than the release's pods."""
    for policy in rendered.kind("NetworkPolicy"):
        for rule in policy["spec"].get(direction, []):
            for peer in rule[key]:
                if not services_of(peer, rendered, policy["metadata"]["namespace"]):
                    for port in ports(rule):
                        yield component(policy), peer, port


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("case", CASES)
def test_policies_allow_what_services_use_and_nothing_more(case: str) -> None:
    """From both ends; every pod of the release is of one policy, so that the rest is refused."""
    rendered = render(CASES[case])
    present = set(rendered.workloads())
    used = {edge for edge in INSIDE if {edge[0], edge[1]} <= present}
    if CASES[case].get("inference", {}).get("replicas", 1) > 1:  # the weights in force, for those that come later
        used.add(("inference", "inference", 7704))
    assert edges(rendered, "ingress", "from") == used
    assert edges(rendered, "egress", "to") == used
    policies = {component(one): one for one in rendered.kind("NetworkPolicy")}
    assert set(policies) == present
    for service, one in policies.items():
        workload = rendered.workloads()[service]
        assert one["spec"]["podSelector"] == workload["spec"]["selector"]
        assert one["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert one["metadata"]["namespace"] == workload["metadata"]["namespace"]


def test_others_reach_the_services_ports_alone() -> None:
    """Clients the services, Prometheus the metrics, nobody the ingress; sandboxes ask registries."""
    rendered = render({})
    came = list(outside(rendered, "ingress", "from"))
    clients = {(service, port) for service, peer, (_, port) in came if "podSelector" in peer}
    assert clients == set(CLIENTS.items())
    assert {(service, port) for service, peer, (_, port) in came if "podSelector" not in peer} == set(METRICS.items())
    went = list(outside(rendered, "egress", "to"))
    assert {(service, *port) for service, peer, port in went if "ipBlock" not in peer} == {
        (service, protocol, 53) for service in CLIENTS for protocol in ("UDP", "TCP")
    }
    (registry,) = [found for found in went if "ipBlock" in found[1]]
    assert registry[0] == "sandbox" and registry[2] == ("TCP", 443)
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(registry[1]["ipBlock"]["except"])


@pytest.mark.parametrize(
    ("case", "namespace"),
    [
        ("claimed sandboxes", {}),
        ("claimed sandboxes in namespaces of their own", {"kubernetes.io/metadata.name": "pods"}),
    ],
)
def test_the_service_that_claims_sandboxes_reaches_them_and_the_cluster(
    case: str, namespace: Mapping[str, str]
) -> None:
    """No other service does: the pods of the claims' namespace at their port, the API server at its address."""
    fixed = set(map(str, outside(render({}), "egress", "to")))
    more = [found for found in outside(render(CASES[case]), "egress", "to") if str(found) not in fixed]
    (pods, server) = more
    assert pods[0] == server[0] == "sandbox"
    assert pods[1].get("namespaceSelector", {}).get("matchLabels", {}) == namespace and pods[1]["podSelector"] == {}
    assert pods[2] == ("TCP", SANDBOX_PORT) == ("TCP", SETTINGS["sandbox"].model_fields["kubernetes_port"].default)
    assert server[1] == {"ipBlock": {"cidr": "10.0.0.1/32"}} and server[2] == ("TCP", 6443)


def test_empty_lists_of_peers_close_and_do_not_open() -> None:
    """To Kubernetes, no peers are all peers."""
    rendered = render(CASES["closed"])
    assert not list(outside(rendered, "ingress", "from"))
    assert not [found for found in outside(rendered, "egress", "to") if found[2][1] != 53]


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("case", CASES)
def test_members_are_asked_of_headless_services_that_name_all_pods(case: str) -> None:
    """Also those that are not ready: a member that drains and leaves the name would be lost, with its attempts."""
    rendered = render(CASES[case])
    told = environment(rendered.pods()["driver"]["containers"][0], "penstock-driver-0")
    for kind in ("driver", "sandbox", "interception"):
        source = members.parse(told[f"PENSTOCK_DRIVER_{kind.upper()}_MEMBERS"])
        assert isinstance(source, members.Dns) and source.port == CLIENTS[kind]
        name, namespace, suffix = source.host.split(".")
        service, workload = rendered.by_name["Service", name], rendered.workloads()[kind]
        assert suffix == "svc" and service["metadata"]["namespace"] == namespace == workload["metadata"]["namespace"]
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"]
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] == name


@pytest.mark.requirement("R125")
def test_gates_and_engines_find_all_engines_by_one_name() -> None:
    """Gates use any number as one source; several know each other, and one alone keeps no weights for others."""
    for case, several in (("as it comes", False), ("several engines", True)):
        rendered = render(CASES[case])
        pods = rendered.pods()
        gate = environment(pods["interception"]["containers"][0], "penstock-interception-0")
        engine = environment(pods["inference"]["containers"][0], "penstock-inference-0")
        name = f"dns:penstock-inference.{NAMESPACE}.svc:7704"
        assert gate["PENSTOCK_INTERCEPTION_INFERENCE_MEMBERS"] == name
        assert "PENSTOCK_INTERCEPTION_INFERENCE_ADDRESS" not in gate
        assert engine.get("PENSTOCK_INFERENCE_POOL_MEMBERS") == (name if several else None)
        service = rendered.by_name["Service", "penstock-inference"]["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert render(CASES["several engines"]).workloads()["inference"]["spec"]["replicas"] == 3


def test_engines_elsewhere_are_one_address_or_a_list() -> None:
    """As the values say."""
    for case, variable in (("an engine elsewhere", "ADDRESS"), ("engines elsewhere", "MEMBERS")):
        gate = environment(render(CASES[case]).pods()["interception"]["containers"][0], "penstock-interception-0")
        told = {name: value for name, value in gate.items() if name.startswith("PENSTOCK_INTERCEPTION_INFERENCE_")}
        assert told.pop("PENSTOCK_INTERCEPTION_INFERENCE_CA")
        assert told == {f"PENSTOCK_INTERCEPTION_INFERENCE_{variable}": CASES[case]["inference"]["address"]}


@pytest.mark.parametrize("case", CASES)
def test_sandboxes_may_reach_the_ingress_of_every_gate(case: str) -> None:
    """And no other address: the pattern ends with the gates' own name and port."""
    pods = render(CASES[case]).pods()
    ordinal = environment(pods["interception"]["containers"][0], "penstock-interception-7")
    address = ordinal["PENSTOCK_INTERCEPTION_INGRESS_ADDRESS"]
    assert address == f"tls:penstock-interception-7.penstock-interception.{NAMESPACE}.svc:7780"
    sandbox = next(one for one in pods["sandbox"]["containers"] if one["name"] == "sandbox")
    told = environment(sandbox, "penstock-sandbox-0")
    patterns = json.loads(told["PENSTOCK_SANDBOX_ALLOWED_UPSTREAMS"])  # the settings read it: test_pods.py
    assert any(fnmatchcase(address, pattern) for pattern in patterns)
    for other in ("tls:example.com:7780", address.replace("7780", "7703"), address.replace("tls:", "")):
        assert not any(fnmatchcase(other, pattern) for pattern in patterns)


@pytest.mark.parametrize("case", CASES)
def test_certificates_have_every_name_that_is_dialled(case: str) -> None:
    """By cert-manager's; the guide's command makes the same by hand (tests/unit/deploy/test_guide.py)."""
    values = {**CASES[case], "credentials": CASES["cert-manager and the Prometheus operator"]["credentials"]}
    rendered = render(values)
    certificates = {component(one): one for one in rendered.kind("Certificate")}
    assert set(certificates) == set(rendered.workloads())
    for service, names in dialled(rendered).items():
        certified = certificates[service]["spec"]["dnsNames"]
        assert all(any(covers(pattern, name) for pattern in certified) for name in names), (service, names)
        secret = certificates[service]["spec"]["secretName"]
        assert secret in str(rendered.pods()[service]["volumes"])


def dialled(rendered: Rendered, release: str = "penstock") -> dict[str, set[str]]:
    """The host names at which each service of a release is called: by others, by clients, by its probe."""
    pods = rendered.pods()
    driver = environment(pods["driver"]["containers"][0], f"{release}-driver-0")
    gate = environment(pods["interception"]["containers"][0], f"{release}-interception-0")
    found = {service: {"localhost", f"{release}.{NAMESPACE}.svc"} for service in pods}
    for kind in ("driver", "sandbox", "interception"):
        found[kind].add(driver[f"PENSTOCK_DRIVER_{kind.upper()}_MEMBERS"].split(":")[1])
    found["interception"].add(gate["PENSTOCK_INTERCEPTION_INGRESS_ADDRESS"].split(":")[1])
    if "inference" in pods:
        found["inference"].add(gate["PENSTOCK_INTERCEPTION_INFERENCE_MEMBERS"].split(":")[1])
    for service, workload in rendered.workloads().items():  # one pod, as `penstock drain` names it
        found[service].add(f"{release}-{service}-0.{release}-{service}.{workload['metadata']['namespace']}.svc")
    return found


def covers(pattern: str, name: str) -> bool:
    """Whether a certificate's name is valid for a host: a star is one label."""
    if not pattern.startswith("*."):
        return pattern == name
    return "." in name and name.split(".", 1)[1] == pattern[2:]


@pytest.mark.parametrize("case", CASES)
def test_clients_have_one_name_and_a_port_for_each_service(case: str) -> None:
    """Each port leads to the pods that have it, by its name: a Service selects none of another namespace."""
    rendered = render(CASES[case])
    service = rendered.by_name["Service", "penstock"]
    near = {name for name, one in rendered.workloads().items() if one["metadata"]["namespace"] == NAMESPACE}
    assert {one["name"] for one in service["spec"]["ports"]} == near
    for one in service["spec"]["ports"]:
        assert CLIENTS[one["name"]] == one["port"]
        having = [
            name
            for name, pod in rendered.pods().items()
            if any(port["name"] == one["targetPort"] for item in pod["containers"] for port in item.get("ports", ()))
        ]
        assert having == [one["name"]]
    for workload in rendered.workloads().values():
        assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("namespace", ["", NAMESPACE, "pods"])
def test_who_installs_the_chart_is_told_where_clients_reach_each_service(namespace: str) -> None:
    """Sandbox services of another namespace have an address of their own."""
    values = {**MODEL, "sandbox": {"namespace": namespace}}
    command = [str(helm.program("helm")), "install", "penstock", str(helm.CHART), "--dry-run=client", "--values", "-"]
    done = subprocess.run(
        [*command, "--namespace", NAMESPACE], input=json.dumps(values), capture_output=True, text=True, check=True
    )
    told = done.stdout.rpartition("networkPolicy.clients names: ")[2].strip()
    alone = "penstock.penstock.svc, ports 7702, 7703, 7704; penstock-sandbox.pods.svc, port 7701."
    assert told == (alone if namespace == "pods" else "penstock.penstock.svc, ports 7701, 7702, 7703, 7704.")
