"""Faults between the service and its cluster: it dies, the API errs, pods fail. Nothing leaks, hangs or is doubled."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.services import SERVICES, Running, start, start_on, start_variant
from tests.support.agent_sandbox.running import StandIn, stand_in
from tests.support.waiting import eventually_async, limits

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from penstock_sandbox.backends.kubernetes.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

World = tuple[StandIn, Running]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world() -> AsyncIterator[World]:
    """A stand-in and a service on it, which waits as long for a pod as a busy machine may need."""
    async with (
        stand_in() as cluster,
        start(
            "kubernetes",
            kubernetes_allowed_warm_pools='["cold"]',
            kubernetes_ready_timeout_s="60",
            kubernetes_delete_timeout_s="60",
        ) as service,
    ):
        yield cluster, service


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def impatient(world: World) -> AsyncIterator[World]:
    """Another service on that stand-in, which waits a few seconds for a pod, but long enough for its own trial's."""
    cluster, _ = world
    for limit in limits(8.0):
        async with _another(cluster, ready_timeout_s=limit) as service:
            if await _is_available(service):
                yield cluster, service
                return
    raise AssertionError("no limit was long enough")


@asynccontextmanager
async def _another(cluster: StandIn, **settings: float) -> AsyncIterator[Running]:
    """A service on a stand-in that has one; nothing of its trial is left."""
    further = {f"PENSTOCK_SANDBOX_KUBERNETES_{name.upper()}": f"{value:g}" for name, value in settings.items()}
    further |= cluster.environment() | {"PENSTOCK_SANDBOX_KUBERNETES_ALLOWED_WARM_POOLS": '["cold"]'}
    with tempfile.TemporaryDirectory(prefix="penstock-fault-", ignore_cleanup_errors=True) as folder:
        async with start_variant(Path(folder), "kubernetes", SERVICES["kubernetes"], further) as service:
            await _none_left(cluster)
            yield service


async def _is_available(service: Running) -> bool:
    answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
    return any(one.available for one in answer.backends if one.name == "kubernetes")


def _create(service: Running, **spec: Any) -> Any:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    return service.sandboxes.CreateSandbox(request, timeout=90)


async def _box(service: Running, **spec: Any) -> Box:
    return Box(service, (await _create(service, **spec)).sandbox)


async def _delete(box: Box) -> None:
    await box.service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=90)


async def _none_left(cluster: StandIn) -> None:
    async def none() -> bool:
        return await cluster.claims() == []

    await eventually_async(none, "every claim is deleted")


async def _lost(box: Box) -> sb.Sandbox:
    async def lost() -> bool:
        return (await _shown(box)).state == sb.SANDBOX_STATE_LOST

    await eventually_async(lost, "the sandbox is lost")
    return await _shown(box)


async def _shown(box: Box) -> sb.Sandbox:
    return (await box.service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)).sandbox


def _log_in(cluster: StandIn, token: str) -> None:
    """As a login command writes the kubeconfig."""
    config = json.loads(Path(cluster.kubeconfig).read_text())
    config["users"][0]["user"] = {"token": token}
    Path(cluster.kubeconfig).write_text(json.dumps(config))


# The service dies ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R50")
async def test_a_killed_service_leaves_no_claim_once_back(tmp_path: Path) -> None:
    """Those of another service on the same cluster stay."""
    tmp_path.chmod(0o755)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with stand_in() as cluster, start_on(tmp_path / "b", "kubernetes") as other:
        theirs = await _box(other)
        async with start_on(tmp_path / "a", "kubernetes") as service:
            await (await _box(service)).start("p", "sleep", "5400")
            before = len(await cluster.requests("POST sandboxclaims"))
            burst = [asyncio.ensure_future(_create(service)) for _ in range(6)]

            async def begun() -> bool:
                return len(await cluster.requests("POST sandboxclaims")) >= before + 3

            await eventually_async(begun, "the burst is under way")
            service.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*burst, return_exceptions=True)
        assert len(await cluster.claims()) > 1
        async with start_on(tmp_path / "a", "kubernetes") as service:

            async def only_theirs() -> bool:
                left = [one["metadata"]["annotations"]["penstock-sandbox"] for one in await cluster.claims()]
                return left == [theirs.id]

            await eventually_async(only_theirs, "the leftovers are deleted")
            assert await theirs.out("echo here") == "here"
            assert await (await _box(service)).out("echo fresh") == "fresh"
        await _delete(theirs)
        await _none_left(cluster)


# The API errs --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "how",
    [
        {"status": 429, "headers": {"Retry-After": "1"}},
        {"status": 500},
        {"status": 503, "body": "<html>no upstream</html>"},
        {"drop": True},
    ],
    ids=["429", "500", "html", "cut"],
)
async def test_errors_that_pass_are_ridden_out_and_make_one_claim(world: World, how: Any, after: bool) -> None:
    """Also where the claim was made and only its answer was lost: then the name exists (409)."""
    cluster, service = world
    await cluster.fail("POST sandboxclaims", 2, after=after, **how)
    box = await _box(service)
    assert await box.out("echo made") == "made"
    assert len(await cluster.claims()) == 1
    await cluster.fail("DELETE sandboxclaims", 1, after=after, **how)
    await _delete(box)
    await _none_left(cluster)


@pytest.mark.requirement("R51")
async def test_a_watch_whose_version_is_too_old_lists_anew(world: World) -> None:
    """410 Gone: nothing that happened meanwhile is missed."""
    cluster, service = world
    box = await _box(service)
    name = (await cluster.claim_of(box.id))["metadata"]["name"]
    await cluster.fail("WATCH sandboxclaims", 1, status=410)
    await cluster.do("compact")
    await cluster.do("fail", name)
    assert (await _lost(box)).lost_reason == "POD_ENDED"
    second = await _box(service)
    assert await second.out("echo on") == "on"
    await _delete(second)
    await _none_left(cluster)


@pytest.mark.requirement("R50", "R51")
async def test_a_service_whose_token_expires_takes_the_next_from_its_kubeconfig(world: World) -> None:
    """Its sandboxes are deleted, it makes further ones, and still hears of what ends by itself."""
    cluster, service = world
    kept, box = await _box(service), await _box(service)
    for _ in range(2):
        _log_in(cluster, (await cluster.do("rotate"))["token"])
        _, box = await asyncio.gather(_delete(box), _box(service))
    await _delete(box)
    await cluster.do("fail", (await cluster.claim_of(kept.id))["metadata"]["name"])
    assert (await _lost(kept)).lost_reason == "POD_ENDED"
    await _none_left(cluster)


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("source", ["exec", "tokenFile"])
async def test_expired_credentials_are_read_again_once_for_all_requests(
    world: World, tmp_path: Path, source: str
) -> None:
    """A plug-in is run, or a file read; while that fails, the error may pass."""
    cluster, _ = world
    config, runs, token = json.loads(Path(cluster.kubeconfig).read_text()), tmp_path / "runs", tmp_path / "token"
    form = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s"}}
    program = f"echo run >> {runs}; test -e {token} && printf '{json.dumps(form)}' \"$(cat {token})\""
    plug_in = {"apiVersion": form["apiVersion"], "command": "/bin/sh", "args": ["-c", program]}
    token.write_text(config["users"][0]["user"]["token"])
    config["users"][0]["user"] = {"exec": plug_in} if source == "exec" else {"tokenFile": str(token)}
    (tmp_path / "config").write_text(json.dumps(config))
    reached = Cluster("sandboxes", "nobody", tmp_path / "config", "")
    await reached.open()
    try:
        assert await reached.claims()
        token.unlink()
        fresh = (await cluster.do("rotate"))["token"]
        _log_in(cluster, fresh)
        with pytest.raises(Unavailable, match="kubernetes_config"):
            await reached.claims()
        token.write_text(fresh)
        before = runs.read_text().count("run") if source == "exec" else 0
        await asyncio.gather(*(reached.claims() for _ in range(8)))
        if source == "exec":
            assert runs.read_text().count("run") == before + 1
        token.write_text("none that is known")
        await cluster.do("rotate")
        with pytest.raises(FailedPrecondition, match="credentials"):
            await reached.claims()
    finally:
        await reached.aclose()
        _log_in(cluster, (await cluster.do("rotate"))["token"])


@pytest.mark.requirement("R51")
async def test_pod_that_is_ready_late_is_waited_for(world: World) -> None:
    cluster, service = world
    await cluster.behave(hold=True)
    making = asyncio.ensure_future(_create(service))

    async def claimed() -> bool:
        return len(await cluster.claims()) == 1

    await eventually_async(claimed, "the claim is there")
    await cluster.behave(hold=False)
    box = Box(service, (await making).sandbox)
    assert await box.out("echo late") == "late"
    await _delete(box)


@pytest.mark.requirement("R49", "R51", "R53")
@pytest.mark.parametrize(
    ("how", "kind", "reason", "told"),
    [
        ({"quota": 0}, ResourceExhausted, "PROVIDER_LIMIT", "raise the quota"),
        (
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            Unavailable,
            "IMAGE_PULL_FAILED",
            "no such image",
        ),
    ],
    ids=["quota", "image"],
)
async def test_a_claim_without_a_pod_fails_with_its_cause(
    world: World, how: dict[str, Any], kind: type[Exception], reason: str, told: str
) -> None:
    """The quota's and the kubelet's words are in the error, and no claim is left."""
    await _fails_with_its_cause(world, how, kind, reason, told)


@pytest.mark.requirement("R49", "R51", "R53")
@pytest.mark.parametrize(
    ("how", "kind", "reason", "told"),
    [
        ({"unschedulable": "0/3 nodes are available"}, ResourceExhausted, "POD_UNSCHEDULABLE", "0/3 nodes"),
        ({"hold": True}, DeadlineExceeded, "POD_NOT_READY", "kubectl describe sandboxclaim"),
    ],
    ids=["unschedulable", "never ready"],
)
async def test_a_claim_whose_pod_is_not_ready_in_time_fails_with_its_cause(
    impatient: World, how: dict[str, Any], kind: type[Exception], reason: str, told: str
) -> None:
    """The scheduler's words are in the error, and no claim is left."""
    await _fails_with_its_cause(impatient, how, kind, reason, told)


async def _fails_with_its_cause(
    world: World, how: dict[str, Any], kind: type[Exception], reason: str, told: str
) -> None:
    cluster, service = world
    await cluster.behave(**how)
    try:
        error = await failure(_create(service, base=sb.Base(image="cold")))
    finally:
        await cluster.behave(quota=None, unschedulable="", waiting=None, hold=False)
    assert isinstance(error, kind) and getattr(error, "reason", "") == reason
    assert told in str(error)
    await _none_left(cluster)


@pytest.mark.requirement("R49")
async def test_cancelled_create_leaves_no_claim(world: World) -> None:
    cluster, service = world
    await cluster.behave(hold=True)
    try:
        making = asyncio.ensure_future(_create(service))

        async def claimed() -> bool:
            return len(await cluster.claims()) == 1

        await eventually_async(claimed, "the claim is there")
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await _none_left(cluster)
    finally:
        await cluster.behave(hold=False)


@pytest.mark.requirement("R50")
async def test_deletion_is_pending_until_finalizers_are_done(world: World) -> None:
    cluster, _ = world
    async with _another(cluster, delete_timeout_s=2) as service:
        box = await _box(service)
        await cluster.behave(hold_deletions=True)
        try:
            error = await failure(_delete(box))
            assert isinstance(error, Unavailable) and error.reason == "DELETE_PENDING"
            assert len(await cluster.claims()) == 1
        finally:
            await cluster.behave(hold_deletions=False)
        await _none_left(cluster)


# Pods fail -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R93")
@pytest.mark.parametrize(
    ("what", "end", "reason"),
    [
        ("fail", "Error", "POD_ENDED"),
        ("fail", "OOMKilled", "POD_OUT_OF_MEMORY"),
        ("replace", "", "POD_REPLACED"),
        ("delete", "", "SANDBOX_VANISHED"),
    ],
    ids=["ended", "out of memory", "replaced", "claim deleted"],
)
async def test_a_pod_that_goes_loses_its_sandbox_with_the_reason(
    world: World, what: str, end: str, reason: str
) -> None:
    cluster, service = world
    box = await _box(service)
    await cluster.behave(end_reason=end)
    await cluster.do(what, (await cluster.claim_of(box.id))["metadata"]["name"])
    assert (await _lost(box)).lost_reason == reason
    await _none_left(cluster)


@pytest.mark.requirement("R15")
async def test_cut_connections_lose_no_output_and_double_none(world: World) -> None:
    cluster, service = world
    box = await _box(service)
    await box.start("p", shell="for i in $(seq 100000); do echo $i; done")
    reading = asyncio.ensure_future(box.finish("p"))
    for _ in range(3):
        await cluster.do("cut")
        assert await box.out("echo alive") == "alive"
    out, _, ended = await reading
    assert out == b"".join(b"%d\n" % number for number in range(1, 100001)) and ended.code == 0
    await _delete(box)
