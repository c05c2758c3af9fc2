"""`Stack(on="kubernetes")` on a real API server, with Helm and kubectl themselves.

The machines are played: pods are bound, made ready and ended by the check. What a kubelet would carry, the forwarded
ports, is a listening socket that leads nowhere: tests/integration/launchers has services behind it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.kubernetes.server import Cluster
from tests.support.charts import NAMESPACE

from penstock.launchers import Stack
from penstock.local.stack import StackFailed, UpstreamEndpoint
from tools import helm

API_KEY: Final = "key-of-the-upstream"
_KINDS: Final = "statefulsets,services,pods,secrets,persistentvolumeclaims,networkpolicies,poddisruptionbudgets"
_FORWARD: Final = """\
import signal, socket, sys
local, _, remote = sys.argv[-1].partition(":")
with socket.create_server(("127.0.0.1", int(local or 0))) as server:
    print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> {remote}", flush=True)
    signal.sigwait({signal.SIGTERM})
"""


def tools(folder: Path, program: str, listening: Callable[[], str]) -> dict[str, str]:
    """Puts kubectl and one version of Helm into a directory; returns the PATH with it first.

    Each notes its arguments in `arguments`. `port-forward` is the program that `listening` returns.
    """
    place = folder / f"bin-{program}"
    place.mkdir()
    forward = place / "forward.py"
    forward.write_text(listening(), encoding="utf-8")
    for name, real in (("kubectl", helm.program("kubectl")), ("helm", helm.program(program))):
        script = place / name
        script.write_text(
            "#!/bin/sh\n"
            f'printf "%s\\n" "$*" >>{shlex.quote(str(place / "arguments"))}\n'
            f'case " $* " in *" port-forward "*) exec {shlex.join([sys.executable, str(forward)])} "$@";; esac\n'
            f'exec {shlex.quote(str(real))} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o755)
    return {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}


@asynccontextmanager
async def machines(cluster: Cluster, status: Mapping[str, Any] | None = None) -> AsyncIterator[None]:
    """Binds pods and gives them a status (None = ready), and ends those that are to stop, for the time of a block."""

    def turn(number: int) -> int:
        from tests.kubernetes.checks import run_pod

        for one in cluster.get("pods", "-n", NAMESPACE)["items"]:
            name = one["metadata"]["name"]
            if "deletionTimestamp" in one["metadata"]:
                cluster.kubectl(
                    "delete", "pod", name, "-n", NAMESPACE, "--force", "--grace-period=0", "--ignore-not-found"
                )
            elif "nodeName" not in one["spec"]:
                number += 1
                try:
                    run_pod(cluster, name, f"10.9.0.{number}", ready=status is None, more=status or {})
                except (AssertionError, KeyError):  # it may have been removed meanwhile
                    if cluster.kubectl("get", "pod", name, "-n", NAMESPACE, "--ignore-not-found"):
                        raise
        return number

    async def play() -> None:
        number = 0
        while True:
            number = await asyncio.to_thread(turn, number)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(play())
        yield
        task.cancel()


def stack(**options: Any) -> Stack:
    """A stack with a model and an upstream whose key is secret."""
    values = {"inference": {"model": {"claim": "model"}}, "sandbox": {"storage": {"size": "1Gi"}}}
    upstreams = {"big": UpstreamEndpoint("https://api.example/v1", API_KEY)}
    return Stack(
        on="kubernetes", nodes=2, values=values, kube_namespace=NAMESPACE, upstreams=upstreams,
        settings={"driver": {"max_running": 7}}, **options,
    )  # fmt: skip


def left(cluster: Cluster) -> list[str]:
    """What is there of any stack."""
    found = cluster.get(_KINDS, "-n", NAMESPACE)["items"]
    stacks = re.compile(r"penstock-[0-9a-f]{6}\b")  # not what other checks have, volumes above all
    return [f"{one['kind']} {one['metadata']['name']}" for one in found if stacks.search(one["metadata"]["name"])]


async def placed_and_removed(cluster: Cluster, arguments: Path) -> None:
    """All of a stack's life; raises AssertionError."""
    async with machines(cluster):
        async with stack(start_timeout=300) as started:
            endpoints = started.endpoints
            assert not endpoints.discover and endpoints.token is not None
            for service in ("driver", "interception", "sandbox", "inference"):
                host, _, port = endpoints.address(service).rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
            sets = cluster.get("statefulsets", "-n", NAMESPACE)["items"]
            assert {one["spec"]["replicas"]: one["status"]["readyReplicas"] for one in sets} == {1: 1, 2: 2}
            release = sets[0]["metadata"]["labels"]["app.kubernetes.io/instance"]
            of_it = f"app.kubernetes.io/instance={release}"
            secrets = cluster.get("secrets", "-n", NAMESPACE, "-l", of_it)["items"]
            assert len(secrets) == len(sets) == 4
            told = cluster.helm("get", "values", release, "-n", NAMESPACE)
            shown = told + cluster.helm("get", "manifest", release, "-n", NAMESPACE) + arguments.read_text("utf-8")
            assert "max_running: 7" in told and endpoints.token not in shown and API_KEY not in shown
            claims = cluster.get("persistentvolumeclaims", "-n", NAMESPACE, "-l", of_it)["items"]
            assert len(claims) == 3
        cluster.eventually(lambda: not left(cluster), "the end of everything that the stack had")


async def refused(cluster: Cluster, status: Mapping[str, Any] | None, reason: str, said: str, timeout: float) -> None:
    """A stack whose pods do not become ready says why, and leaves nothing."""
    async with machines(cluster, status):
        try:
            async with stack(start_timeout=timeout):
                raise AssertionError("it started")
        except StackFailed as error:
            assert error.reason == reason and said in str(error), error
        cluster.eventually(lambda: not left(cluster), "the end of everything that the stack had")


def check(cluster: Cluster) -> str:
    """With both versions of Helm, as a user who is `admin` in one namespace."""
    container = {"name": "driver", "ready": False, "restartCount": 0, "image": "penstock/driver", "imageID": ""}
    pulling = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    for program in ("helm3", "helm"):
        more = tools(cluster.folder, program, lambda: _FORWARD)
        arguments = cluster.folder / f"bin-{program}" / "arguments"
        home = {"KUBECONFIG": str(cluster.folder / "installer.json"), "HOME": str(cluster.folder)}
        with patch.dict(os.environ, {**more, **home}):
            asyncio.run(placed_and_removed(cluster, arguments))
            if program == "helm":
                asyncio.run(
                    refused(
                        cluster, {"containerStatuses": [{**container, **pulling}]}, "POD_FAILED", "no such image", 300
                    )
                )
                asyncio.run(refused(cluster, {}, "SERVICE_SLOW", "0 of 5 pods were ready", 20))
    return "Helm 3 and Helm 4; pods that cannot start, pods that are late"
