"""A service's name, its ids, and requests for what another service of its kind has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from penstock.driver.v1 import terminal_service_pb2, terminal_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock.values import ids
from penstock_chassis import homes
from penstock_chassis.auth import Authenticator
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_chassis.homes import Home, StateDir, open_home, random_id, valid_name
from penstock_chassis.server import Server, Service

RANDOM: Final = "0" * 32


def test_a_made_name_stays(tmp_path: Path) -> None:
    first = open_home("sandbox", "", {}, tmp_path)
    assert valid_name(first.name) == first.name
    assert open_home("sandbox", "", {}, tmp_path) == first


def test_replicas_share_a_directory_and_each_keeps_a_name(tmp_path: Path) -> None:
    """One that is made anew takes the place, and the name, of one that is gone."""
    first, second, third = StateDir(tmp_path), StateDir(tmp_path), StateDir(tmp_path)
    assert [one.path for one in (first, second, third)] == [tmp_path, tmp_path / "replica-1", tmp_path / "replica-2"]
    names = [open_home("driver", "", {}, one.path).name for one in (first, second, third)]
    assert len(set(names)) == 3
    second.close()
    again = StateDir(tmp_path)
    assert open_home("driver", "", {}, again.path).name == names[1]


def test_too_many_replicas_of_a_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MAX_REPLICAS", 2)
    taken = [StateDir(tmp_path), StateDir(tmp_path)]
    with pytest.raises(FailedPrecondition) as caught:
        StateDir(tmp_path)
    assert caught.value.reason == "STATE_DIRS_IN_USE"
    for one in taken:
        one.close()


def test_a_service_takes_its_own_part_of_a_shared_directory(tmp_path: Path) -> None:
    """Two processes with the same settings; the directory of one that is killed is free at once."""
    settings = {
        "PENSTOCK_DRIVER_OPERATOR_TOKEN": "token-of-this-test",
        "PENSTOCK_DRIVER_STATE_DIR": str(tmp_path),
        "PENSTOCK_DRIVER_STATE_DIR_SHARED": "true",
        "PENSTOCK_DRIVER_PORT": "0",
    }
    environment = {"PATH": os.environ["PATH"], **settings}
    started = []
    try:
        for folder in (tmp_path, tmp_path / "replica-1"):
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock_driver"], env=environment, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "ready"
            assert (folder / "driver.db").exists()
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    again = StateDir(tmp_path)
    assert again.path == tmp_path
    again.close()


def test_former_names_stay_a_service_s_own(tmp_path: Path) -> None:
    made = open_home("sandbox", "", {}, tmp_path)
    renamed = open_home("sandbox", "n1", {}, tmp_path)
    assert (renamed.name, renamed.former) == ("n1", frozenset({made.name}))
    again = open_home("sandbox", "", {}, tmp_path)
    assert again == renamed


@pytest.mark.parametrize("value", ["N1", "-a", "a.b", "a" * 33, "a b", "ä"])
def test_a_name_that_does_not_fit_into_an_id_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        valid_name(value)


class _Sandboxes(sandbox_service_pb2_grpc.SandboxServiceServicer):
    async def DeleteSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        return sandbox_service_pb2.DeleteSandboxResponse()

    async def WatchSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield sandbox_service_pb2.WatchSandboxResponse()


def served(home: Home) -> Server:
    add = sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server
    service = Service(registrations=((_Sandboxes(), add),), home=home)  # type: ignore[abstract]
    return Server(service, Authenticator({}, anonymous=True), stop_s=0.0)


async def refusal(channel: grpc.aio.Channel, sandbox_id: str) -> PenstockError | None:
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
    try:
        with typed_errors():
            await stub.DeleteSandbox(sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id))
    except PenstockError as error:
        return error
    return None


@pytest.mark.requirement("R118")
async def test_a_request_for_another_home_names_it() -> None:
    """Also one that succeeds for an unknown id: a sandbox elsewhere would stay."""
    home = Home("sandbox", "n1", frozenset({"old"}), {"n2": "127.0.0.1:7"})
    async with served(home) as server, connect(server.address) as channel:
        error = await refusal(channel, ids.make("sb", "n2", RANDOM))
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.metadata) == ("HOME_ELSEWHERE", {"home": "n2", "address": "127.0.0.1:7"})
        error = await refusal(channel, ids.make("sb", "n3", RANDOM))
        assert error is not None
        assert error.metadata == {"home": "n3"}
        for own in ("n1", "old"):
            assert await refusal(channel, ids.make("sb", own, RANDOM)) is None
        assert await refusal(channel, "sb-" + RANDOM) is None
        assert await refusal(channel, ids.make("r", "n2", RANDOM)) is None


@pytest.mark.requirement("R113", "R118")
async def test_a_header_that_contradicts_the_request_decides_nothing() -> None:
    """It is for proxies: the request alone says what is asked for."""
    own, other = (ids.make("sb", name, RANDOM) for name in ("n1", "n2"))
    async with served(Home("sandbox", "n1")) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        request = sandbox_service_pb2.DeleteSandboxRequest
        await stub.DeleteSandbox(request(sandbox_id=own), metadata=(("x-penstock-sandbox-id", other),))
        with pytest.raises(FailedPrecondition), typed_errors():
            await stub.DeleteSandbox(request(sandbox_id=other), metadata=(("x-penstock-sandbox-id", own),))


@pytest.mark.parametrize(
    "odd", [ids.make("sb", "n2", RANDOM) + "\n", "sb.Größe." + RANDOM, "x" * 256, "\x00", "sb.n2." + RANDOM + "\x7f"]
)
async def test_an_odd_id_has_no_home(odd: str) -> None:
    async with served(Home("sandbox", "n1")) as server, connect(server.address) as channel:
        assert await refusal(channel, odd) is None


@pytest.mark.requirement("R118")
async def test_a_stream_for_another_home_is_refused() -> None:
    async with served(Home("sandbox", "n1")) as server, connect(server.address) as channel:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        request = sandbox_service_pb2.WatchSandboxRequest(sandbox_id=ids.make("sb", "n2", RANDOM))
        with pytest.raises(FailedPrecondition) as refused, typed_errors():
            async for _ in stub.WatchSandbox(request):
                pass
        assert refused.value.reason == "HOME_ELSEWHERE"


class _Terminals(terminal_service_pb2_grpc.TerminalServiceServicer):
    async def Step(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for request in request_iterator:
            yield terminal_service_pb2.StepResponse(step_id=request.step_id)


@pytest.mark.requirement("R118")
async def test_the_first_message_of_a_stream_names_the_home() -> None:
    add = terminal_service_pb2_grpc.add_TerminalServiceServicer_to_server
    service = Service(registrations=((_Terminals(), add),), home=Home("driver", "d1"))  # type: ignore[abstract]
    async with Server(service, Authenticator({}, anonymous=True), stop_s=0.0) as server:  # noqa: SIM117
        async with connect(server.address) as channel:
            stub = terminal_service_pb2_grpc.TerminalServiceStub(channel)
            own = [terminal_service_pb2.StepRequest(terminal_id="t", step_id=step) for step in "ab"]
            assert [answer.step_id async for answer in stub.Step(iter(own))] == ["a", "b"]
            other = terminal_service_pb2.StepRequest(terminal_id=ids.make("t", "d2", RANDOM))
            with pytest.raises(FailedPrecondition), typed_errors():
                async for _ in stub.Step(iter((other,))):
                    pass


def test_ids_are_unique_across_threads() -> None:
    """Threads take from one stock."""
    with ThreadPoolExecutor(8) as pool:
        drawn = [item for part in pool.map(lambda _: [random_id() for _ in range(2000)], range(8)) for item in part]
    assert len(set(drawn)) == len(drawn) == 16_000
    assert all(re.fullmatch("[0-9a-f]{32}", item) for item in drawn)


_FORKED = """
import os
from penstock_chassis.homes import random_id

random_id()
if os.fork() == 0:
    os.write(1, random_id().encode() + b" ")
    os._exit(0)
os.wait()
os.write(1, " ".join(random_id() for _ in range(1000)).encode())
"""


def test_a_forked_process_draws_other_ids() -> None:
    """It does not hand out what its parent has in stock."""
    # In a process of its own: this one may have threads by now, which a fork loses.
    drawn = subprocess.run([sys.executable, "-c", _FORKED], check=True, capture_output=True, text=True).stdout.split()
    assert len(set(drawn)) == len(drawn) == 1001
