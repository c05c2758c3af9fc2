"""Puts prompts together whose first tokens the gate left out, because it sent them on the same stream before."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from penstock.client.errors import PenstockError, Unavailable
from penstock.client.transport.rpc import Service
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc

BRANCHES_KEPT: Final = 16
"""Branches of a rollout whose last prompt is kept, as `CallView.suffix_only` demands."""
BYTES_KEPT: Final = 256 << 20
"""Bytes of prompts that are kept. Beyond it those of the rollouts whose last call is oldest are dropped."""

_Branches = OrderedDict[str, tuple[str, bytes]]


class Prompts:
    """The last prompt of each of the newest branches of each open rollout, for one stream after the other.

    A prompt that cannot be put together, or has another digest than the gate's, is fetched whole: none is guessed.
    """

    def __init__(self, service: Service, most_bytes: int = BYTES_KEPT) -> None:
        self._service = service
        self._stub = pb_grpc.InterceptServiceStub(service.channel)
        self._most_bytes = most_bytes
        self._rollouts: OrderedDict[str, _Branches] = OrderedDict()
        self._bytes = 0

    async def whole(self, message: pb.ModelCall) -> bytes:
        """Returns the call's whole prompt. For each call of a stream, in their order.

        Raises:
            Unavailable: `PROMPT_UNKNOWN`, it could not be fetched. A new stream begins with whole prompts.
        """
        prompt = message.prompt_token_ids
        if not message.prompt_sha256:
            return prompt  # of a gate that leaves nothing out, or text
        if message.omitted_prefix_count:
            prompt = self._start(message) + prompt
            if not _is_prompt_of(message, prompt):
                prompt = await self._fetched(message)
        self._keep(message, prompt)
        return prompt

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Drops what is kept of closed rollouts."""
        for rollout_id in rollout_ids:
            branches: _Branches = self._rollouts.pop(rollout_id, OrderedDict())
            self._bytes -= sum(len(prompt) for _, prompt in branches.values())

    def clear(self) -> None:
        """Drops everything: a new stream begins with whole prompts."""
        self._rollouts.clear()
        self._bytes = 0

    async def _fetched(self, message: pb.ModelCall) -> bytes:
        request = pb.GetCallRequest(call_id=message.call_id, rollout_id=message.rollout_id)
        unknown = Unavailable(f"The prompt of call {message.call_id} is not known", reason="PROMPT_UNKNOWN")
        try:
            answer = await self._service.call(self._stub.GetCall, request, repeatable=True)
        except PenstockError as error:
            raise unknown from error
        if not _is_prompt_of(message, answer.prompt_token_ids):
            raise unknown
        return answer.prompt_token_ids

    def _start(self, message: pb.ModelCall) -> bytes:
        for call_id, prompt in self._rollouts.get(message.rollout_id, {}).values():
            if call_id == message.parent_call_id:
                return prompt[: 4 * message.omitted_prefix_count]
        return b""

    def _keep(self, message: pb.ModelCall, prompt: bytes) -> None:
        branches = self._rollouts.setdefault(message.rollout_id, OrderedDict())
        self._rollouts.move_to_end(message.rollout_id)
        _, before = branches.pop(message.branch_id, ("", b""))
        branches[message.branch_id] = (message.call_id, prompt)
        self._bytes += len(prompt) - len(before)
        if len(branches) > BRANCHES_KEPT:
            _, (_, oldest) = branches.popitem(last=False)
            self._bytes -= len(oldest)
        while self._bytes > self._most_bytes:
            self.forget([next(iter(self._rollouts))])


def _is_prompt_of(message: pb.ModelCall, prompt: bytes) -> bool:
    return hashlib.sha256(prompt).digest() == message.prompt_sha256
