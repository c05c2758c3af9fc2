"""Several drivers, gates and sandbox services: each has its own, and says where the rest is."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from tests.integration.driver.stack import TOKEN, Process, Stack, running
from tests.integration.driver.test_service import echo_agent, echo_rollout
from tests.support.services.stack import disjoint_uids

from penstock.client import NotFound, Task, Tokenizer, connect
from penstock.driver.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
)
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from penstock_chassis.channel import connect as channel
from penstock_chassis.channel import error_from_rpc

TASK: Final = Task(task_id="echo", instruction="hello there")
SOURCE: Final = Tokenizer("tiny")


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[tuple[Stack, Stack]]:
    """Two of each service, `a` and `b`, that know each other."""
    tokenizers = {"tiny": str(tokenizer_dir)}
    first_uid = disjoint_uids()
    with (
        running(tmp_path_factory.mktemp("a"), tokenizers, {"name": "a"}, {"first_uid": str(first_uid)}) as a,
        running(tmp_path_factory.mktemp("b"), tokenizers, {"name": "b"}, {"first_uid": str(first_uid + 2048)}) as b,
    ):
        a.introduce("b", b)
        b.introduce("a", a)
        yield a, b


async def with_echo(stack: Stack) -> None:
    """Registers an agent that calls no model."""
    async with channel(stack.driver.address, TOKEN) as to:
        agents = agent_service_pb2_grpc.AgentServiceStub(to)
        await agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=echo_agent()))


@pytest.mark.requirement("R113", "R118")
async def test_what_another_service_has_is_found_from_any(stacks: tuple[Stack, Stack]) -> None:
    """By ids alone: of a rollout, its events and trajectory, its group and a sandbox."""
    a, b = stacks
    await with_echo(a)
    async with connect(a.addresses, TOKEN) as at_a, connect(b.addresses, TOKEN) as at_b:
        rollout = await at_a.rollouts.create(TASK, "echo", source=SOURCE)
        assert rollout.rollout_id.startswith("r.a.")
        there = await at_b.rollouts.attach(rollout.rollout_id)
        result = await there.result()
        assert result.outcome.completed, result.outcome
        home = there.info.home
        assert home is not None
        assert (home.driver, home.gate, home.sandbox_service) == ("a", "a", "a")
        assert home.sandbox_id.startswith("sb.a.")
        assert [event.sequence async for event in there.events()]
        assert (await there.trajectory()).rollout_id == rollout.rollout_id
        group = await at_a.groups.create(TASK, "echo", n=1, source=SOURCE)
        (member,) = await (await at_b.groups.attach(group.group_id)).results()
        assert member.rollout.home is not None
        assert member.rollout.home.driver == "a"
        async with await at_a.sandboxes.create() as sandbox:
            found = await at_b.sandboxes.attach(sandbox.sandbox_id)
            assert (await found.refresh()).service == "a"
            assert (await found.run(["echo", "word"])).stdout == b"word\n"


@pytest.mark.requirement("R118")
async def test_a_plain_stub_reads_the_home_from_the_error(stacks: tuple[Stack, Stack]) -> None:
    a, b = stacks
    await with_echo(a)
    async with channel(a.driver.address, TOKEN) as to_a, channel(b.driver.address, TOKEN) as to_b:
        at_a, at_b = map(rollout_service_pb2_grpc.RolloutServiceStub, (to_a, to_b))
        create = rollout_service_pb2.CreateRolloutRequest(request_id=secrets.token_hex(8), spec=echo_rollout())
        rollout_id = (await at_a.CreateRollout(create)).rollout.rollout_id
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await at_b.GetRollout(rollout_service_pb2.GetRolloutRequest(rollout_id=rollout_id))
        error = error_from_rpc(refused.value)
        assert (refused.value.code(), error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "HOME_ELSEWHERE")
        assert error.metadata == {"home": "a", "address": a.driver.address}


@pytest.mark.requirement("R118")
async def test_an_id_that_a_client_chose_is_found_by_asking(stacks: tuple[Stack, Stack]) -> None:
    """It names no home; the record does."""
    a, b = stacks
    await with_echo(a)
    chosen = f"mine-{secrets.token_hex(8)}"
    async with channel(a.driver.address, TOKEN) as to_a:
        at_a = rollout_service_pb2_grpc.RolloutServiceStub(to_a)
        spec = echo_rollout()
        await at_a.CreateRollout(
            rollout_service_pb2.CreateRolloutRequest(request_id=chosen, rollout_id=chosen, spec=spec)
        )
    found = []
    for stack in (b, a):
        async with connect(stack.addresses, TOKEN) as ps:
            try:
                handle = await ps.rollouts.attach(chosen)
            except NotFound as unknown:
                found.append(unknown.reason)
            else:
                assert handle.info.home is not None
                found.append(handle.info.home.driver)
    assert found == ["ROLLOUT_UNKNOWN", "a"]


class Scheduler(grpc.GenericRpcHandler):
    """Stands before a sandbox service, and names it as the data plane of each sandbox: with a token that has ended,
    and a good one by GetDataPlane. It forwards what it is asked itself; `seen` are its methods.
    """

    def __init__(self, node: str, to: grpc.aio.Channel) -> None:
        self._node = node
        self._to = to
        self.seen: set[str] = set()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, details.method))

    async def _forward(self, method: str, requests: Any, context: Any) -> AsyncIterator[bytes]:
        service, _, name = method.rpartition("/")
        self.seen.add(name)
        if service.endswith((".ProcessService", ".FileService")):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Processes and files are at the data plane.")
        if name == "GetDataPlane":
            fresh = self._plane(TOKEN, time.time() + 3600)
            yield sandbox_service_pb2.GetDataPlaneResponse(data_plane=fresh).SerializeToString()
            return
        try:
            message: bytes
            async for message in self._to.stream_stream(method)(requests):
                yield self._placed(name, message)
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            await context.abort(error.code(), error.details())

    def _placed(self, name: str, message: bytes) -> bytes:
        if name == "CreateSandbox":
            created = sandbox_service_pb2.CreateSandboxResponse.FromString(message)
            created.data_plane.CopyFrom(self._plane("ended", 0))
            return created.SerializeToString()
        if name == "ForkSandboxes":
            child = sandbox_service_pb2.ForkSandboxesResponse.FromString(message)
            child.data_plane.CopyFrom(self._plane("ended", 0))
            return child.SerializeToString()
        return message

    def _plane(self, token: str, ends: float) -> sandbox_pb2.DataPlane:
        plane = sandbox_pb2.DataPlane(address=self._node, token=token)
        plane.token_expire_time.FromNanoseconds(int(ends * 1e9))
        return plane


@asynccontextmanager
async def scheduled(node: str) -> AsyncIterator[tuple[Scheduler, str]]:
    async with channel(node, TOKEN) as to:
        scheduler = Scheduler(node, to)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((scheduler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield scheduler, f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


@pytest.mark.requirement("R118")
async def test_a_rollout_runs_at_its_sandbox_s_data_plane(stacks: tuple[Stack, Stack], tmp_path: Path) -> None:
    a, _ = stacks
    async with scheduled(a.sandbox.address) as (scheduler, address):
        settings = {"sandbox_address": address, "interception_address": a.interception.address, "name": "s"}
        driver = Process("driver", tmp_path, {**settings, "sandbox_token": TOKEN, "interception_token": TOKEN})
        await asyncio.to_thread(driver.start)
        try:
            async with connect({**a.addresses, "driver": driver.address}, TOKEN) as ps:
                async with channel(driver.address, TOKEN) as to:
                    agents = agent_service_pb2_grpc.AgentServiceStub(to)
                    await agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=echo_agent()))
                rollout = await ps.rollouts.create(TASK, "echo", source=SOURCE)
                result = await rollout.result()
                assert result.outcome.completed, result.outcome
                home = rollout.info.home
                assert home is not None
                assert (home.driver, home.gate, home.sandbox_service) == ("s", "a", "a")
        finally:
            await asyncio.to_thread(driver.stop)
    assert {"ForkSandboxes", "GetDataPlane"} <= scheduler.seen
    assert not scheduler.seen & {"Run", "StartProcess", "WriteFile", "DeleteSandbox", "DiffSandbox"}


@pytest.mark.requirement("R118")
async def test_a_client_s_sandbox_is_used_at_its_data_plane(stacks: tuple[Stack, Stack]) -> None:
    """Its commands, files, lease and deletion; its token is renewed."""
    a, _ = stacks
    async with scheduled(a.sandbox.address) as (scheduler, address):  # noqa: SIM117
        async with connect({**a.addresses, "sandbox": address}, TOKEN) as ps:
            async with await ps.sandboxes.create() as sandbox:
                await sandbox.write_file("word.txt", b"word")
                assert await sandbox.read_file("word.txt") == b"word"
                assert (await sandbox.run(["cat", "word.txt"])).stdout == b"word"
                await sandbox.renew(600)
                async with await sandbox.start(["sleep", "600"]) as process:
                    assert not (await process.kill()).ok
    assert scheduler.seen == {"CreateSandbox", "GetDataPlane"}
