"""What is prepared in one job of Hugging Face is carried into others: what of it, from where, and how much."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, command, failure
from tests.conformance.sandbox.services import SERVICES, Running, start_variant
from tests.support.hf_jobs.client import HfJobs, hf_jobs
from tests.support.waiting import eventually_async

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition

pytestmark = pytest.mark.asyncio

OTHER_IMAGE = "python:3.12-slim"


@pytest_asyncio.fixture
async def jobs() -> AsyncIterator[HfJobs]:
    """A stand-in of its own for each test."""
    async with hf_jobs() as running:
        yield running


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Where a service keeps its state."""
    with tempfile.TemporaryDirectory(prefix="penstock-hf-forks-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@asynccontextmanager
async def serve(state_dir: Path, jobs: HfJobs, sdk: str = "hf-hub", **settings: str) -> AsyncIterator[Running]:
    """The service on a stand-in; `settings` are variables without their prefix."""
    further = {**jobs.environment, **{f"PENSTOCK_SANDBOX_{key.upper()}": value for key, value in settings.items()}}
    async with start_variant(state_dir, sdk, SERVICES[sdk], further) as running:
        yield running


async def prepare(service: Running, *shell: str, **spec: Any) -> ss.Snapshot:
    """A snapshot of a sandbox in which the commands ran."""
    setup = [command(shell=text) for text in shell]
    request = ss.PrepareSnapshotRequest(spec=ss.SnapshotSpec(sandbox=sb.SandboxSpec(**spec), setup=setup))
    *_, last = [event async for event in service.sandboxes.PrepareSnapshot(request, timeout=120)]
    snapshot: ss.Snapshot = last.snapshot
    return snapshot


async def fork(service: Running, snapshot: ss.Snapshot, count: int = 1) -> list[ss.ForkSandboxesResponse]:
    """Its children, or their failures."""
    request = ss.ForkSandboxesRequest(
        request_id=secrets.token_hex(8), snapshot_id=snapshot.snapshot_id, count=count, spec=sb.SandboxSpec()
    )
    return [event async for event in service.sandboxes.ForkSandboxes(request, timeout=120)]


def archives(state_dir: Path) -> list[str]:
    """What the service keeps."""
    return sorted(path.name for path in (state_dir / "state" / "hf" / "archives").iterdir())


@pytest.mark.requirement("R52", "R57")
@pytest.mark.parametrize("sdk", ["hf-hub", "hf-sandbox"])
async def test_a_fork_has_what_its_user_made_and_not_what_that_deleted(jobs: HfJobs, state_dir: Path, sdk: str) -> None:
    """Owners, modes, links, times and deletions; no process and nothing that only the machine changed."""
    async with serve(state_dir, jobs, sdk) as service:
        snapshot = await prepare(
            service,
            "mkdir -m 700 deep; head -c 6000000 /dev/urandom > deep/large; ln deep/large hard; ln -s deep/large soft",
            "touch -d 2001-02-03 old; mkfifo pipe; echo gone > gone; rm gone; nohup sleep 4803 &",
            "sha256sum deep/large > sum; echo home > ~/.file",
        )
        assert snapshot.fork_kind == sb.FORK_KIND_ARCHIVE and snapshot.size_bytes > 6_000_000
        (child,) = await fork(service, snapshot)
        box = Box(service, child.sandbox)
        assert await box.out("sha256sum -c sum >/dev/null && cat ~/.file") == "home"
        told = await box.out(
            "stat -c '%A %U %h' deep hard; readlink soft; stat -c %y old; stat -c %F pipe; ls gone 2>&1 | wc -l"
        )
        assert told.splitlines() == [
            "drwx------ agent 2",
            "-rw-r--r-- agent 2",
            "deep/large",
            "2001-02-03 00:00:00.000000000 +0000",
            "fifo",
            "1",
        ]
        assert "4803" not in await box.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert (await box.run(shell="ls /opt/penstock/attendant")).exit.code != 0


@pytest.mark.requirement("R57")
async def test_a_fork_starts_in_the_image_that_its_snapshot_was_made_in(jobs: HfJobs, state_dir: Path) -> None:
    """Also of a snapshot that was prepared on another one: its archive is a difference from that image."""
    async with serve(state_dir, jobs, hf_allowed_images='["python:*"]') as service:
        first = await prepare(service, "echo first > file", base=sb.Base(image=OTHER_IMAGE))
        second = await prepare(service, "echo second >> file", base=sb.Base(snapshot_id=first.snapshot_id))
        (child,) = await fork(service, second)
        assert await Box(service, child.sandbox).out("cat file") == "first\nsecond"
        assert [job["image"] for job in await jobs.jobs()] == [OTHER_IMAGE] * 3


@pytest.mark.requirement("R46", "R57")
async def test_roots_changes_anywhere_are_archived(jobs: HfJobs, state_dir: Path) -> None:
    """An agent that must be installed by root is; what is the machine's own stays with the machine."""
    async with serve(state_dir, jobs) as service:
        snapshot = await prepare(
            service,
            "mkdir /srv && echo x > /srv/x && chown 4711:4712 /srv/x && chmod 4755 /srv/x && rm /etc/group",
            "echo 127.0.0.1 machine >> /etc/hosts",
            user="root",
        )
        (child,) = await fork(service, snapshot)
        box = Box(service, child.sandbox)
        assert await box.out(
            "stat -c '%u %g %a' /srv/x; ls /etc/group 2>/dev/null; grep -c machine /etc/hosts || true"
        ) == ("4711 4712 4755\n0")


@pytest.mark.requirement("R49", "R54")
async def test_more_than_the_cache_holds_is_refused_and_leaves_nothing(jobs: HfJobs, state_dir: Path) -> None:
    """It is measured where it is; neither a job nor a file stays."""
    async with serve(state_dir, jobs, snapshot_cache_bytes="1000000") as service:
        error = await failure(prepare(service, "head -c 3000000 /dev/zero > large"))
        assert isinstance(error, FailedPrecondition) and error.reason == "SEAL_FAILED"
        assert "snapshot_cache_bytes" in error.message
        assert archives(state_dir) == []
        assert not await jobs.running()
        (child,) = await fork(service, await prepare(service, "echo small > small"))
        assert await Box(service, child.sandbox).out("cat small") == "small"


@pytest.mark.requirement("R49", "R51")
async def test_an_archive_that_does_not_get_through_fails_that_fork_alone(jobs: HfJobs, state_dir: Path) -> None:
    """The next has it, and the one that failed leaves no job."""
    async with serve(state_dir, jobs) as service:
        snapshot = await prepare(service, "echo prepared > file")
        await jobs.fault("fail", where="port", count=1, path="/v1/files/write")
        (failed,) = await fork(service, snapshot)
        assert failed.failure.reason == "CREATE_FAILED" and failed.failure.retriable
        (child,) = await fork(service, snapshot)
        assert await Box(service, child.sandbox).out("cat file") == "prepared"

        async def one_runs() -> bool:
            return len(await jobs.running()) == 1

        await eventually_async(one_runs, "only the second runs")


@pytest.mark.requirement("R44", "R49")
async def test_a_job_that_vanishes_as_it_is_sealed_leaves_no_snapshot(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        await jobs.fault("fail", where="port", count=1, path="/v1/files/stat")
        error = await failure(prepare(service, "echo prepared > file"))
        assert error.reason == "SEAL_FAILED"
        assert archives(state_dir) == []
        assert not await jobs.running()


@pytest.mark.requirement("R50", "R70")
async def test_a_removed_snapshots_archive_goes_and_none_outlives_the_service(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        first, second = await prepare(service, "echo 1 > file"), await prepare(service, "echo 2 > file")
        assert archives(state_dir) == sorted([first.snapshot_id, second.snapshot_id])
        await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=first.snapshot_id), timeout=30)
        assert archives(state_dir) == [second.snapshot_id]
        service.process.kill()
    async with serve(state_dir, jobs) as service:
        assert archives(state_dir) == []
