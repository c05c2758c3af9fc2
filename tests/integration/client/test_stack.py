"""The services as processes: secrets, deaths, ends."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.endpoints.loopback import unused_port
from tests.support.services.processes import children_of, until_ended

from penstock.client import ConfigurationError, Endpoints, Penstock, connect
from penstock.local.stack import LocalStack, StackFailed, UpstreamEndpoint
from penstock.local.supervision import Deaths, ServiceRestart

SECRET = "sk-test '$(leak)"


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.requirement("R1", "R2")
@pytest.mark.usefixtures("genuine_starts")
async def test_no_secret_is_in_an_argv_or_environment_or_stays_on_disk(tmp_path: Path) -> None:
    """Tokens and keys are in files that only this user can read, and those are gone afterwards."""
    stack = LocalStack(
        state_dir=tmp_path / "state", upstreams={"up": UpstreamEndpoint("http://127.0.0.1:9/v1", SECRET)}
    )
    async with stack:
        private = stack._private
        assert private is not None
        files = list(private.iterdir())
        assert {file.name for file in files} == {"interception.toml", "sandbox.toml", "driver.toml"}
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        secrets = (SECRET, stack.operator_token, stack.trainer_token)
        pids = [item.process.pid for item in stack._processes]
        for pid in [*pids, *(child for parent in pids for child in children_of(parent))]:
            try:
                shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                assert pid not in pids
                continue  # a program that a service ran for a moment
            assert not any(secret.encode() in shown for secret in secrets)
        async with connect(stack.endpoints) as ps:
            await the_whole_is_there(ps)
            with pytest.raises(ConfigurationError, match="model-dir"):
                await ps.inference.info()
    assert not private.exists()
    assert not any(map(alive, pids))
    for log in (tmp_path / "state" / "logs").iterdir():
        text = log.read_text()
        assert not any(secret in text for secret in secrets), log


async def the_whole_is_there(ps: Penstock) -> None:
    assert [agent.name async for agent in ps.agents.list()]


def process_of(stack: LocalStack, service: str) -> int:
    """The process id of a service."""
    (item,) = [item for item in stack._processes if item.name == service]
    return item.process.pid


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that died is started again without a pause."""
    monkeypatch.setattr("penstock.local.supervision.FIRST_PAUSE_S", 0.0)


@pytest.mark.requirement("R97")
@pytest.mark.usefixtures("at_once", "genuine_starts")
async def test_dead_service_restarts_at_its_address_and_the_others_continue(tmp_path: Path) -> None:
    """Same address, same token, no other service ends; the caller and `GetStatus` learn of it."""
    seen: asyncio.Queue[ServiceRestart] = asyncio.Queue()
    async with (
        LocalStack(state_dir=tmp_path / "state", ports={"sandbox": unused_port()}, on_restart=seen.put_nowait) as stack,
        connect(stack.endpoints) as ps,
    ):
        before = {name: (stack.address(name), process_of(stack, name)) for name in stack.services}
        os.kill(before["sandbox"][1], signal.SIGKILL)
        death, back = await seen.get(), await seen.get()
        assert (death.service, death.number, death.limit, death.ready) == ("sandbox", 1, 5, False)
        assert "The sandbox service was killed by SIGKILL" in str(death) and "sandbox.log" in str(death)
        assert (back.service, back.ready) == ("sandbox", True)
        assert {name: stack.address(name) for name in stack.services} == {name: at for name, (at, _) in before.items()}
        after = {name: process_of(stack, name) for name in stack.services}
        assert [name for name, pid in after.items() if pid != before[name][1]] == ["sandbox"]
        async with await ps.sandboxes.create() as sandbox:
            assert (await sandbox.run(["echo", "again"])).stdout == b"again\n"
        (trouble,) = [item for item in (await ps.operations.status("sandbox")).troubles if "RESTART" in item.reason]
        assert trouble.reason == "SERVICE_RESTARTED" and not trouble.grave
        assert "once" in trouble.message and "killed by SIGKILL" in trouble.message
    assert not any(map(alive, after.values()))


@pytest.mark.requirement("R97")
@pytest.mark.usefixtures("at_once")
async def test_service_that_dies_too_often_ends_the_block_with_the_count(tmp_path: Path) -> None:
    """The number of restarts is bounded; nothing stays behind."""
    restarts: list[ServiceRestart] = []
    pids: list[int] = []

    def kill_again(restart: ServiceRestart) -> None:
        restarts.append(restart)
        if restart.ready:
            pids.append(process_of(stack, "driver"))
            os.kill(pids[-1], signal.SIGKILL)

    ports = {"driver": unused_port()}
    stack = LocalStack(state_dir=tmp_path / "state", ports=ports, max_restarts=2, on_restart=kill_again)
    with pytest.raises(StackFailed, match=r"driver service was killed by SIGKILL.*died 3 times.*All services are st"):
        async with stack:
            pids += [process_of(stack, name) for name in stack.services]
            os.kill(process_of(stack, "driver"), signal.SIGKILL)
            await stack.wait()
    assert [(item.number, item.ready) for item in restarts] == [(1, False), (1, True), (2, False), (2, True)]
    assert not any(map(alive, pids))
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.requirement("R97")
@pytest.mark.usefixtures("at_once")
async def test_service_that_cannot_restart_ends_the_block_with_its_message(tmp_path: Path) -> None:
    """A start that fails counts as a death."""
    state = tmp_path / "state"

    def spoil(_: ServiceRestart) -> None:
        (state / "driver" / "driver.db").write_bytes(b"no database" * 1000)

    with pytest.raises(StackFailed, match=r"died 3 times"):
        async with LocalStack(state_dir=state, max_restarts=2, on_restart=spoil) as stack:
            os.kill(process_of(stack, "driver"), signal.SIGKILL)
            await stack.wait()


@pytest.mark.requirement("R97")
async def test_a_stack_without_restarts_ends_with_its_dead_services_name_and_log(
    tmp_path: Path,
) -> None:
    """The caller's choice."""
    with pytest.raises(
        StackFailed, match=r"sandbox service was killed by SIGKILL.*Its log is.*All services are stopped"
    ):
        async with LocalStack(state_dir=tmp_path / "state", max_restarts=0) as stack:
            os.kill(process_of(stack, "sandbox"), signal.SIGKILL)
            await stack.wait()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.requirement("R97")
def test_pauses_double_to_a_limit_and_old_deaths_are_forgotten() -> None:
    """Bounded tries in a window of ten minutes."""
    now = 0.0
    deaths = Deaths(3, clock=lambda: now)
    assert [deaths.pause() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    now = 601.0
    assert deaths.pause() == 0.5
    assert (deaths.total, deaths.recent) == (5, 1)


@pytest.mark.requirement("R50")
async def test_service_that_does_not_stop_is_killed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who stops a stack hears what may have been left."""
    monkeypatch.setattr("penstock.local.processes._STOP_S", 0.2)
    async with LocalStack(state_dir=tmp_path / "state") as stack:
        (sandbox,) = [item for item in stack._processes if item.name == "sandbox"]
        os.kill(sandbox.process.pid, signal.SIGSTOP)
    assert sandbox.process.returncode == -signal.SIGKILL
    assert "the sandbox service did not stop" in caplog.text


async def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The reason is in the error, not only in a file."""
    with pytest.raises(StackFailed, match=r"model_dir|config|tokenizer"):
        async with LocalStack(state_dir=tmp_path / "state", model_dir=tmp_path / "absent"):
            raise AssertionError("started without a model")


async def test_only_one_stack_uses_a_state_directory(tmp_path: Path) -> None:
    """Two would take each other's sandboxes for leftovers."""
    async with LocalStack(state_dir=str(tmp_path)):  # a text does as well
        with pytest.raises(ConfigurationError, match=rf"of process {os.getpid()}\b.*--state-dir DIR"):
            async with LocalStack(state_dir=tmp_path):
                raise AssertionError("two stacks on one state")


@pytest.mark.requirement("R50")
async def test_when_its_owner_is_killed_every_service_ends(tmp_path: Path) -> None:
    """Nothing outlives a kill -9 of whoever started it."""
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom penstock.local.stack import LocalStack\n"
        "async def main():\n"
        "    async with LocalStack(state_dir=Path(sys.argv[1])) as stack:\n"
        "        print(*[item.process.pid for item in stack._processes], flush=True)\n"
        "        await stack.wait()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "state"), stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    pids = [int(item) for item in (await owner.stdout.readline()).split()]
    assert len(pids) == 3

    async def end() -> None:
        owner.kill()
        await owner.communicate()

    await until_ended(pids, end)


def test_endpoints_of_a_stack_without_a_model_have_no_inference() -> None:
    """An address that nobody was given is not called."""
    assert Endpoints(inference="", token="t").inference == ""
