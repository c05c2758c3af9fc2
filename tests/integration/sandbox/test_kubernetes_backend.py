"""What is Kubernetes' own in its backend: what is asked of the cluster, who may reach a pod, and what is refused.

Everything goes through the unmodified client to the stand-in (`tests/support/agent_sandbox`), whose pods are real.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import Box, command, failure
from tests.conformance.sandbox.services import SERVICES, Running, start, start_variant
from tests.support.agent_sandbox.running import StandIn, stand_in
from tests.support.waiting import eventually

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.times import even_time
from penstock_sandbox.backends.kubernetes import backend as kubernetes_backend
from penstock_sandbox.backends.kubernetes.backend import KubernetesBackend, KubernetesOptions
from penstock_sandbox.backends.kubernetes.keys import ClaimKey, client_context
from penstock_sandbox.backends.kubernetes.pod import Address, AdoptedPod
from penstock_sandbox.domain.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

World = tuple[StandIn, Running]
PORT = 7790


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world() -> AsyncIterator[World]:
    """A stand-in and a service on it, which may use its other pools too."""
    async with (
        stand_in() as cluster,
        start("kubernetes", kubernetes_allowed_warm_pools='["open", "cold"]') as service,
    ):
        yield cluster, service


@asynccontextmanager
async def box_of(service: Running, **spec: Any) -> AsyncIterator[Box]:
    """A sandbox, deleted at the end."""
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    box = Box(service, (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox)
    try:
        yield box
    finally:
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)


async def pod_address(cluster: StandIn, box: Box) -> str:
    """The address of a sandbox's pod."""
    claim = await cluster.claim_of(box.id)
    address: str = claim["status"]["sandbox"]["podIPs"][0]
    return address


# What is asked of the cluster ----------------------------------------------------------------------------------------


@pytest.mark.requirement("R1", "R50", "R51")
async def test_sandbox_is_one_labelled_claim_with_a_deadline_and_no_secret(world: World) -> None:
    cluster, service = world
    async with box_of(service, lease=Duration(seconds=300), env={"SECRET": "sk-test"}) as box:
        asked = [one for one in await cluster.requests("POST sandboxclaims") if box.id in str(one)]
        assert len(asked) == 1
        body = asked[0]["body"]
        assert set(body["metadata"]["labels"]) == {"penstock-instance"}
        assert body["spec"]["warmPoolRef"] == {"name": "penstock"}
        assert body["spec"]["lifecycle"]["shutdownPolicy"] == "DeleteForeground"
        until = datetime.datetime.fromisoformat(body["spec"]["lifecycle"]["shutdownTime"])
        created = datetime.datetime.fromisoformat((await cluster.claim_of(box.id))["metadata"]["creationTimestamp"])
        assert 540 <= (until - created).total_seconds() <= 605
        assert "sk-test" not in json.dumps(await cluster.requests())
    assert box.id not in json.dumps(await cluster.claims())


@pytest.mark.requirement("R125")
async def test_no_byte_of_a_sandbox_passes_the_api_server(world: World) -> None:
    cluster, service = world
    async with box_of(service) as box:
        before = len(await cluster.requests())
        mark = secrets.token_hex(8)
        for _ in range(5):
            assert await box.out(f"echo {mark}") == mark
        told = await cluster.requests()
        assert mark not in json.dumps(told)
        assert not [one for one in told[before:] if one["what"] not in ("WATCH sandboxclaims", "GET sandboxclaims")]


@pytest.mark.requirement("R50", "R61")
async def test_lease_moves_the_clusters_deadline_only_where_it_must(world: World) -> None:
    """Within the margin a renewal costs no request."""
    cluster, service = world
    async with box_of(service, lease=Duration(seconds=300)) as box:
        name = (await cluster.claim_of(box.id))["metadata"]["name"]
        for seconds, patches in ((320, 0), (3000, 1)):
            renew = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=seconds))
            await service.sandboxes.RenewLease(renew, timeout=30)
            sent = await cluster.requests("PATCH sandboxclaims")
            assert len([one for one in sent if name in one["path"]]) == patches
        claim = await cluster.claim_of(box.id)
        until = datetime.datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"])
        assert (until - datetime.datetime.now(datetime.UTC)).total_seconds() > 3000


@pytest.mark.requirement("R50", "R61")
async def test_the_clusters_deadline_lies_after_the_lease_of_a_sandbox_that_was_long_in_coming(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease begins when it is ready. Here its create began a thousand seconds ago."""
    cluster, _ = world
    opened = KubernetesBackend(
        KubernetesOptions(
            tmp_path, "sandboxes", "penstock", keys=Path(cluster.keys), kubeconfig=Path(cluster.kubeconfig)
        )
    )
    await opened.open()
    try:
        await eventually(lambda: opened.available, "the trial has passed")
        began = iter([even_time() - 1000])
        monkeypatch.setattr(kubernetes_backend, "even_time", lambda: next(began, None) or even_time())
        await opened.create("sb-late", SandboxSpec(lease_s=3600.0), (), lambda _: None)
        until = (await cluster.claim_of("sb-late"))["spec"]["lifecycle"]["shutdownTime"]
        assert datetime.datetime.fromisoformat(until).timestamp() > even_time() + 3600
    finally:
        await opened.aclose()


# Who may reach a pod -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R8", "R12")
async def test_programs_in_a_pod_see_neither_its_keys_nor_its_tokens(world: World) -> None:
    _, service = world
    async with box_of(service) as box:
        for path in ("/etc/penstock/keys/pod.pem", "/proc/1/environ", "/opt/penstock/attendant/attendant.py"):
            assert (await box.run("cat", path)).exit.code != 0, path
        assert "POD_" not in await box.out("env")


@pytest.mark.requirement("R8")
async def test_an_adopted_pod_answers_to_its_claims_key_alone(world: World) -> None:
    """Not to the template's own service key, nor to a pod's."""
    cluster, service = world
    keys = Path(cluster.keys)
    async with box_of(service) as box:
        address = Address(await pod_address(cluster, box), PORT)
        template = await asyncio.to_thread(client_context, keys / "service.pem", keys / "pod.crt")
        with pytest.raises(FailedPrecondition, match="certificates") as refused:
            await AdoptedPod.adopt(address, template, ClaimKey.make(1), "any")
        assert refused.value.reason == "TEMPLATE_UNSUITABLE"
        assert await box.out("echo ours") == "ours"


@pytest.mark.requirement("R8")
async def test_a_pod_takes_no_key_from_a_stranger(world: World) -> None:
    """Neither without a certificate nor with a foreign one."""
    cluster, service = world
    async with box_of(service) as box:
        address = await pod_address(cluster, box)
        for with_certificate in (False, True):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if with_certificate:
                context = ClaimKey.make(1).context
                context.verify_mode = ssl.CERT_NONE
            reader, writer = await asyncio.open_connection(address, PORT, ssl=context)
            writer.write(b'{"op": "hello"}\n')
            try:
                assert await reader.read() == b""
            except (ssl.SSLError, ConnectionError):
                pass  # as good: the handshake's alert
            finally:
                writer.transport.abort()


@pytest.mark.requirement("R8", "R50")
async def test_another_pod_at_the_address_gets_no_sandbox(world: World) -> None:
    cluster, service = world
    await cluster.behave(stranger=True)
    try:
        request = ss.CreateSandboxRequest(
            request_id=secrets.token_hex(8), spec=sb.SandboxSpec(base=sb.Base(image="cold"))
        )
        error = await failure(service.sandboxes.CreateSandbox(request, timeout=60))
        assert isinstance(error, Unavailable) and error.reason == "CREATE_FAILED" and "another pod" in error.message
        assert await cluster.claims() == []
    finally:
        await cluster.behave(stranger=False)


# What is offered -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("image", "reason"), [("unknown", "IMAGE_NOT_ALLOWED"), ("open", "TEMPLATE_UNSUITABLE")], ids=["unknown", "open"]
)
async def test_warm_pools_that_do_not_suit_are_refused(world: World, image: str, reason: str) -> None:
    """One that the operator does not allow, and one whose template lets sandboxes out."""
    cluster, service = world
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(base=sb.Base(image=image)))
    error = await failure(service.sandboxes.CreateSandbox(request, timeout=60))
    assert isinstance(error, FailedPrecondition) and error.reason == reason
    assert await cluster.claims() == []


async def test_a_spec_may_name_another_warm_pool(world: World) -> None:
    cluster, service = world
    async with box_of(service, base=sb.Base(image="cold")) as box:
        assert (await cluster.claim_of(box.id))["spec"]["warmPoolRef"] == {"name": "cold"}
        assert await box.out("id -un") == "agent"


@pytest.mark.requirement("R55", "R63")
async def test_a_warm_pool_is_offered_as_its_template_is_now(world: World) -> None:
    """One that was open is taken once it is closed, without a restart; one that was opened since is refused."""
    cluster, service = world
    policy: dict[str, Any] = {"networkPolicy": {"ingress": []}}
    try:
        for change, refused in (({"networkPolicy": None}, True), (policy, False), ({"networkPolicy": None}, True)):
            await cluster.edit("sandboxtemplates", "open", change)
            request = ss.CreateSandboxRequest(
                request_id=secrets.token_hex(8), spec=sb.SandboxSpec(base=sb.Base(image="open"))
            )
            if refused:
                error = await failure(service.sandboxes.CreateSandbox(request, timeout=60))
                assert error.reason == "TEMPLATE_UNSUITABLE"
            else:
                made = (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox
                await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=made.sandbox_id), timeout=60)
    finally:
        await cluster.edit("sandboxtemplates", "open", {"networkPolicy": None})


async def _prepared(service: Running, shell: str, base: sb.Base) -> str:
    """The id of a snapshot in which a command ran."""
    spec = ss.SnapshotSpec(sandbox=sb.SandboxSpec(base=base), setup=[command(shell=shell)])
    *_, last = [
        event async for event in service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec), timeout=120)
    ]
    return str(last.snapshot.snapshot_id)


@pytest.mark.requirement("R57")
async def test_a_fork_starts_in_the_warm_pool_that_its_snapshot_was_made_in(world: World) -> None:
    """Also of a snapshot that was prepared on another one: its archive is a difference from that pool's image."""
    cluster, service = world
    first = await _prepared(service, "echo first > file", sb.Base(image="cold"))
    second = await _prepared(service, "echo second >> file", sb.Base(snapshot_id=first))
    for snapshot_id, told in ((first, "first"), (second, "first\nsecond")):
        fork = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), snapshot_id=snapshot_id, count=1)
        (child,) = [event async for event in service.sandboxes.ForkSandboxes(fork, timeout=120)]
        box = Box(service, child.sandbox)
        assert (await cluster.claim_of(box.id))["spec"]["warmPoolRef"] == {"name": "cold"}
        assert await box.out("cat file") == told
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)
    claimed = [one["body"] for one in await cluster.requests("POST sandboxclaims")][-4:]
    assert [body["spec"]["warmPoolRef"]["name"] for body in claimed] == ["cold"] * 4


@pytest.mark.requirement("R48", "R53")
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"kubernetes_warm_pool": ""}, "PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL"),
        ({"kubernetes_warm_pool": "absent"}, "absent"),
        ({"kubernetes_warm_pool": "open"}, "networkPolicy without egress"),
        ({"kubernetes_keys": "/nonexistent"}, "service.pem and pod.crt"),
        ({"kubernetes_config": "/nonexistent"}, "kubernetes_config"),
        ({"kubernetes_namespace": "others"}, "Role of the guide"),
    ],
    ids=["not configured", "no pool", "open pool", "no keys", "no cluster", "no rights"],
)
async def test_what_is_missing_is_said_with_what_to_do(
    world: World, tmp_path: Path, settings: dict[str, str], advice: str
) -> None:
    cluster, _ = world
    given = {**cluster.environment(), **{f"PENSTOCK_SANDBOX_{key.upper()}": value for key, value in settings.items()}}
    async with start_variant(tmp_path, "kubernetes", SERVICES["kubernetes"], given) as service:
        listed = (await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)).backends
        (found,) = [one for one in listed if one.name == "kubernetes"]
        assert advice in found.unavailable_reason
