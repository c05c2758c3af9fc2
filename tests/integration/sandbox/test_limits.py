"""What a sandbox is held to whose spec asks for no limit, and who says so where it cannot be held."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.services import TOKEN, Running, start, start_on
from tests.support.waiting import eventually_async

from penstock.cli.commands.doctor import backends
from penstock.client import connect
from penstock.client.transport.endpoints import Endpoints
from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock_sandbox.settings import SandboxSettings

GIB = 1 << 30


async def local_of(service: Running) -> sb.Backend:
    answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
    (found,) = [one for one in answer.backends if one.name == "local"]
    return found


async def created(service: Running) -> Box:
    """A sandbox that asks for nothing."""
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec())
    return Box(service, (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox)


@pytest.mark.requirement("R55", "R95")
async def test_sandbox_without_limits_gets_the_operators_memory_and_process_limits() -> None:
    """Without a setting as well, and what it keeps in /tmp and /dev/shm counts."""
    async with start("local") as service:
        local = await local_of(service)
        assert local.capabilities.limit_memory and local.capabilities.limit_pids, "this test needs control groups"
        assert (local.default_resources.memory_bytes, local.default_resources.pids) == (4 * GIB, 1024)
        assert (local.default_resources.disk_bytes, local.default_resources.inodes) == (16 * GIB, 1_000_000)
        assert local.capabilities.disk_limit in (sb.DISK_LIMIT_WATCHED, sb.DISK_LIMIT_HARD)
        assert not local.max_resources.ListFields()
        assert (await created(service)).sandbox.spec.resources == local.default_resources
    async with start("local", default_memory_bytes=str(128 << 20), default_pids="40") as service:
        box = await created(service)
        for hog in (
            ["python3", "-c", "x = bytearray(1 << 29)"],
            [
                "python3",
                "-c",
                "open('/tmp/x', 'wb').write(bytes(1 << 26)); open('/dev/shm/x', 'wb').write(bytes(1 << 26))",
            ],
        ):
            assert (await box.run(*hog)).exit.reason == ps.EXIT_REASON_OOM
        await box.run("rm", "-f", "/tmp/x", "/dev/shm/x")
        many = await box.run(
            "python3", "-c", "import os\nfor n in range(60):\n if not os.fork(): os.execvp('sleep', ['sleep', '60'])"
        )
        assert many.exit.code == 1 and b"BlockingIOError" in many.stderr
        stats = await service.sandboxes.GetStats(ss.GetStatsRequest(sandbox_id=box.id), timeout=30)
        assert stats.memory_peak_bytes <= 128 << 20


@pytest.mark.requirement("R95")
async def test_a_default_that_cannot_be_held_is_reported_and_refuses_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """An ordinary user without control groups of its own: ListBackends, `doctor` and the log say so."""
    async with start("local-ordinary-user") as service:
        local = await local_of(service)
        assert not (local.capabilities.limit_memory or local.capabilities.limit_pids)
        assert not (local.default_resources.HasField("memory_bytes") or local.default_resources.HasField("pids"))
        assert await (await created(service)).out("echo works") == "works"
        async with connect(Endpoints(sandbox=service.address, token=TOKEN)) as client:
            finding = backends.limits(await client.sandboxes.backends())
    assert not finding.ok and finding.advice
    assert "local: no limit of memory, pids; disk watched" in finding.found
    log = capfd.readouterr().err
    assert "sandboxes have no default limits" in log and "memory_bytes" in log


@pytest.mark.requirement("R95")
@pytest.mark.parametrize(
    ("name", "value"),
    [("default_memory_bytes", 4096), ("default_pids", 3), ("default_disk_bytes", 4096), ("default_inodes", 3)],
)
def test_a_default_with_which_no_sandbox_could_start_is_refused(name: str, value: int) -> None:
    """And 0 is how an operator chooses to have none."""
    make: Callable[..., SandboxSettings] = partial(SandboxSettings, operator_token=SecretStr("test-operator"))
    with pytest.raises(ValidationError, match="must be at least"):
        make(**{name: value})
    field = name.removeprefix("default_")
    assert getattr(make(**{name: 0}).default_resources, field) is None
    assert getattr(make().default_resources, field) is not None


@pytest.mark.requirement("R54", "R95")
async def test_more_than_the_operators_maximum_is_refused_by_field_and_maximum() -> None:
    """Of each resource; a default is never more than that."""
    most: dict[str, Any] = {"cpu": 2.0, "memory_bytes": 1 << 30, "pids": 100, "disk_bytes": 64 << 20, "inodes": 5000}
    async with start("local", **{f"max_{name}": str(value) for name, value in most.items()}) as service:
        local = await local_of(service)
        assert local.max_resources == sb.Resources(**most)
        assert local.default_resources == sb.Resources(**most)
        for name, value in most.items():
            spec = sb.SandboxSpec(resources=sb.Resources(**{name: value + 1}))
            request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
            error = await failure(service.sandboxes.CreateSandbox(request, timeout=60))
            assert isinstance(error, InvalidArgument) and error.reason == "FIELD_INVALID", error
            [violation] = error.violations
            assert violation.field == f"spec.resources.{name}" and str(value) in violation.description
        spec = sb.SandboxSpec(resources=sb.Resources(**most))
        request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
        assert (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox.spec.resources == spec.resources


@pytest.fixture
def small_disk(root: None) -> Iterator[Path]:
    """A filesystem of 256 MiB."""
    with tempfile.TemporaryDirectory(prefix="penstock-small-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=755", "none", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


async def refusal(service: Running) -> PenstockError:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec())
    return await failure(service.sandboxes.CreateSandbox(request, timeout=60))


@pytest.mark.requirement("R95")
async def test_full_journal_disk_refuses_new_sandboxes_and_keeps_existing_ones(
    small_disk: Path,
) -> None:
    """Of an agent that writes what there is; sandboxes are made again when there is room."""
    async with start_on(small_disk, "local", min_free_bytes=str(100 << 20), min_free_inodes="0") as service:
        greedy = await created(service)
        wrote = await greedy.run("python3", "-c", "open('/workspace/x', 'wb').write(bytes(180 << 20))")
        assert wrote.exit.code == 0, wrote.stderr
        error = await refusal(service)
        assert isinstance(error, ResourceExhausted) and error.reason == "DISK_LOW" and error.retry_after_s
        assert error.metadata["of"] == "bytes" and int(error.metadata["free"]) < 100 << 20
        assert await greedy.out("echo works") == "works"
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=greedy.id), timeout=60)

        async def has_room() -> bool:
            return os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize > 100 << 20

        await eventually_async(has_room, "what a deleted sandbox wrote is removed")
        assert await (await created(service)).out("echo works") == "works"


@pytest.mark.requirement("R95")
async def test_inodes_are_watched_like_bytes(small_disk: Path) -> None:
    """A disk without inodes takes no journal either."""
    most = os.statvfs(small_disk).f_files
    async with start_on(small_disk, "local", min_free_bytes="0", min_free_inodes=str(most - 2000)) as service:
        box = await created(service)
        made = await box.run("python3", "-c", "for n in range(2500): open(f'/workspace/{n}', 'w').close()")
        assert made.exit.code == 0, made.stderr
        error = await refusal(service)
        assert error.reason == "DISK_LOW" and error.metadata["of"] == "inodes"
