"""Takes calls and answers them, by the Python client or by the stubs alone; `benchmarks/clients` says what is told.

python -m benchmarks.clients.python_program client|stubs ADDRESS CALLS CREDITS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.report import percentile
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import Completion, ModelCall, connect
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc

IDS = np.arange(100, dtype=np.int32)
LOGPROBS = np.full(100, -0.5, np.float32)


class Meter:
    """What the calls after the first tenth took."""

    def __init__(self, calls: int) -> None:
        self._first, self._calls = calls // 10, calls
        self._answered = 0
        self._began = (0.0, 0.0)
        self._took: list[float] = []
        self.told: dict[str, float] = {}

    def answered(self, began: float) -> bool:
        """A call that came at `began` is acknowledged; whether it was the last."""
        self._answered += 1
        if self._answered == self._first:
            self._began = (time.perf_counter(), time.process_time())
        elif self._answered > self._first:
            self._took.append(time.perf_counter() - began)
        if self._answered < self._calls:
            return False
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        counted = len(self._took)
        p50 = percentile(self._took, 0.5)
        self.told = {"cpu_us": 1e6 * cpu / counted, "wall_us": 1e6 * wall / counted, "p50_us": 1e6 * p50}
        return True


async def client(address: str, meter: Meter, credits: int) -> None:
    """By `penstock.client`, with as many loops as there are credits."""
    async with connect({"interception": address}) as ps, ps.intercept(credits=credits) as session:

        async def answer(call: ModelCall) -> None:
            began = time.perf_counter()
            assert len(call.prompt_token_ids) == 1000
            await call.deliver(Completion.of_tokens(IDS, LOGPROBS, policy_version=1))
            if meter.answered(began):
                session.finish()

        async def loop() -> None:
            async for call in session.calls():
                await answer(call)

        await asyncio.gather(*(loop() for _ in range(credits)))


async def stubs(address: str, meter: Meter, credits: int) -> None:
    """By the generated code alone: one frame of answers for each frame of calls."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream: Any = pb_grpc.InterceptServiceStub(channel).Intercept()
        await stream.write(pb.InterceptRequest(hello=pb.Hello(credits=pb.Credits(calls=credits))))
        came: dict[str, float] = {}
        over = False
        while not over:
            frame = await stream.read()
            for call_id in frame.acknowledged.accepted_call_ids:
                over = meter.answered(came.pop(call_id))
            if frame.calls.calls:
                now = time.perf_counter()
                came |= {call.call_id: now for call in frame.calls.calls}
                results = [_result(call) for call in frame.calls.calls]
                await stream.write(pb.InterceptRequest(results=pb.Results(results=results)))
        await stream.write(pb.InterceptRequest(goodbye=pb.Goodbye()))
        await stream.done_writing()


def _result(call: pb.ModelCall) -> pb.CallResult:
    assert len(np.frombuffer(call.prompt_token_ids, "<i4")) == 1000
    span = completion_pb2.TokenSpan(
        token_ids=IDS.tobytes(),
        logprobs=LOGPROBS.tobytes(),
        count=100,
        logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
        versions=[completion_pb2.PolicyVersionSpan(policy_version=1, start=0, end=100)],
    )
    completion = completion_pb2.Completion(span=span, finish_reason=chat_pb2.FINISH_REASON_STOP, engine="trainer")
    return pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)


def main() -> None:
    """See the module's text."""
    kind, address, calls, credits = sys.argv[1:]
    meter = Meter(int(calls))
    asyncio.run({"client": client, "stubs": stubs}[kind](address, meter, int(credits)))
    print(json.dumps(meter.told))


if __name__ == "__main__":
    main()
