"""A trainer that knows the protos only, as a program: it counts what comes, and puts prompts together where it must."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
import numpy as np
import uvloop

from benchmarks.gate.answering import lines, say
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc

KEPT_BRANCHES = 16
OPTIONS = [("grpc.max_receive_message_length", 64 << 20)]


class Trainer:
    """One session that answers each call with the same ids."""

    def __init__(self, ids: list[int], *, suffix_only: bool) -> None:
        sampled = np.array(ids, "<i4")
        span = completion_pb2.TokenSpan(
            token_ids=sampled.tobytes(),
            count=sampled.size,
            logprobs=np.full(sampled.size, -0.5, "<f4").tobytes(),
            logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
        )
        self._completion = completion_pb2.Completion(
            span=span, finish_reason=chat_pb2.FINISH_REASON_STOP, stop_token_id=ids[-1]
        )
        self._suffix_only = suffix_only
        self._out: asyncio.Queue[pb.InterceptRequest] = asyncio.Queue()
        self._kept: dict[str, OrderedDict[str, tuple[str, bytes]]] = {}
        self.bytes = self.calls = self.longest = 0

    async def run(self, address: str, token: str) -> None:
        """Answers until it is cancelled; says `{}` when the session stands."""
        hello = pb.Hello(
            credits=pb.Credits(calls=256, bytes=1 << 30),
            view=pb.CallView(suffix_only=self._suffix_only),
            max_message_bytes=64 << 20,
        )
        self._out.put_nowait(pb.InterceptRequest(hello=hello))
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            begin = pb_grpc.InterceptServiceStub(channel).Intercept
            async for frame in begin(self._requests(), metadata=[("authorization", f"Bearer {token}")]):
                if frame.HasField("welcome"):
                    say({})
                elif frame.HasField("calls"):
                    self._answer(frame)

    def _answer(self, frame: pb.InterceptResponse) -> None:
        self.bytes += frame.ByteSize()
        results = pb.Results()
        for call in frame.calls.calls:
            prompt = self._whole(call) if self._suffix_only else call.prompt_token_ids
            self.calls += 1
            self.longest = max(self.longest, len(np.frombuffer(prompt, "<i4")))
            results.results.add(call_id=call.call_id, lease_id=call.lease_id, completion=self._completion)
        self._out.put_nowait(pb.InterceptRequest(results=results))

    def _whole(self, call: pb.ModelCall) -> bytes:
        branches = self._kept.setdefault(call.rollout_id, OrderedDict())
        prompt = call.prompt_token_ids
        if call.omitted_prefix_count:
            parent = next(ids for call_id, ids in branches.values() if call_id == call.parent_call_id)
            prompt = parent[: 4 * call.omitted_prefix_count] + prompt
        if hashlib.sha256(prompt).digest() != call.prompt_sha256:
            raise AssertionError("not the gate's prompt")
        branches.pop(call.branch_id, None)
        branches[call.branch_id] = (call.call_id, prompt)
        if len(branches) > KEPT_BRANCHES:
            branches.popitem(last=False)
        return prompt

    async def _requests(self) -> AsyncIterator[pb.InterceptRequest]:
        while True:
            try:
                yield await asyncio.wait_for(self._out.get(), 5)
            except TimeoutError:
                yield pb.InterceptRequest(heartbeat=pb.Heartbeat())


async def main() -> None:
    """`start` has the address and the token of the interception service, the ids of an answer, and `suffix_only`."""
    orders = lines()
    start = await anext(orders)
    trainer = Trainer(start["ids"], suffix_only=start["suffix_only"])
    serving = asyncio.create_task(trainer.run(start["address"], start["token"]))
    async for _ in orders:
        say({"bytes": trainer.bytes, "calls": trainer.calls, "longest": trainer.longest})
    serving.cancel()


if __name__ == "__main__":
    uvloop.run(main())
