"""A stack on Kubernetes: its values and Secrets, what it says of pods, what it refuses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.support.charts import render
from tests.support.release_commands.installing import put
from tests.support.waiting import eventually
from tests.unit.deploy.test_network import covers, dialled
from tests.unit.deploy.test_pods import SECRETS

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES, Endpoints, read_connection, write_connection
from penstock.launchers import Stack, on_kubernetes
from penstock.launchers.kubernetes_release import (
    OPEN,
    SECRET,
    Release,
    chart_values,
    may_be_secret,
    progress,
    read_values,
    secrets_of,
    settings_tables,
)
from penstock.launchers.kubernetes_tools import chart
from penstock.local.certificates import Authority
from penstock.local.processes import hold
from tools.helm import CHART

CLAIM = {"inference": {"model": {"claim": "model"}}}


def values(given: dict[str, Any], *, outside: bool = False, **options: Any) -> Any:
    """As a stack makes them."""
    return chart_values(given, outside=outside, **{"nodes": None, "gpus": 0, "settings": {}, **options})


def test_the_charts_directory_is_found_from_a_checkout() -> None:
    assert chart() == CHART


def test_options_go_over_values_and_values_over_the_stacks_own() -> None:
    given = {**CLAIM, "driver": {"drainSeconds": 90}, "sandbox": {"replicas": 5}}
    made = values(given, nodes=2, gpus=4, settings={"driver": {"max_running": 9}})
    assert made["driver"] == {"replicas": 1, "drainSeconds": 90, "settings": {"max_running": 9}}
    assert made["sandbox"]["replicas"] == 2 and made["inference"]["enabled"]
    rendered = render(made, release="penstock-abcdef")
    limits = rendered.pods()["inference"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4 and "memory" in limits
    assert not values({})["inference"]["enabled"]


def test_settings_that_may_be_secret_are_those_that_the_chart_refuses() -> None:
    """And they go into the Secret, whatever service they are of."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    (patterns,) = re.findall(r'if and \(regexMatch "([^"]*)" \$key\) \(not \(regexMatch "([^"]*)" \$key\)\)', helpers)
    assert patterns == (SECRET.pattern, OPEN.pattern)
    settings: dict[str, dict[str, Any]] = {
        "inference": {"upstream_api_key": "hidden", "replicas": 2, "max_context_tokens": 8192},
        "sandbox": {"image_credentials": {"docker.io": "user:hidden"}, "egress_tokens": {"npm.example": "hidden"}},
    }
    made = values(CLAIM, settings=settings)
    assert made["inference"]["settings"] == {"replicas": 2, "max_context_tokens": 8192}
    assert made["sandbox"]["settings"] == {}
    release = Release("penstock-abcdef", "rl", made)
    tables = settings_tables(release, settings, {}, operator="o", trainer="t", node="n")
    assert tables["inference"]["upstream_api_key"] == "hidden" and "replicas" not in tables["inference"]
    assert settings["sandbox"].items() <= tables["sandbox"].items()


@pytest.mark.requirement("R1", "R8")
def test_every_setting_that_holds_a_secret_goes_into_the_secret() -> None:
    """Of all services; what the chart sets by itself it must see, to refuse it by name."""
    assert [name for _, name in SECRETS if not may_be_secret(name)] == []
    assert not may_be_secret("kubernetes_keys")


def test_secrets_are_those_that_pods_mount_with_every_name_that_is_dialled() -> None:
    """In the namespace of the pods; each service's certificate is also valid for a forwarded port."""
    made = values({**CLAIM, "sandbox": {"namespace": "pods"}})
    release = Release("penstock-abcdef", "penstock", made)
    tables = settings_tables(release, {}, {"big": {"base_url": "http://x/v1"}}, operator="o", trainer="t", node="n")
    assert "o" not in tables["sandbox"].values()  # what an agent finds that breaks out
    found = {one["metadata"]["name"]: one for one in secrets_of(release, Authority(1), tables)["items"]}
    rendered = render(made, release=release.name)
    names = dialled(rendered, release.name)
    for service, workload in rendered.workloads().items():
        (volume,) = [one for one in rendered.pods()[service]["volumes"] if one["name"] == "credentials"]
        secret = found[f"{release.name}-{service}"]
        for source in volume["projected"]["sources"]:
            assert source["secret"]["name"] == secret["metadata"]["name"]
            assert {item["key"] for item in source["secret"]["items"]} <= set(secret["stringData"])
            assert secret["metadata"]["namespace"] == workload["metadata"]["namespace"]
        certificate = x509.load_pem_x509_certificate(secret["stringData"]["tls.crt"].encode())
        certified = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = certified.get_values_for_type(x509.DNSName)
        assert all(any(covers(pattern, name) for pattern in known) for name in names[service]), (
            service,
            names[service],
        )
        assert [str(one) for one in certified.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert set(found) == {f"penstock-abcdef-{service}" for service in SERVICES}


def workload(kind: str, ready: int, **spec: Any) -> dict[str, Any]:
    """A StatefulSet or DaemonSet."""
    status = {"readyReplicas": ready} if kind == "StatefulSet" else {"numberReady": ready, "desiredNumberScheduled": 2}
    return {"kind": kind, "metadata": {"name": "x", "namespace": "rl"}, "spec": spec, "status": status}


def pod(**status: Any) -> dict[str, Any]:
    """A pod with a status."""
    return {"kind": "Pod", "metadata": {"name": "p-0", "namespace": "rl"}, "status": status}


def container(reason: str, restarts: int = 0) -> dict[str, Any]:
    """The status of a container that waits."""
    return {"name": "driver", "restartCount": restarts, "state": {"waiting": {"reason": reason}}}


def test_a_release_is_ready_when_all_pods_of_all_workloads_are() -> None:
    sets, daemons = workload("StatefulSet", 2, replicas=2), workload("DaemonSet", 2)
    assert progress([sets, daemons], 2).complete
    assert not progress([sets], 2).complete  # the other is not there yet
    assert not progress([workload("StatefulSet", 1, replicas=2), daemons], 2).complete
    assert not progress([sets, workload("DaemonSet", 1)], 2).complete
    assert not progress([], 0).complete


@pytest.mark.parametrize(
    ("status", "hopeless"),
    [
        ({"containerStatuses": [container("ImagePullBackOff")]}, True),
        ({"containerStatuses": [container("CreateContainerConfigError")]}, True),
        ({"containerStatuses": [container("CrashLoopBackOff", 3)]}, True),
        ({"containerStatuses": [container("CrashLoopBackOff", 2)]}, False),  # it may have come before what it needs
        ({"containerStatuses": [container("ErrImagePull")]}, False),
        ({"containerStatuses": [container("ContainerCreating")]}, False),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": "no machine"}]}, False),
        ({}, False),
    ],
)
def test_waiting_ends_at_once_only_where_it_is_useless(status: dict[str, Any], hopeless: bool) -> None:
    found = progress([workload("StatefulSet", 0, replicas=1), pod(**status)], 1)
    assert bool(found.hopeless) == hopeless
    assert (found.crashed == ("rl", "p-0", "driver")) == ("CrashLoopBackOff" in str(status) and hopeless)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_dir": "model"}, "inference.model.claim"),
        ({"engine": "vllm"}, "inference.engine"),
        ({"gpus": 1}, "inference.model.claim"),
        ({"nodes": 0}, "at least 1"),
        ({"values": {"credentials": {}}}, "makes its own Secrets"),
        ({"values": {"driver": {"replicas": 2}}}, "driver: from outside"),
        ({"values": {"autoscaling": {"mode": "keda"}}}, "driver: from outside"),
        ({"values": {"inference": {"replicas": 2}}}, "inference: from outside"),
        ({"values": {"inference": 1}}, "inference is not a mapping"),
        ({"values": "absent.yaml"}, "absent.yaml cannot be read"),
        ({"scratch": "/tmp"}, "scratch is not an option"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match=said) as caught:
        Stack(on="kubernetes", **options)
    assert caught.value.reason == "STACK_OPTION"


def test_inside_the_cluster_there_may_be_several_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    Stack(on="kubernetes", values={"driver": {"replicas": 2}, "autoscaling": {"mode": "keda"}})
    Stack(on="kubernetes", values={"inference": {"replicas": 2}})


def test_outside_the_cluster_sandbox_services_may_be_scaled() -> None:
    """Drivers place rollouts on all of them; what is called from outside is one of a kind."""
    fixed = {"enabled": False}
    scaling = {"mode": "keda", "driver": fixed, "interception": fixed}
    made = values({**CLAIM, "autoscaling": scaling, "sandbox": {"replicas": 4}}, outside=True)
    assert [made[service]["replicas"] for service in ("driver", "interception", "inference")] == [1, 1, 1]


@pytest.mark.parametrize(("there", "reason"), [("kubectl", "HELM_MISSING"), ("helm", "KUBECTL_MISSING")])
async def test_a_missing_program_is_named_with_how_to_get_it(
    there: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, (there,))
    with pytest.raises(ConfigurationError, match=r"https://(.|\n)*make helm") as caught:
        async with Stack(on="kubernetes", state_dir=tmp_path / "state"):
            pass
    assert caught.value.reason == reason
    assert not (tmp_path / "state").exists()


async def test_a_second_stack_in_a_directory_is_refused_before_it_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch)
    (tmp_path / "state").mkdir()
    first = hold(tmp_path / "state", "")
    try:
        with pytest.raises(ConfigurationError, match="in use by") as caught:
            async with Stack(on="kubernetes", kube_namespace="rl", state_dir=tmp_path / "state"):
                pass
    finally:
        os.close(first)
    assert caught.value.reason == "STATE_DIR_IN_USE"
    assert not (tmp_path / "state" / "ca.pem").exists()


@pytest.mark.requirement("R125")
async def test_the_time_without_a_forwarded_port_begins_when_the_port_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl prints its line once: a port that has led to a pod for longer than it may be away is not given up."""
    kubectl, starts = tmp_path / "kubectl", tmp_path / "starts"
    kubectl.write_text(  # forwards at its first start alone, and runs until it is killed
        f'#!/bin/sh\n[ -e "{starts}" ] || echo "Forwarding from 127.0.0.1:4711 -> 7702"\n'
        f'echo $$ >> "{starts}"\nexec sleep 600\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(on_kubernetes, "_PAUSE_S", 0.0)
    loop, ahead = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead[0])
    stack = on_kubernetes.KubernetesStack(state_dir=tmp_path / "state")
    stack.log_dir.mkdir(parents=True)
    port: asyncio.Future[int] = loop.create_future()
    forward = asyncio.create_task(stack._forward("driver", port))

    def failure() -> str:
        return "" if stack._failure is None else stack._failure.reason

    async def end_after(seconds: float, number: int) -> None:
        """Ends kubectl's start of this number, so long after it by the loop's clock."""
        await eventually(lambda: starts.exists() and starts.read_text().count("\n") >= number, f"start {number}")
        ahead[0] += seconds
        os.kill(int(starts.read_text().split()[-1]), signal.SIGTERM)

    try:
        assert await port == 4711
        await end_after(on_kubernetes._AWAY_S + 1, 1)
        await eventually(lambda: forward.done() or starts.read_text().count("\n") == 2, "kubectl is started again")
        assert failure() == ""
        await end_after(on_kubernetes._AWAY_S + 1, 2)
        await forward
        assert failure() == "FORWARD_LOST"
    finally:
        forward.cancel()
        await asyncio.wait([forward])


async def test_a_removal_that_is_interrupted_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that a person can remove it."""
    helm, started = tmp_path / "helm", tmp_path / "started"
    helm.write_text(f'#!/bin/sh\n: > "{started}"\nexec sleep 600\n')
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    stack = on_kubernetes.KubernetesStack(kube_namespace="rl", state_dir=tmp_path / "state")
    removal = asyncio.create_task(stack._remove(None))
    await eventually(started.exists, "helm runs")
    removal.cancel()
    await asyncio.wait([removal])
    assert removal.cancelled()
    assert f"helm uninstall {stack.id} -n rl" in caplog.text


def test_values_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("image: {registry: here}\n")
    assert read_values(tmp_path / "values.yaml") == {"image": {"registry": "here"}}
    (tmp_path / "values.yaml").write_text("- 1\n")
    with pytest.raises(ConfigurationError, match="not a YAML mapping"):
        read_values(tmp_path / "values.yaml")


def test_a_connection_file_keeps_that_others_are_not_looked_for(tmp_path: Path) -> None:
    """As where ports are forwarded: the addresses that a driver lists are of no use there."""
    for discover in (True, False):
        write_connection(tmp_path / "connection.json", Endpoints(token="t", discover=discover), pid=None)
        assert read_connection(tmp_path / "connection.json").discover is discover
