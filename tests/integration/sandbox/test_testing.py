"""`penstock_sandbox.testing`: what a backend's author opens in tests of his own is the service."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import grpc
import pytest

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import process_service_pb2_grpc, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_sandbox.testing import open_endpoint, open_sandboxes

OPERATOR, TRAINER = "operator-token-1", "trainer-token-1"


@pytest.mark.requirement("R14")
async def test_open_sandboxes_serves_commands_and_asks_for_tokens() -> None:
    """A sandbox is made and runs a command, for the operator and trainer only."""
    with tempfile.TemporaryDirectory(prefix="penstock-testing-") as folder:
        Path(folder).chmod(0o755)  # the users of sandboxes enter it
        async with open_sandboxes(Path(folder), tokens={Role.OPERATOR: OPERATOR, Role.TRAINER: TRAINER}) as opened:
            sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(opened.channel)
            made = (await sandboxes.CreateSandbox(ss.CreateSandboxRequest(request_id="one"))).sandbox
            async with connect(opened.address, TRAINER) as channel:
                processes = process_service_pb2_grpc.ProcessServiceStub(channel)
                command = ps.Command(shell="echo hello")
                answer = await processes.Run(ps.RunRequest(sandbox_id=made.sandbox_id, command=command))
            assert answer.result.stdout == b"hello\n"
            async with connect(opened.address, "no token of it") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await sandbox_service_pb2_grpc.SandboxServiceStub(channel).ListSandboxes(ss.ListSandboxesRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not list(opened.health.troubles(60.0))


async def test_open_endpoint_leads_to_its_upstream() -> None:
    """What is sent arrives there, and its answer here."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, open_endpoint(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()
