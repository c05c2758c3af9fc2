"""What breaks between this service and Hugging Face loses nothing, leaves nothing, and is told as what it is."""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import Box, claimed, failure
from tests.conformance.sandbox.services import SERVICES, Running, start_variant
from tests.support.hf_jobs.client import TOKEN, HfJobs, hf_jobs
from tests.support.waiting import eventually_async

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition, ResourceExhausted, Unavailable

pytestmark = pytest.mark.asyncio

_COUNT = "for n in $(seq 1 200); do echo line $n; sleep 0.02; done"
_COUNTED = "".join(f"line {n}\n" for n in range(1, 201)).encode()


@pytest_asyncio.fixture
async def jobs() -> AsyncIterator[HfJobs]:
    """A stand-in of its own for each test."""
    async with hf_jobs() as running:
        yield running


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Where a service keeps its state, and its successor finds it."""
    with tempfile.TemporaryDirectory(prefix="penstock-hf-fault-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@asynccontextmanager
async def serve(state_dir: Path, jobs: HfJobs, **settings: str) -> AsyncIterator[Running]:
    """The service on a stand-in; `settings` are variables without their prefix, or whole ones in capitals."""
    further = {
        **jobs.environment,
        **{key if key.isupper() else f"PENSTOCK_SANDBOX_{key.upper()}": value for key, value in settings.items()},
    }
    async with start_variant(state_dir, "hf-hub", SERVICES["hf-hub"], further) as running:
        yield running


def request(**spec: Any) -> ss.CreateSandboxRequest:
    spec.setdefault("network", sb.NetworkPolicy(open=sb.OpenNetwork()))
    return ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(backend="hf", **spec))


async def create(service: Running, **spec: Any) -> Box:
    return Box(service, (await service.sandboxes.CreateSandbox(request(**spec), timeout=60)).sandbox)


async def until_none_runs(jobs: HfJobs) -> None:
    """Jobs end a moment after they are told to."""
    await until_run(jobs, 0)


async def until_run(jobs: HfJobs, count: int) -> None:
    """So many jobs run."""

    async def so_many() -> bool:
        return len(await jobs.running()) == count

    await eventually_async(so_many, f"{count} jobs run")


@pytest.mark.requirement("R26", "R39")
async def test_streams_that_are_cut_lose_and_double_nothing(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        box = await create(service)
        (job,) = await jobs.running()
        await box.start("p", "bash", "-c", _COUNT)
        seen = 0
        async for event in box.watch("p"):
            seen += len(event.chunk.data)
            if seen > 300:
                # Every 300 bytes or so, until it has ended.
                seen = 0
                await jobs.fault("cut", job=job["id"])
        stdout, _, ended = await box.finish("p")
        assert stdout == _COUNTED and ended.code == 0


@pytest.mark.requirement("R51")
async def test_requests_that_fail_for_a_while_are_made_good(jobs: HfJobs, state_dir: Path) -> None:
    """Input that was not taken is sent again, once."""
    async with serve(state_dir, jobs) as service:
        box = await create(service)
        content = secrets.token_bytes(3_000_000)
        await jobs.fault("fail", where="port", count=4, path="/v1/exec")
        await box.write("file", content)
        await jobs.fault("fail", where="port", count=2, path="/v1/exec")
        assert (await box.read("file"))[0] == content


@pytest.mark.requirement("R43")
async def test_a_job_that_vanishes_is_lost_at_once(jobs: HfJobs, state_dir: Path) -> None:
    """A watcher stops when its sandbox is gone."""
    async with serve(state_dir, jobs) as service:
        box = await create(service)
        await box.start("p", "sleep", "4801")
        finishing = asyncio.create_task(box.finish("p"))
        (job,) = await jobs.running()
        await jobs.fault("vanish", job=job["id"])
        assert (await finishing)[2].reason == ps.EXIT_REASON_SANDBOX_LOST
        error = await failure(box.run("true"))
        assert isinstance(error, FailedPrecondition) and error.reason == "SANDBOX_LOST"
        assert error.metadata["lost_reason"] == "JOB_ENDED"


@pytest.mark.requirement("R43", "R93")
@pytest.mark.parametrize(
    ("stage", "message", "reason"),
    [
        ("ERROR", "exit code 137", "JOB_FAILED"),
        ("ERROR", "Job timeout", "JOB_ENDED"),
        ("ERROR", "The job timed out after 24h", "JOB_ENDED"),
        ("COMPLETED", "exit code 0", "JOB_ENDED"),
        ("CANCELED", "", "JOB_ENDED"),
    ],
)
async def test_only_a_job_that_failed_counts_as_ended_from_inside(
    jobs: HfJobs, state_dir: Path, stage: str, message: str, reason: str
) -> None:
    """Neither Hugging Face's time limit nor its idle timeout is the agent's fault."""
    async with serve(state_dir, jobs) as service:
        box = await create(service)
        await box.start("p", "sleep", "4804")
        finishing = asyncio.create_task(box.finish("p"))
        (job,) = await jobs.running()
        await jobs.fault("end", job=job["id"], stage=stage, message=message)
        assert (await finishing)[2].reason == ps.EXIT_REASON_SANDBOX_LOST
        error = await failure(box.run("true"))
        assert (error.reason, error.metadata["lost_reason"]) == ("SANDBOX_LOST", reason)


@pytest.mark.requirement("R61", "R63")
async def test_no_lease_is_renewed_beyond_its_jobs_end(jobs: HfJobs, state_dir: Path) -> None:
    """The job's time began before the lease's."""
    async with serve(state_dir, jobs, max_lifetime_s="604800") as service:
        box = await create(service)
        renew = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=86_400))
        error = await failure(service.sandboxes.RenewLease(renew, timeout=30))
        assert isinstance(error, FailedPrecondition) and error.reason == "LEASE_REFUSED"
        got = await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
        assert got.sandbox.expire_time == box.sandbox.expire_time
        renew.lease.seconds = 43_200
        granted = await service.sandboxes.RenewLease(renew, timeout=30)
        assert granted.expire_time.seconds > box.sandbox.expire_time.seconds


@pytest.mark.requirement("R4")
async def test_workload_that_ends_its_guest_ends_only_its_sandbox(jobs: HfJobs, state_dir: Path) -> None:
    """Root may do that where root was asked for; others may not even see it."""
    async with serve(state_dir, jobs) as service:
        root, other = await create(service, user="root"), await create(service)
        assert await other.out("pkill -9 -f '[a]ttendant' 2>/dev/null || echo not ours") == "not ours"
        assert (await other.run(shell="cat /opt/penstock/attendant/attendant.py")).exit.code != 0
        # Once its start was told: the attendant takes with it what it has not said.
        await root.start("p", "bash", "-c", "read; pkill -9 -f '[a]ttendant.py'; sleep 4802", stdin=True)
        with suppress(grpc.aio.AioRpcError):  # nor does it say that it took the line
            await root.write_stdin("p", b"\n")
        assert (await root.finish("p"))[2].reason == ps.EXIT_REASON_SANDBOX_LOST
        assert await other.out("echo alive") == "alive"
        await until_run(jobs, 1)


@pytest.mark.requirement("R50")
async def test_a_killed_hf_service_leaves_jobs_that_its_successor_ends(jobs: HfJobs, state_dir: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-hf-other-") as folder:
        async with serve(Path(folder), jobs) as other:
            kept = await create(other)
            async with serve(state_dir, jobs) as service:
                await create(service)
                burst = [asyncio.ensure_future(create(service)) for _ in range(4)]
                await burst[0]
                service.process.send_signal(signal.SIGKILL)
                await asyncio.gather(*burst, return_exceptions=True)
            assert len(await jobs.running()) > 1
            async with serve(state_dir, jobs) as service:
                assert len(await jobs.running()) == 1
                assert await (await create(service)).out("echo again") == "again"
            assert await kept.out("echo untouched") == "untouched"
    await until_none_runs(jobs)


@pytest.mark.requirement("R50", "R51")
async def test_hf_sandboxs_jobs_have_no_labels_and_are_ended_by_their_ids(jobs: HfJobs, state_dir: Path) -> None:
    """And its output, which is fetched, loses nothing to requests that fail."""
    classic = {**SERVICES["hf-sandbox"].settings}
    async with serve(state_dir, jobs, **classic) as service:
        box = await create(service)
        await box.start("p", "bash", "-c", _COUNT)
        seen = 0
        async for event in box.watch("p"):
            seen += len(event.chunk.data)
            if seen > 500:
                seen = 0
                await jobs.fault("fail", where="port", count=2, path="/exec")
        assert (await box.finish("p"))[0] == _COUNTED
        (job,) = await jobs.running()
        assert not [label for label in job["labels"] if "penstock" in label] and job["timeout_s"] == 86_400
        service.process.send_signal(signal.SIGKILL)
    assert len(await jobs.running()) == 1
    async with serve(state_dir, jobs, **classic):
        await until_run(jobs, 0)


@pytest.mark.requirement("R50")
async def test_jobs_of_a_service_that_never_comes_back_end_by_themselves(jobs: HfJobs, state_dir: Path) -> None:
    """As long a silence ends none of a service that is there."""
    async with serve(state_dir, jobs, hf_idle_timeout_s="20") as service:
        box = await create(service)
        silent = await jobs.running()
        with tempfile.TemporaryDirectory(prefix="penstock-hf-other-", ignore_cleanup_errors=True) as folder:
            async with serve(Path(folder), jobs, hf_idle_timeout_s="20") as other:
                await create(other)
                assert len(await jobs.running()) == 2
                other.process.send_signal(signal.SIGKILL)
        await until_run(jobs, 1)
        assert [job["id"] for job in await jobs.running()] == [job["id"] for job in silent]
        assert await box.out("echo alive") == "alive"


@pytest.mark.requirement("R49")
async def test_a_creation_that_is_cancelled_leaves_no_job(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        await jobs.fault("hold", on=True)
        creating = asyncio.ensure_future(service.sandboxes.CreateSandbox(request(), timeout=60))
        await until_run(jobs, 1)
        creating.cancel()
        await until_none_runs(jobs)
        await jobs.fault("hold", on=False)
        assert await (await create(service)).out("echo fine") == "fine"


@pytest.mark.requirement("R8", "R49")
async def test_failed_creation_hides_the_token_and_leaves_no_job(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        await jobs.fault("fail", where="jobs", count=1, path="/api/jobs/")
        error = await failure(service.sandboxes.CreateSandbox(request(), timeout=60))
        assert isinstance(error, Unavailable) and error.reason == "CREATE_FAILED" and "500" in error.message
        assert TOKEN not in str(error)
        # The job is there and its ports never answer: it is ended.
        await jobs.fault("fail", where="port", count=3, path="/v1/files/write")
        error = await failure(service.sandboxes.CreateSandbox(request(), timeout=60))
        assert isinstance(error, Unavailable) and error.reason == "CREATE_FAILED"
        await until_none_runs(jobs)


@pytest.mark.requirement("R70")
async def test_an_end_that_fails_is_tried_until_it_succeeds(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs) as service:
        box = await create(service)
        await jobs.fault("fail", where="jobs", count=4, path="/api/jobs/")
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)
        await until_none_runs(jobs)


@pytest.mark.requirement("R31", "R51")
async def test_more_sandboxes_than_threads_are_refused(jobs: HfJobs, state_dir: Path) -> None:
    async with serve(state_dir, jobs, hf_max_sandboxes="2") as service:
        first, _ = await create(service), await create(service)
        error = await failure(service.sandboxes.CreateSandbox(request(), timeout=60))
        assert isinstance(error, ResourceExhausted) and error.reason == "SANDBOX_LIMIT" and error.retry_after_s
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=first.id), timeout=60)
        assert await (await create(service)).out("echo room") == "room"


async def unavailable(state_dir: Path, jobs: HfJobs, **settings: str) -> str:
    """Why the backend is not there."""
    async with serve(state_dir, jobs, **settings) as service:
        answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
        (backend,) = [one for one in answer.backends if one.name == "hf"]
        error = await failure(service.sandboxes.CreateSandbox(request(), timeout=60))
        assert isinstance(error, FailedPrecondition) and error.reason == "BACKEND_UNAVAILABLE"
        assert not backend.available
        return str(backend.unavailable_reason)


@pytest.mark.requirement("R48")
async def test_the_hf_backend_says_which_sdk_or_token_it_lacks(jobs: HfJobs, state_dir: Path) -> None:
    blocked = state_dir / "blocked"
    blocked.mkdir()
    for name in ("huggingface_hub", "hf_sandbox"):
        (blocked / f"{name}.py").write_text("raise ImportError('as if it were not installed')\n")
    assert "HF_TOKEN" in await unavailable(state_dir, jobs, HF_TOKEN="")
    assert "penstock-sandbox[hf]" in await unavailable(state_dir, jobs, PYTHONPATH=str(blocked))
    classic = await unavailable(state_dir, jobs, PYTHONPATH=str(blocked), hf_client="hf-sandbox")
    assert "penstock-sandbox[hf-sandbox]" in classic
    assert "namespace" in await unavailable(state_dir, jobs, hf_client="hf-sandbox", hf_namespace="org")
    refused = await unavailable(state_dir, jobs, hf_token="hf_wrong-and-secret")
    assert "refused the token" in refused and "hf_wrong-and-secret" not in refused


@pytest.mark.requirement("R27", "R51")
async def test_a_hugging_face_that_does_not_answer_is_asked_again(jobs: HfJobs, state_dir: Path) -> None:
    await jobs.fault("fail", where="jobs", count=1, path="whoami")
    async with serve(state_dir, jobs) as service:

        async def there() -> bool:
            answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
            return any(one.available for one in answer.backends if one.name == "hf")

        await eventually_async(there, "the backend is available")
        assert await (await create(service)).out("echo here") == "here"


@pytest.mark.requirement("R55")
async def test_neither_network_is_offered_that_hugging_face_does_not_close(jobs: HfJobs, state_dir: Path) -> None:
    """One endpoint only where the operator accepted that the rest is open; nothing was made for those refused."""
    endpoint = sb.NetworkPolicy(one_endpoint=sb.OneEndpoint(local_port=4000, upstream="127.0.0.1:9"))
    listed = sb.NetworkPolicy(allowlist=sb.Allowlist(hosts=["a.test"]))
    async with serve(state_dir, jobs, hf_allow_open_egress="false") as service:
        assert list((await claimed(service)).networks) == [sb.NETWORK_KIND_OPEN]
        for network in (endpoint, sb.NetworkPolicy(none=sb.NoNetwork()), listed):
            error = await failure(service.sandboxes.CreateSandbox(request(network=network), timeout=60))
            assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"
    assert not await jobs.jobs()


@pytest.mark.requirement("R1", "R2", "R12")
async def test_no_secret_reaches_a_sandbox(jobs: HfJobs, state_dir: Path) -> None:
    """Not the service's token, not its environment, and the sandbox's own token only root's."""
    async with serve(state_dir, jobs) as service:
        box = await create(service, user="root")
        seen = await box.out(
            "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; grep -rIl hf_stand /tmp /run /root /home || true"
        )
        assert TOKEN not in seen and "PENSTOCK" not in seen and "sk-host-secret" not in seen
        secret = "sk-test '$(leak)"
        shown = await box.run(shell="env; cat /proc/*/cmdline", secret_env={"KEY": secret})
        assert f"KEY={secret}".encode() in shown.stdout and shown.stdout.count(b"sk-test") == 1
        (job,) = await jobs.running()
        assert job["secrets"] == ["SBX_TOKEN"] and "KEY" not in job["environment"]
