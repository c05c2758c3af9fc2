"""The engines that stay are asked on when one is removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.channel import connect
from penstock_chassis.membership.members import Member
from penstock_chassis.membership.peers import Peer, State
from penstock_interception.clients.engines import pool as module
from penstock_interception.clients.engines.pool import EnginePool


class Engine(pb_grpc.InferenceServiceServicer):
    """Notes that it is asked, and answers unless it hangs."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def GetInfo(self, request: Any, context: Any) -> pb.GetInfoResponse:  # noqa: N802
        """Its weights."""
        self.asked.put_nowait(None)
        if self.hangs:
            await asyncio.Event().wait()
        return pb.GetInfoResponse(policy_version=1)

    async def WatchStats(self, request: Any, context: Any) -> AsyncIterator[pb.WatchStatsResponse]:  # noqa: N802
        """Its load."""
        yield pb.WatchStatsResponse()


@pytest.mark.requirement("R117")
async def test_the_other_engines_are_asked_on_when_one_that_is_asked_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.01)
    one: Any = Engine  # it has no more methods than the pool asks for
    engines, peers, servers = {"e1": one(hangs=False), "e2": one(hangs=True)}, {}, []
    for name, engine in engines.items():
        server = grpc.aio.server()
        pb_grpc.add_InferenceServiceServicer_to_server(engine, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        peers[name] = Peer(Member(name, address), connect(address), state=State.SERVING)
    members: Any = SimpleNamespace(
        all=lambda: list(peers.values()), changed=Signal(), until_broken=asyncio.Event().wait
    )
    following = asyncio.ensure_future(EnginePool("engines", members, is_list=True).follow())
    try:
        await engines["e2"].asked.get()
        await engines["e1"].asked.get()
        removed = peers.pop("e2")
        removed.loss.set()
        members.changed.notify()
        await removed.channel.close()
        await engines["e1"].asked.get()
    finally:
        following.cancel()
        await asyncio.wait([following])
        for peer in peers.values():
            await peer.channel.close()
        for server in servers:
            await server.stop(None)
