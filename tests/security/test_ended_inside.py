"""A sandbox that is ended from within: its service says so, so that nobody tries the same agent again for it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, MakeBox, capabilities, failure, make_box
from tests.conformance.sandbox.services import Running, start
from tests.security.test_sandbox_isolation import processes_of, space_of, status

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["capabilities", "make_box"]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["local", "local-ordinary-user"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Its own service, whose helpers are killed here."""
    async with start(request.param) as running:
        yield running


def spawner_of(service: int) -> int:
    """The only child of a sandbox service."""
    seen = [status(folder) for folder in Path("/proc").glob("[0-9]*")]
    (child,) = [one for one in seen if one.get("PPid") == str(service)]
    return int(child["Pid"])


def parts_of(service: int, seconds: str) -> dict[str, int]:
    """The first process of the sandbox in which `sleep seconds` runs, and its door, which is that process's parent."""
    process, first = processes_of(seconds)
    return {"first process": int(first["Pid"]), "door": int(process["PPid"]), "spawner": spawner_of(service)}


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("part", ["first process", "door", "spawner"])
async def test_sandbox_reports_whether_it_was_ended_from_within(make_box: MakeBox, service: Running, part: str) -> None:
    """By its first process or its door alone; not where the spawner ends, with which every sandbox does."""
    box: Box = await make_box()
    seconds = str(10**6 + secrets.randbelow(10**9))
    await box.start("agent", "sleep", seconds)
    finishing = asyncio.create_task(box.finish("agent"))
    parts = await asyncio.to_thread(parts_of, service.process.pid, seconds)
    assert space_of(Path(f"/proc/{parts['door']}")) != space_of(Path(f"/proc/{parts['first process']}"))
    assert "python" in status(Path(f"/proc/{parts['door']}"))["Name"]
    os.kill(parts[part], signal.SIGKILL)
    ended = (await finishing)[2]
    inside = part != "spawner"
    reason = {"first process": "PROCESS_ENDED", "door": "DOOR_CLOSED", "spawner": "SPAWNER_ENDED"}[part]
    assert (ended.reason, ended.ended_inside) == (ps.EXIT_REASON_SANDBOX_LOST, inside)
    assert ended.message == f"sandbox lost: {reason}"
    seen = (await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)).sandbox
    assert (seen.state, seen.lost_reason, seen.ended_inside) == (sb.SANDBOX_STATE_LOST, reason, inside)
    error = await failure(box.run("true"))
    assert error.reason == "SANDBOX_LOST"
    assert error.metadata["lost_reason"] == reason
    assert error.metadata.get("ended_inside") == ("true" if inside else None)


@pytest.mark.requirement("R93")
async def test_a_call_that_finds_the_sandbox_ending_says_why_as_well(make_box: MakeBox, service: Running) -> None:
    """What was asked while the sandbox ended has the same reason as what is asked later."""
    box: Box = await make_box()
    seconds = str(10**6 + secrets.randbelow(10**9))
    await box.start("agent", "sleep", seconds)
    parts = await asyncio.to_thread(parts_of, service.process.pid, seconds)
    os.kill(parts["door"], signal.SIGSTOP)
    calls = [asyncio.create_task(failure(box.read("/etc/passwd"))) for _ in range(3)]
    calls += [asyncio.create_task(failure(box.write("file", b"content"))) for _ in range(3)]
    # Answered by the service alone: by now the others have reached it, and wait for the door or find it gone.
    await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
    os.kill(parts["door"], signal.SIGKILL)
    for error in await asyncio.gather(*calls):
        assert (error.reason, error.metadata.get("ended_inside")) == ("SANDBOX_LOST", "true")


@pytest.mark.requirement("R93")
async def test_agent_ending_its_sandbox_by_limits_or_memory_is_reported(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """No time limit on the first process; and when memory runs out, an agent dies of it or is told to have."""
    limits = sb.Resources(memory_bytes=96 << 20) if capabilities.limit_memory else None
    box: Box = await make_box(resources=limits)
    cut = "import resource\ntry:\n resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nexcept OSError: print('refused')"
    assert (await box.run("python3", "-c", cut)).stdout == b"refused\n"
    orphans = "for i in $(seq 200); do (true &); done; echo 1000 > /proc/1/oom_score_adj; echo $?"
    assert await box.out(f"{{ {orphans}; }} 2>/dev/null") == "1"
    if limits is None:
        return
    hog = "echo 0 > /proc/self/oom_score_adj; head -c 200000000 /dev/zero > /dev/shm/x; exec tail /dev/zero"
    ended = (await box.run(shell=hog, timeout_s=60)).exit
    lost = ended.reason == ps.EXIT_REASON_SANDBOX_LOST
    assert ended.ended_inside if lost else ended.reason in (ps.EXIT_REASON_OOM, ps.EXIT_REASON_EXITED), ended
