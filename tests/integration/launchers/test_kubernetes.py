"""A stack on Kubernetes from start to end: the chart as Helm renders it, services as its pods run them.

`helm` and `kubectl` are strict stand-ins; `python -m tests.kubernetes check` has the real ones, and no machines.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.hosts import model
from tests.support.charts import CLAIMS
from tests.support.release_commands import commands
from tests.support.release_commands.installing import objects, put
from tests.support.waiting import limits

from penstock.client import Mode, PenstockError, connect
from penstock.launchers import Stack, on_kubernetes
from penstock.launchers.kubernetes_release import Release
from penstock.local.stack import StackFailed, UpstreamEndpoint

API_KEY = "key-of-the-upstream"


def put_inside(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """As `put`, for a stack that starts inside the cluster, where no port is forwarded."""
    cluster = put(folder, patch)
    patch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    return cluster


@pytest.mark.requirement("R125")
async def test_a_rollout_runs_on_services_that_a_cluster_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By forwarded ports, of which one comes back after its pod; nothing secret is in a command, nothing is left."""
    cluster = put(tmp_path, monkeypatch)
    model.write(tmp_path)
    monkeypatch.setenv(commands.MODEL, str(tmp_path / "model"))
    values = {
        "inference": {
            "model": {"claim": "model"},
            "engine": "scripted",
            "engineOptions": {"script": str(tmp_path / "script.yaml")},
        }
    }
    stack = Stack(
        on="kubernetes",
        nodes=1,
        values=values,
        upstreams={"big": UpstreamEndpoint("http://127.0.0.1:9/v1", API_KEY)},
        settings={"driver": {"max_running": 7}},
        state_dir=tmp_path / "stack",
        start_timeout=240,
    )
    async with stack, connect(stack.endpoints) as ps:
        assert not stack.endpoints.discover
        rollout = await ps.rollouts.create(model.task(0, 0.0), "shell", mode=Mode.TRANSPARENT_PROXY)
        outcome = (await rollout.result()).outcome
        assert outcome.reward is not None and outcome.reward.value == 1.0, outcome
        told = {one["metadata"]["namespace"] for one in objects(cluster)}
        assert told == {"team"}
        os.kill(int((cluster / "driver.pid").read_text()), signal.SIGTERM)
        again = await _read(stack, rollout.rollout_id)
        assert again == 1.0
        secret = stack.endpoints.token
    arguments = (cluster / "arguments").read_text("utf-8")
    assert secret is not None and secret not in arguments and API_KEY not in arguments
    assert not objects(cluster)


async def _read(stack: Stack, rollout_id: str) -> float | None:
    """The reward of a rollout, as its driver's volume has it, once the driver's port is back at the same place."""
    while True:
        try:
            async with connect(stack.endpoints) as ps:
                outcome = (await ps.rollouts.get(rollout_id)).outcome
                return None if outcome is None or outcome.reward is None else outcome.reward.value
        except PenstockError:
            continue


async def test_a_pod_that_cannot_start_ends_the_start_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And everything is removed."""
    cluster = put(tmp_path, monkeypatch)
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s"}
    container = {"name": "driver", "restartCount": 3, "state": {"waiting": waiting}}
    (cluster / "broken.json").write_text(f'{{"containerStatuses": [{json.dumps(container)}]}}', "utf-8")
    with pytest.raises(StackFailed, match=r"back-off 40s(.|\n)*the log of driver in penstock-\w+-") as caught:
        async with Stack(on="kubernetes", kube_namespace="rl"):
            pass
    assert caught.value.reason == "POD_FAILED"
    assert not objects(cluster)


async def test_pods_that_are_late_are_counted_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the scheduler says."""
    cluster = put(tmp_path, monkeypatch)
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have penstock-pool=sandboxes"}
    (cluster / "broken.json").write_text(f'{{"conditions": [{json.dumps(condition)}]}}', "utf-8")
    for limit in limits(20.0):
        with pytest.raises(StackFailed) as caught:
            async with Stack(on="kubernetes", start_timeout=limit):
                pass
        assert caught.value.reason == "SERVICE_SLOW"
        assert not objects(cluster)
        if "0 of 0 pods" not in str(caught.value):
            assert re.search(r"0 of 5 pods were ready.*0/3 nodes have penstock-pool", str(caught.value))
            return  # else the time was over before the cluster had said how many there are
    pytest.fail("pods are never counted")


async def test_a_release_that_cannot_be_removed_is_named_with_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a person can remove it."""
    cluster = put_inside(tmp_path, monkeypatch)
    monkeypatch.setattr(Release, "stop_s", 0.0)
    for limit in limits(10.0):
        monkeypatch.setattr(on_kubernetes, "_REMOVE_S", limit)
        with pytest.raises(StackFailed, match=r"helm uninstall penstock-\w+ -n rl; kubectl") as caught:
            async with Stack(on="kubernetes", kube_namespace="rl", state_dir=tmp_path / "stack") as stack:
                name = stack.endpoints.origin.split()[-1]
                assert stack.endpoints.driver == f"{name}.rl.svc:7702" and stack.endpoints.discover
                assert stack.endpoints.inference == ""
                (cluster / "stuck").touch()
        assert caught.value.reason == "RELEASE_LEFT"
        if "the server is away" in str(caught.value):
            return
        (cluster / "stuck").unlink()  # the time was over before it could say so
    pytest.fail("why it cannot be removed is not said")


@pytest.mark.requirement("R125")
async def test_a_cluster_that_is_away_for_a_moment_ends_no_start_and_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server is replaced, or chooses its leader, at any time."""
    cluster = put_inside(tmp_path, monkeypatch)
    monkeypatch.setattr(on_kubernetes, "_LOOK_S", 0.0)
    away = cluster / "failing.json"
    away.write_text('{"get": 2}', "utf-8")
    async with Stack(on="kubernetes", kube_namespace="rl"):
        assert objects(cluster)
        away.write_text('{"uninstall": 2, "delete": 1, "get": 1}', "utf-8")
    assert not objects(cluster)
    assert set(json.loads(away.read_text("utf-8")).values()) == {0}


@pytest.mark.requirement("R125")
async def test_services_that_claim_sandboxes_end_before_their_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox service deletes its claims as it stops. First the drivers, which could ask for others."""
    cluster = put_inside(tmp_path, monkeypatch)
    monkeypatch.setattr(on_kubernetes, "_LOOK_S", 0.0)
    values = {"sandbox": {"backend": "kubernetes", "kubernetes": CLAIMS}}
    async with Stack(on="kubernetes", kube_namespace="rl", values=values) as stack:
        name = stack.endpoints.origin.split()[-1]
        (cluster / "arguments").write_text("", "utf-8")
    assert not objects(cluster) and not (cluster / "orphans").exists()
    done = re.findall(r"(scale statefulset/\S+|get pods|helm uninstall)", (cluster / "arguments").read_text("utf-8"))
    scaled = [f"scale statefulset/{name}-{service}" for service in ("driver", "sandbox")]
    assert done == [scaled[0], "get pods", scaled[1], "get pods", "helm uninstall", "get pods"]


async def test_a_start_that_was_never_installed_scales_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = put_inside(tmp_path, monkeypatch)
    (cluster / "failing.json").write_text('{"install": 1}', "utf-8")
    values = {"sandbox": {"backend": "kubernetes", "kubernetes": CLAIMS}}
    with pytest.raises(StackFailed, match="leader changed"):
        async with Stack(on="kubernetes", kube_namespace="rl", values=values):
            pass
    assert not objects(cluster)


async def test_a_cluster_that_takes_nothing_is_not_asked_for_long_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of the start is what a user needs to know."""
    cluster = put(tmp_path, monkeypatch)
    monkeypatch.setattr(on_kubernetes, "_NEVER_INSTALLED_S", 0.5)
    (cluster / "failing.json").write_text('{"create": 1000000, "uninstall": 1000000}', "utf-8")
    with pytest.raises(StackFailed, match="`kubectl create` failed"):
        async with Stack(on="kubernetes", kube_namespace="rl"):
            pass
    assert not (cluster / "objects.json").exists() or not objects(cluster)


async def test_pods_that_nobody_could_ask_for_are_late_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = put(tmp_path, monkeypatch)
    (cluster / "failing.json").write_text('{"get": 1000000}', "utf-8")
    for name, value in (("_LOOK_S", 0.0), ("_REMOVE_S", 0.0)):  # pods cannot be asked for at the end either
        monkeypatch.setattr(on_kubernetes, name, value)
    monkeypatch.setattr(Release, "stop_s", 0.0)
    for limit in limits(20.0):
        with pytest.raises(StackFailed) as caught:
            async with Stack(on="kubernetes", start_timeout=limit):
                pass
        assert caught.value.reason == "SERVICE_SLOW"
        if "leader changed" in str(caught.value):
            return  # else the time was over before the first look
    pytest.fail("why pods could not be asked for is not said")


async def test_sandbox_services_of_another_namespace_are_called_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' Service leads to no pods but those of its own namespace."""
    put(tmp_path, monkeypatch)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # inside: no port is forwarded
    for sandboxes, host in (("pods", "{}-sandbox.pods.svc"), ("rl", "{}.rl.svc")):
        values = {"sandbox": {"namespace": sandboxes}}
        async with Stack(on="kubernetes", kube_namespace="rl", values=values) as stack:
            name = stack.endpoints.origin.split()[-1]
            assert stack.endpoints.sandbox == f"{host.format(name)}:7701"
            assert stack.endpoints.driver == f"{name}.rl.svc:7702"
