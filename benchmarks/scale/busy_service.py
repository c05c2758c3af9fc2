"""A service whose event loop is busy: each of its iterations takes as long as the first line of its input says."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Final

import grpc
import uvloop

from penstock_chassis.aio.event_loop import EventLoop
from penstock_chassis.auth import Authenticator
from penstock_chassis.server import Server, Service

SERVICE: Final = "penstock.bench.v1.EchoService"


async def _echo(request: bytes, _context: object) -> bytes:
    return request


def _register(_servicer: object, server: Any) -> None:
    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


async def serve(queues: int, iteration_s: float) -> None:
    """Until the process is ended."""
    service = Service(registrations=[(None, _register)])
    async with Server(service, Authenticator({}, anonymous=True), call_queues=queues) as server:
        print(json.dumps({"address": server.address}), flush=True)
        if iteration_s:
            loop = asyncio.get_running_loop()

            def work() -> None:
                # A sleep would leave the interpreter to gRPC's thread, which other work does not.
                until = time.perf_counter() + iteration_s
                while time.perf_counter() < until:
                    pass
                loop.call_soon(work)

            work()
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if given["is_plain"] else EventLoop) as runner:
        runner.run(serve(given["queues"], given["iteration_s"]))
