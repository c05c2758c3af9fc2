"""What every pod of the chart must have, whatever the values: rights, probes, grace, limits, credentials."""

from __future__ import annotations

import os
import re
import subprocess
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from pydantic import BaseModel, SecretStr
from tests.support.charts import CASES, CLAIMS, NAMESPACE, SERVICES, ChartRefused, component, defaults, render
from tests.unit.docs.pages import ROOT
from tests.unit.docs.test_commands import SETTINGS

from penstock.cli.commands.credentials import make
from penstock_chassis.homes import valid_name
from penstock_sandbox.backends.kubernetes.manifests import RULES, Choices, manifests
from tools.helm import CHART


def containers(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All containers of a pod, also those that start first."""
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def environment(container: Mapping[str, Any], pod_name: str) -> dict[str, str]:
    """The variables of a container as the kubelet sets them, but for what comes from Secrets."""
    found: dict[str, str] = {}
    for item in container.get("env", []):
        source = item.get("valueFrom", {})
        if source.get("fieldRef", {}).get("fieldPath") == "metadata.name":
            found[item["name"]] = pod_name
        elif not source:
            value = str(item["value"])
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[item["name"]] = value
    return found


def holds_secret(annotation: Any) -> bool:
    """Whether values of a type have a secret in them, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(holds_secret(info.annotation) for info in annotation.model_fields.values())
    return annotation is SecretStr or any(holds_secret(part) for part in typing.get_args(annotation))


DRIVER: Final = CHART / "templates" / "driver.yaml"

SECRETS: Final = [
    (service, name)
    for service, settings in SETTINGS.items()
    for name, info in settings.model_fields.items()
    if holds_secret(info.annotation)
]
"""Every setting that holds a secret, by service."""


def claims(case: str) -> bool:
    """Whether the case's sandboxes are pods that the service claims."""
    return bool(CASES[case].get("sandbox", {}).get("backend") == "kubernetes")


@pytest.mark.requirement("R125")
@pytest.mark.parametrize("case", CASES)
def test_no_pod_beside_the_sandboxes_is_privileged(case: str) -> None:
    """The rest keeps to the standard `restricted`; nobody has a part of the machine's file system or its network."""
    for service, pod in render(CASES[case]).pods().items():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        allowed = {"projected", "emptyDir", "persistentVolumeClaim", "secret"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        assert [volume["name"] for volume in pod["volumes"] if "secret" in volume] == (
            ["keys"] if service == "sandbox" and claims(case) else []
        )
        privileged = {one["name"] for one in containers(pod) if one["securityContext"].get("privileged")}
        if service == "sandbox":
            wanted = {"local": {"sandbox"}, "docker": {"engine"}, "kubernetes": set()}
            assert privileged == wanted[CASES[case].get("sandbox", {}).get("backend", "local")]
        else:
            assert not privileged
        for one in containers(pod):
            own = {**pod.get("securityContext", {}), **one["securityContext"]}
            if one["name"] in privileged:
                continue
            assert own["runAsNonRoot"] and own["runAsUser"] == 10001
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not own["allowPrivilegeEscalation"] and own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"]


@pytest.mark.parametrize("case", CASES)
def test_sandboxes_alone_run_on_their_pool(case: str) -> None:
    """By its label and its taint; one service on each machine. A service that claims pods runs none itself."""
    rendered = render(CASES[case])
    for service, pod in rendered.pods().items():
        pooled = pod.get("nodeSelector", {}).get("penstock-pool") == "sandboxes"
        tolerates = any(one.get("key") in ("penstock-pool", None) for one in pod.get("tolerations", []))
        assert pooled == tolerates == (service == "sandbox" and not claims(case))
    workload = rendered.workloads()["sandbox"]
    if workload["kind"] == "StatefulSet" and not claims(case):
        rules = workload["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
        (rule,) = rules["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert rule["labelSelector"] == workload["spec"]["selector"]


@pytest.mark.requirement("R117")
@pytest.mark.parametrize("case", CASES)
def test_a_pod_that_drains_is_not_killed_for_it(case: str) -> None:
    """Health is readiness alone, life is an open port, and the grace is longer than the longest stop."""
    for service, pod in render(CASES[case]).pods().items():
        one = next(item for item in pod["containers"] if item["name"] == service)
        port = SETTINGS[service].model_fields["port"].default
        assert {"name": service, "containerPort": port, "protocol": "TCP"} in one["ports"]
        ready = one["readinessProbe"]["exec"]["command"]
        assert ready == ["python3", "-m", "penstock_chassis.healthcheck", f"localhost:{port}"]
        assert one["readinessProbe"]["timeoutSeconds"] > 4.0  # the command's own
        for probe in ("livenessProbe", "startupProbe"):
            assert one[probe]["tcpSocket"] == {"port": service} and "exec" not in one[probe]
        told = environment(one, "x")
        prefix = f"PENSTOCK_{service.upper()}"
        stop = float(told[f"{prefix}_DRAIN_S"]) + float(told[f"{prefix}_STOP_S"])
        assert pod["terminationGracePeriodSeconds"] > stop


def test_the_containers_of_a_pod_stop_after_the_service() -> None:
    """An engine that ends at SIGTERM would end all sandboxes of a service that drains for an hour."""
    pod = render(CASES["docker"]).pods()["sandbox"]
    assert pod["shareProcessNamespace"]  # the hook looks for the service's process
    others = [one for one in pod["containers"] if one["name"] != "sandbox"]
    assert others and all("[p]enstock-sandbox" in str(one["lifecycle"]["preStop"]) for one in others)


@pytest.mark.parametrize(
    ("answers", "looks"),
    [
        ("exit 0", 6),  # until the service has ended
        ("exit $(( $(wc -l <looks) == 2 ))", 6),  # once too busy to answer
        ("exit 1", 3),
    ],
)
def test_an_engine_waits_for_its_service_as_long_as_it_answers_itself(
    answers: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs is restarted by its probe: waiting for a service that cannot end without it would take an hour."""
    programs = {"pgrep": "echo >>looks\n[ $(wc -l <looks) -lt 6 ]", "docker": answers, "sleep": "exit 0"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    engine = next(one for one in render(CASES["docker"]).pods()["sandbox"]["containers"] if one["name"] == "engine")
    subprocess.run(engine["lifecycle"]["preStop"]["exec"]["command"], cwd=tmp_path, check=False, timeout=60)
    assert (tmp_path / "looks").read_text().count("\n") == looks


@pytest.mark.parametrize("case", CASES)
def test_every_container_has_requests_and_limits(case: str) -> None:
    """Of memory and processor; what lies on the machine's disk is bounded too."""
    for pod in render(CASES[case]).pods().values():
        for one in containers(pod):
            assert {"cpu", "memory"} <= set(one["resources"]["requests"])
            assert {"cpu", "memory"} <= set(one["resources"]["limits"])
        bounded = [one["emptyDir"] for one in pod["volumes"] if "emptyDir" in one and one["name"] != "engine-socket"]
        assert bounded and all("sizeLimit" in one for one in bounded)


@pytest.mark.parametrize("case", CASES)
def test_every_service_has_a_disruption_budget(case: str) -> None:
    """One pod at a time; a DaemonSet's pods are never evicted."""
    rendered = render(CASES[case])
    budgets = {component(one): one for one in rendered.kind("PodDisruptionBudget")}
    workloads = {name: one for name, one in rendered.workloads().items() if one["kind"] == "StatefulSet"}
    assert set(budgets) == set(workloads)
    for service, one in budgets.items():
        assert one["spec"] == {"maxUnavailable": 1, "selector": workloads[service]["spec"]["selector"]}
        assert one["metadata"]["namespace"] == workloads[service]["metadata"]["namespace"]


@pytest.mark.requirement("R1", "R8")
@pytest.mark.parametrize("case", CASES)
def test_no_secret_is_in_an_environment(case: str) -> None:
    """Tokens and keys come as files, and each service has its own only."""
    mounted: dict[str, set[str]] = {}
    for service, pod in render(CASES[case]).pods().items():
        secret = {
            SETTINGS[service].env_name(name)
            for name, info in SETTINGS[service].model_fields.items()
            if "SecretStr" in str(info.annotation)
        }
        assert secret
        for one in containers(pod):
            assert not secret & {item["name"] for item in one.get("env", []) if "value" in item}
            assert "envFrom" not in one
        (volume,) = [one["projected"] for one in pod["volumes"] if one["name"] == "credentials"]
        assert volume["defaultMode"] == 0o440
        mounted[service] = {source["secret"]["name"] for source in volume["sources"]}
        assert [item["path"] for source in volume["sources"] for item in source["secret"]["items"]] == [
            "config.toml", "tls.crt", "tls.key", "ca.crt",
        ]  # fmt: skip
    names = [name for found in mounted.values() for name in found]
    assert len(set(names)) == len(names)


@pytest.mark.requirement("R1", "R8")
@pytest.mark.parametrize(("service", "name"), SECRETS)
def test_every_setting_that_holds_a_secret_is_refused_among_values(service: str, name: str) -> None:
    """Helm keeps a release's values, and a pod's environment is shown to everyone who may read pods."""
    with pytest.raises(ChartRefused, match=f"{service}.settings.{name} can hold a secret"):
        render({service: {"settings": {name: {}}}})
    variable = SETTINGS[service].env_name(name)
    with pytest.raises(ChartRefused, match=f"{variable} can be a secret"):
        render({service: {"env": [{"name": variable, "value": "x"}]}})


def test_limits_and_paths_are_no_secrets() -> None:
    """Although their names end as those of secrets do."""
    told = [
        {"name": "VLLM_MAX_N_TOKENS", "value": "5"},
        {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/run/keys/google.json"},
    ]
    pods = render({"inference": {"settings": {"max_context_tokens": 8192}, "env": told}}).pods()
    found = environment(pods["inference"]["containers"][0], "x")
    assert found["PENSTOCK_INFERENCE_MAX_CONTEXT_TOKENS"] == "8192"
    assert all(found[item["name"]] == item["value"] for item in told)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"driver": {"settings": {"operator_token": "x"}}}, "can hold a secret"),
        ({"driver": {"settings": {"drain_s": 5}}}, "set by the chart itself"),
        ({"sandbox": {"env": [{"name": "HF_TOKEN", "value": "x"}]}}, "can be a secret"),
        ({"sandbox": {"env": [{"name": "MAX_API_KEY", "value": "x"}]}}, "can be a secret"),
        ({"inference": {"model": {"claim": ""}}}, "inference.model.claim"),
        ({"autoscaling": {"mode": "keda"}, "sandbox": {"kind": "DaemonSet"}}, "a DaemonSet has as many pods"),
        ({"credentials": {"certManager": {"enabled": True}}}, "name the issuer"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "name the Secret"),
        ({"drivers": {}}, "drivers"),
        ({"driver": {"resources": {"limits": None}}}, "limits"),
        ({"networkPolicy": {"clients": [{}]}}, "clients"),
        ({"sandbox": {"backend": "kubernetes"}}, "sandbox.kubernetes.warmPool"),
        ({"sandbox": {"backend": "kubernetes", "kubernetes": {"warmPool": "p"}}}, "kubectl get endpoints kubernetes"),
        ({"sandbox": {"backend": "kubernetes", "kubernetes": CLAIMS, "kind": "DaemonSet"}}, "a StatefulSet"),
        ({"sandbox": {"settings": {"kubernetes_keys": "/x"}}}, "set by the chart itself"),
        ({"interception": {"settings": {"inference_members": "dns:x:1"}}}, "set by the chart itself"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Mapping[str, Any], why: str) -> None:
    """Before anything is applied."""
    with pytest.raises(ChartRefused, match=why):
        render(values)


def test_a_release_name_too_long_for_ids_is_refused() -> None:
    """A pod's name is the service's in ids: the longest that the chart makes is a valid one."""
    with pytest.raises(ChartRefused, match="longer than 15 characters"):
        render({}, release="reinforcement")
    longest = f"{'penstock-team-a'}-interception-999"
    assert ("StatefulSet", longest.removesuffix("-999")) in render({}, release="penstock-team-a").by_name
    assert valid_name(longest) == longest


@pytest.mark.parametrize("case", CASES)
def test_services_accept_the_environment_of_their_pods(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files that `penstock credentials` makes: every setting is one, and its value is valid."""
    make(tmp_path / "credentials", (), 1)
    for service, pod in render(CASES[case]).pods().items():
        # A link variable of a Service would be read as a setting.
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is (service == "sandbox" and claims(case))
        one = next(item for item in pod["containers"] if item["name"] == service)
        told = environment(one, f"penstock-{service}-0")
        assert told["PENSTOCK_CONFIG"] == "/run/penstock/config.toml"
        told["PENSTOCK_CONFIG"] = str(tmp_path / "credentials" / f"{service}.toml")
        told[f"PENSTOCK_{service.upper()}_HOST"] = "0.0.0.0"  # the image's
        with monkeypatch.context() as patched:
            for name, value in told.items():
                patched.setenv(name, value)
            settings = SETTINGS[service].load([])
        kept_name = case != "a daemon set" or service != "sandbox"
        assert settings.name == (f"penstock-{service}-0" if kept_name else "")
        assert settings.operator_token is not None and settings.metrics_host == "0.0.0.0"


@pytest.mark.parametrize("case", CASES)
def test_each_variable_is_set_once_by_the_chart_or_by_the_user(case: str) -> None:
    """Of two values, the last would count without a word: what the chart sets is refused among `settings`, or left out
    where they have it."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    (listed,) = re.findall(r"\$own := list ([^}]*) -}}", helpers)
    left_out = set(re.findall(r'not \(hasKey \.Values\.\w+\.settings "(\w+)"\)', DRIVER.read_text(encoding="utf-8")))
    refused = set(re.findall(r'"(\w+)"', listed)) | left_out
    for service, pod in render(CASES[case]).pods().items():
        given = {
            f"PENSTOCK_{service.upper()}_{key.upper()}" for key in CASES[case].get(service, {}).get("settings", {})
        }
        for one in containers(pod):
            names = [item["name"] for item in one.get("env", [])]
            assert len(set(names)) == len(names)
            own = {name for name in names if name.startswith(f"PENSTOCK_{service.upper()}_")} - given
            assert {name.removeprefix(f"PENSTOCK_{service.upper()}_").lower() for name in own} <= refused


def test_images_are_those_of_the_compose_file() -> None:
    """What `make images` builds, of the product's version."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for service, pod in render({}).pods().items():
        name = compose[service]["image"].replace("${PENSTOCK_IMAGES:-penstock}", "penstock")
        assert pod["containers"][0]["image"] == name.replace("${PENSTOCK_VERSION:-0.1.0}", "0.1.0")
    own = render({"sandbox": {"image": "registry.example/tools:3"}, "driver": {"tag": "2"}}).pods()
    assert own["sandbox"]["containers"][0]["image"] == "registry.example/tools:3"
    assert own["driver"]["containers"][0]["image"] == "penstock/driver:2"


@pytest.mark.parametrize("case", CASES)
def test_no_account_has_a_right_but_to_claim_sandboxes(case: str) -> None:
    """The service that claims them has what the backend asks for, in their namespace; nobody else asks the cluster."""
    rendered = render(CASES[case])
    assert not rendered.kind("ClusterRole", "ClusterRoleBinding")
    values = CASES[case].get("sandbox", {})
    given = claims(case) and values["kubernetes"].get("rbac", True)
    roles, bindings = rendered.kind("Role"), rendered.kind("RoleBinding")
    assert len(roles) == len(bindings) == (1 if given else 0)
    for role, binding in zip(roles, bindings, strict=True):
        assert role["rules"] == list(RULES)
        home = values.get("namespace") or NAMESPACE
        namespace = values["kubernetes"].get("namespace") or home
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == namespace
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        account = rendered.pods()["sandbox"]["serviceAccountName"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": home}]
    accounts = {one["metadata"]["name"]: one for one in rendered.kind("ServiceAccount")}
    for pod in rendered.pods().values():
        assert accounts[pod["serviceAccountName"]]["automountServiceAccountToken"] is False


def test_claimed_sandboxes_get_the_keys_that_the_backend_prints() -> None:
    """From the Secret of the command's name, with its files, where the service looks for them."""
    objects = manifests(Choices(namespace="pods", service_namespace="penstock"))["items"]
    (printed,) = [one for one in objects if one["metadata"]["name"] == "penstock-service" and one["kind"] == "Secret"]
    assert printed["metadata"]["namespace"] == "penstock"  # where the service is, which mounts it
    pod = render(CASES["claimed sandboxes"]).pods()["sandbox"]
    (volume,) = [one["secret"] for one in pod["volumes"] if one["name"] == "keys"]
    assert volume["secretName"] == "penstock-service" and volume["defaultMode"] == 0o440
    assert {item["key"] for item in volume["items"]} == set(printed["stringData"])
    (container,) = pod["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "keys"]
    assert mount["mountPath"] == environment(container, "x")["PENSTOCK_SANDBOX_KUBERNETES_KEYS"] and mount["readOnly"]


def test_values_name_all_services_in_the_same_way() -> None:
    """So that what one has of tags, settings, drains and rules, all have."""
    values = defaults()
    common = set.intersection(*(set(values[service]) for service in SERVICES))
    assert {"tag", "drainSeconds", "stopSeconds", "settings", "env", "resources", "egress"} <= common
