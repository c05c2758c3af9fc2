"""Floods of the ingress by plain HTTP, bounded in number: each is refused or served in order, beside a neighbour."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.integration.interception.connections.test_connections import HEALTH, client, head
from tests.integration.interception.test_rollout_tokens import status
from tests.support.loads.memory import Peak

from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock_interception.ingress import connections

HANGS_S = 60.0
USER: Any = [{"role": "user", "content": "list the files"}]


async def neighbour(service: Any) -> None:
    """Somebody else asks, on a connection of his own."""
    async with asyncio.timeout(HANGS_S), client(service.ingress) as other:
        other.send(HEALTH)
        assert (await other.answer())[0] == 200


@pytest.mark.requirement("R13")
async def test_endless_chunked_body_is_refused_at_the_limit_and_not_kept(start: Any) -> None:
    """With a token and without; 64 MiB that come all the same are passed over."""
    service = await start(max_body_bytes=1 << 20)
    rollout = await service.open()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for token, refusal in ((rollout.token, 413), ("wrong", 401)):
        peak = Peak(os.getpid())
        async with client(service.ingress) as endless, asyncio.timeout(HANGS_S):
            endless.send(head(rollout, "/v1/chat/completions", "transfer-encoding: chunked", token=token))
            with suppress(ConnectionError):
                for number in range(1024):
                    endless.send(chunk)
                    await endless.writer.drain()
                    if number % 256 == 0:
                        await neighbour(service)
            assert (await endless.answer())[0] == refusal
        assert peak.grown() < 32 << 20


@pytest.mark.requirement("R13")
async def test_requests_in_a_row_without_waiting_are_answered_in_order_beside_others(start: Any) -> None:
    """2,000 on each of 10 connections, of which nobody reads an answer until all are sent."""
    service = await start()
    async with AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(client(service.ingress)) for _ in range(10)]
        for one in greedy:
            one.send(HEALTH * 2000)
        for _ in range(20):
            await neighbour(service)
        async with asyncio.timeout(HANGS_S):
            for one in greedy:
                assert [(await one.answer())[0] for _ in range(2000)] == [200] * 2000


@pytest.mark.requirement("R148")
async def test_ended_connections_are_logged_in_a_bounded_number_of_lines(start: Any) -> None:
    """200 that say nothing; the lines of one reason."""
    service = await start(header_timeout_s=0.2)
    with capture_logs() as lines:
        async with AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(client(service.ingress)) for _ in range(200)]
            await neighbour(service)
            assert [await one.ended() for one in silent] == [b""] * 200
    told = [line for line in lines if line["event"] == "a connection was ended"]
    assert len(told) == connections.BURST


@pytest.mark.requirement("R4")
async def test_call_begun_before_revocation_is_answered_and_no_later_one(service: Any) -> None:
    """Whole and streamed; what is held belongs to the rollout, which goes on."""
    rollout, trainer = await service.open(), await service.trainer()
    agent = rollout.client()
    whole = asyncio.create_task(agent.chat.completions.create(model="m", messages=USER))
    first = await trainer.call()
    streamed = asyncio.create_task(
        agent.chat.completions.create(model="m", messages=[*USER, {"role": "user", "content": "more"}], stream=True)
    )
    second = await trainer.call()
    await service.gate.RevokeTokens(gate.RevokeTokensRequest(rollout_id=rollout.rollout_id))
    assert await status(service, rollout, rollout.token) == 401
    await trainer.deliver(trainer.result(first, "one"), trainer.result(second, "two"))
    assert (await whole).choices[0].message.content == "one"
    assert "".join([part.choices[0].delta.content or "" async for part in await streamed if part.choices]) == "two"
    assert await status(service, rollout, rollout.token, "complete") == 401
