"""A gate that only speaks the protocol: hands out as many calls as there is credit for, and acknowledges what comes.

    python -m benchmarks.clients.gate_program CALLS

Says its address on standard output, and serves until it is told to end.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop
from google.protobuf.duration_pb2 import Duration

from penstock.interception.v1 import intercept_service_pb2 as pb

PROMPT = bytes(4 * 1000)


class Gate:
    """One session at a time; its calls have nothing in them but what every call has."""

    def __init__(self, calls: int) -> None:
        self._calls = calls

    async def intercept(
        self, requests: AsyncIterator[pb.InterceptRequest], context: Any
    ) -> AsyncIterator[pb.InterceptResponse]:
        """Until the trainer says goodbye."""
        del context
        hello = (await anext(requests)).hello
        welcome = pb.Welcome(session_id="s", credits=hello.credits, heartbeat_interval=Duration(seconds=10))
        yield pb.InterceptResponse(welcome=welcome)
        handed = min(hello.credits.calls, self._calls)
        yield self._some(0, handed)
        async for request in requests:
            if request.WhichOneof("frame") == "goodbye":
                return
            answered = [result.call_id for result in request.results.results]
            if answered:
                yield pb.InterceptResponse(acknowledged=pb.ResultsAcknowledged(accepted_call_ids=answered))
            if fresh := min(len(answered), self._calls - handed):
                yield self._some(handed, handed + fresh)
                handed += fresh

    def _some(self, start: int, end: int) -> pb.InterceptResponse:
        calls = [
            pb.ModelCall(
                call_id=f"call-{number:08}",
                lease_id=f"lease-{number:08}",
                rollout_id="rollout",
                index=number,
                prompt_token_ids=PROMPT,
                prompt_count=1000,
                lease_attempt=1,
            )
            for number in range(start, end)
        ]
        return pb.InterceptResponse(calls=pb.Calls(calls=calls))


async def main() -> None:
    """See the module's text."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        Gate(int(sys.argv[1])).intercept, pb.InterceptRequest.FromString, pb.InterceptResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("penstock.interception.v1.InterceptService", {"Intercept": method})
    server.add_generic_rpc_handlers((service,))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
