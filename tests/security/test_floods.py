"""One who has no token floods a service's gRPC port; the others' calls are answered all the same."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.loads import floods
from tests.support.services.stack import Running

SERVICES = ("sandbox", "driver", "interception", "inference")
RESETS = 60_000
PATIENCE_S = 120.0


@contextmanager
def unfinished(address: str, connections: int, streams: int) -> Iterator[None]:
    opened = [floods.unfinished(address, streams) for _ in range(connections)]
    try:
        yield
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.requirement("R148")
@pytest.mark.parametrize("service", SERVICES)
async def test_streams_that_are_opened_and_reset_cancel_nobody_elses_calls(stack: Running, service: Any) -> None:
    """60,000 streams of one connection, each reset at once; a neighbour's calls all succeed meanwhile."""
    address = stack.stack.address(service)
    async with grpc.aio.insecure_channel(address) as channel:
        neighbour = health_pb2_grpc.HealthStub(channel)
        flood = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.loads.floods", address, str(RESETS), stderr=asyncio.subprocess.PIPE
        )
        ended = asyncio.create_task(flood.communicate())
        try:
            while not ended.done():
                answer = await neighbour.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            if flood.returncode is None:
                flood.kill()
            _, errors = await ended
        assert flood.returncode == 0, errors


@pytest.mark.requirement("R148")
@pytest.mark.parametrize("service", SERVICES)
async def test_requests_that_never_end_cancel_nobody_elses_calls(stack: Running, service: Any) -> None:
    """20 connections with 2,000 requests each whose message never comes, and a neighbour who calls."""
    address = stack.stack.address(service)
    flood = unfinished(address, connections=20, streams=2_000)
    await asyncio.to_thread(flood.__enter__)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            neighbour = health_pb2_grpc.HealthStub(channel)
            for _ in range(20):
                await neighbour.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    finally:
        flood.__exit__(None, None, None)
