"""A whole service process: start, announcement, signals, ties to its parent."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.ops.v1.operations_service_pb2 import GetServerInfoRequest
from penstock.ops.v1.operations_service_pb2_grpc import OperationsServiceStub
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import Unauthenticated

SCRIPT = Path(__file__).with_name("valve_service.py")
TOKEN = "sk-test '$(leak)"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return kept | {"XDG_STATE_HOME": str(tmp_path), "PENSTOCK_VALVE_OPERATOR_TOKEN": TOKEN}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Starts the service; whatever still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def begin(*argv: str, **more: str) -> "subprocess.Popen[str]":
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), *argv],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment | more,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield begin


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def ready(process: "subprocess.Popen[str]") -> str:
    announced = json.loads(line(process))
    assert announced["event"] == "ready"
    address: str = announced["address"]
    return address


async def alive(address: str, token: str | None = None) -> bool:
    async with connect(address, token) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_service_announces_itself_in_one_line_of_json(start: Start) -> None:
    process = start()
    announced = json.loads(line(process))
    assert announced["service"] == "valve"
    assert announced["pid"] == process.pid
    assert announced["endpoints"] == {"ingress": "127.0.0.1:7780"}
    assert await alive(announced["address"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_closes_and_exits_cleanly(number: signal.Signals, start: Start) -> None:
    process = start("--stop-s", "7")
    ready(process)
    process.send_signal(number)
    assert [line(process) for _ in range(4)] == ["takes False", "draining 7", "closed", ""]
    assert process.wait() == 0


def test_a_drain_that_does_not_end_is_given_up_in_time(start: Start) -> None:
    process = start("--stuck-drain", "--stop-s", "0.05")
    ready(process)
    process.terminate()
    assert [line(process) for _ in range(3)] == ["takes False", "draining 0.05", "closed"]
    assert process.wait() == 0


def test_a_second_signal_stops_without_waiting(start: Start) -> None:
    process = start("--stuck-drain", "--stop-s", "3600")
    ready(process)
    process.terminate()
    assert [line(process) for _ in range(2)] == ["takes False", "draining 3600"]
    process.terminate()
    assert line(process) == "closed"
    assert process.wait() != 0


def test_a_second_signal_stops_a_service_whose_work_still_runs(start: Start) -> None:
    process = start("--busy", "--drain-s", "3600")
    ready(process)
    process.terminate()
    assert line(process) == "takes False"
    process.terminate()
    assert line(process) == "closed"
    assert process.wait() != 0


def test_work_that_outlasts_the_drain_is_ended(start: Start) -> None:
    process = start("--busy", "--drain-s", "0.05", "--stop-s", "7")
    ready(process)
    process.terminate()
    assert [line(process) for _ in range(3)] == ["takes False", "draining 7", "closed"]
    assert process.wait() == 0


def test_a_signal_during_a_long_start_stops_it(start: Start) -> None:
    process = start("--stuck-start")
    assert line(process) == "starting"
    process.terminate()
    assert line(process) == "closed"
    process.wait()


def test_failed_start_prints_its_reason(start: Start) -> None:
    process = start("--refuse")
    out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert err.splitlines()[-1] == "penstock-valve: There is no water; open the sluice."
    assert "Traceback" not in err


def test_a_taken_port_is_refused_with_what_to_do(start: Start) -> None:
    """Not a silent share of the connections, which is what SO_REUSEPORT would give."""
    port = ready(start()).rpartition(":")[2]
    second = start("--port", port)
    _, err = second.communicate()
    assert second.returncode == 2
    assert port in err.splitlines()[-1]
    assert "another port" in err.splitlines()[-1]


@pytest.mark.requirement("R3")
@pytest.mark.parametrize("token", ["", "  "])
def test_a_blank_token_is_refused_when_the_service_starts(token: str, start: Start) -> None:
    process = start(PENSTOCK_VALVE_OPERATOR_TOKEN=token)
    assert process.wait() == 2


@pytest.mark.requirement("R1", "R2", "R8")
async def test_a_token_of_shell_metacharacters_works_and_is_nowhere_to_be_read(start: Start) -> None:
    """Not in the argv, not in the logs, not in the announcement."""
    process = start("--log-level", "debug")
    announced = line(process)
    address = json.loads(announced)["address"]
    argv = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
    assert await alive(address, TOKEN)
    async with connect(address, "wrong") as channel:
        with pytest.raises(Unauthenticated), typed_errors():
            await OperationsServiceStub(channel).GetServerInfo(GetServerInfoRequest())
    process.terminate()
    out, err = process.communicate()
    assert {json.loads(entry)["event"] for entry in err.splitlines()} >= {"settings", "rpc", "stopping"}
    for text in (announced, argv, out, err):
        assert TOKEN not in text
        assert "leak" not in text


async def test_health_says_not_serving_from_the_first_moment_of_a_stop(start: Start) -> None:
    process = start("--stuck-drain", "--stop-s", "3600")
    address = ready(process)
    async with connect(address, TOKEN) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = [(await anext(aiter(watch))).status]
        process.terminate()
        seen.append((await anext(aiter(watch))).status)
        watch.cancel()
    assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_service_ends_with_its_parent(how: str, start: Start, environment: dict[str, str]) -> None:
    """A killed `penstock up` leaves no service behind."""
    parent = (
        "import os, subprocess, sys\n"
        "flags = ['--parent-pid', str(os.getpid())] if sys.argv[2] == 'flag' else []\n"
        "subprocess.Popen([sys.executable, sys.argv[1], *flags])\n"
        "sys.stdin.read()\n"
    )
    more = {"PENSTOCK_PARENT_DEATH": "1"} if how == "variable" else {}
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(SCRIPT), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | more,
        text=True,
    ) as process:
        assert process.stdout is not None
        service = os.pidfd_open(json.loads(process.stdout.readline())["pid"])
        try:
            process.kill()
            # The pidfd is readable once the process has ended; the test's own guard bounds the wait.
            select.select([service], [], [])
            assert process.stdout.readline().startswith("takes False")
        finally:
            os.close(service)


def test_a_parent_that_is_already_gone_is_noticed(start: Start) -> None:
    process = start("--parent-pid", "1" if os.getppid() != 1 else "2")
    assert process.wait() != 0
