"""A model call that waits for the trainer's answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

from penstock.client.errors import AlreadyDelivered, InvalidCompletion, wrong_type
from penstock.client.transport import tracing
from penstock.client.transport.tracing import CallSpan
from penstock.client.types import chat
from penstock.client.wire import chat as wire
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2

Answer = Callable[[pb.CallResult], Awaitable[None]]
"""Sends a result and waits until it is accepted; raises ResultRejected."""


class ModelCall:
    """One model call of an agent, leased to this session until it is answered.

    Answer it once: `deliver`, `fail`, `delegate` or `release`. Fields are read from the message on first use.
    """

    def __init__(self, message: pb.ModelCall, answer: Answer, prompt: bytes | None = None) -> None:
        """`prompt` is the whole one where the message has only a part of it."""
        self._message = message
        self._prompt = prompt
        self._answer = answer
        self._ended = asyncio.Event()
        self._span: CallSpan | None = None
        self.end_reason: str = ""
        """Why the call needs no answer any more: CANCELLED, ROLLOUT_CLOSED, ...; empty while it does."""

    def __repr__(self) -> str:
        return f"ModelCall({self.call_id}, rollout={self.rollout_id}, index={self.index}, prompt={self.prompt_count})"

    @property
    def call_id(self) -> str:
        """The call's id."""
        return self._message.call_id

    @property
    def rollout_id(self) -> str:
        """The rollout whose agent made the call."""
        return self._message.rollout_id

    @property
    def group_id(self) -> str | None:
        """The rollout's group."""
        return self._message.group_id if self._message.HasField("group_id") else None

    @property
    def group_index(self) -> int | None:
        """The rollout's position in its group."""
        return self._message.group_index if self._message.HasField("group_index") else None

    @property
    def namespace(self) -> str:
        """The namespace to which its rollout belongs; empty: an older gate."""
        return self._message.namespace

    @property
    def run_id(self) -> str | None:
        """The training run."""
        return self._message.run_id if self._message.HasField("run_id") else None

    @property
    def task_id(self) -> str | None:
        """The rollout's task."""
        return self._message.task_id if self._message.HasField("task_id") else None

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """The rollout's labels."""
        return dict(self._message.labels)

    @property
    def index(self) -> int:
        """Position among the rollout's calls, from 0."""
        return self._message.index

    @property
    def call_class(self) -> str:
        """The call's purpose: main, sub_agent, compaction, title, probe or edit."""
        return wire.word(trajectory_pb2.CallClass, self._message.call_class, "CALL_CLASS_")

    @property
    def dialect(self) -> str:
        """The API of the agent's request, for example chat_completions."""
        return wire.word(trajectory_pb2.Dialect, self._message.dialect, "DIALECT_")

    @property
    def branch_id(self) -> str:
        """The branch that it extends or opens."""
        return self._message.branch_id

    @property
    def parent_call_id(self) -> str | None:
        """The call whose conversation it continues."""
        return self._message.parent_call_id if self._message.HasField("parent_call_id") else None

    @cached_property
    def prompt_token_ids(self) -> chat.TokenIds:
        """The whole prompt: the conversation exactly as it was sampled, then the new messages. Read-only.

        Empty when the rollout's source has no tokenizer (an upstream): then there are `messages`.
        """
        return wire.token_ids(self._message.prompt_token_ids if self._prompt is None else self._prompt)

    @property
    def prompt_count(self) -> int:
        """Length of the prompt in tokens."""
        return self._message.prompt_count

    @property
    def shared_prefix_count(self) -> int:
        """Tokens of the prompt that equal the parent's prompt and completion: an engine's prefix cache has them."""
        return self._message.shared_prefix_count

    @cached_property
    def sampling(self) -> chat.Sampling:
        """As the agent requested, max_tokens bounded by budgets and context."""
        return wire.sampling_from(self._message.sampling)

    @property
    def policy_id(self) -> str:
        """The policy that shall answer, where the rollout has several (`RolloutModel`); empty = it has one."""
        return self._message.policy_id

    @property
    def min_policy_version(self) -> int | None:
        """The minimum version of the policy for the answer."""
        return self._message.min_policy_version if self._message.HasField("min_policy_version") else None

    @cached_property
    def messages(self) -> tuple[chat.Message, ...]:
        """The conversation, if the session requested messages."""
        return tuple(map(wire.message_from, self._message.messages))

    @cached_property
    def images(self) -> tuple[chat.PromptImage, ...]:
        """The prompt's images in the order of their tokens; with their bytes if the session requested images.

        Messages name them by digest: `Image.url` is "sha256:" and its hexadecimal digits.
        """
        return tuple(map(wire.prompt_image, self._message.media))

    @cached_property
    def tools(self) -> tuple[chat.Tool, ...]:
        """The offered tools, if the session requested messages."""
        return tuple(map(wire.tool_from, self._message.tools))

    @cached_property
    def tool_choice(self) -> chat.ToolChoice | None:
        """The tool choice, if the session requested messages."""
        if not self._message.HasField("tool_choice"):
            return None
        return wire.tool_choice_from(self._message.tool_choice)

    @property
    def request_body(self) -> bytes:
        """The agent's body verbatim, if the session requested bodies."""
        return self._message.request_body

    @property
    def model(self) -> str:
        """The model's name in the agent's request."""
        return self._message.model

    @property
    def wants_stream(self) -> bool:
        """Whether the agent requested a stream; the gate takes care of it."""
        return self._message.stream

    @property
    def lease_attempt(self) -> int:
        """1 = never leased before."""
        return self._message.lease_attempt

    @property
    def tokenizer_sha256(self) -> bytes:
        """Digest of the prompt's tokenizer."""
        return self._message.tokenizer_sha256

    @property
    def chat_template_sha256(self) -> bytes:
        """Digest of the prompt's chat template."""
        return self._message.chat_template_sha256

    @property
    def view_truncated(self) -> bool:
        """Whether messages or the body were left out for their size."""
        return self._message.view_truncated

    @property
    def trace_parent(self) -> str:
        """W3C trace context for the work on this call; empty where it is not traced."""
        return self._message.trace_parent if self._span is None else self._span.parent

    @property
    def receive_time(self) -> datetime | None:
        """When the gate received the agent's request."""
        return wire.time(self._message, "receive_time")

    @property
    def expire_time(self) -> datetime | None:
        """When it expires unanswered."""
        return wire.time(self._message, "expire_time")

    @property
    def ended(self) -> bool:
        """Whether the call needs no answer any more: answered, cancelled, or lost to another session."""
        return self._ended.is_set()

    async def wait_ended(self) -> None:
        """Waits until the call needs no answer any more: a signal to abort its generation."""
        await self._ended.wait()

    async def deliver(self, completion: chat.Completion) -> None:
        """Answers the call. Returns when the gate has it on disk: it will neither be lost nor requested again.

        Raises:
            InvalidCompletion: a rule is broken, or it cannot be sent at all (`RESULT_NOT_SENDABLE`); the call may be
                answered again.
            StalePolicy: the weights are too old; the call may be answered again.
            AlreadyDelivered: another result came first.
            CallEnded: cancelled, expired, or its rollout is closed.
            SessionLost: the connection did not come back.
            InvalidArgument: `ARGUMENT_TYPE`, it is no `Completion`; the call may be answered again.
        """
        if not isinstance(completion, chat.Completion):
            raise wrong_type("completion", "a Completion, such as `ps.inference.generate` returns", completion)
        await self._answer(self._result(lambda: {"completion": wire.completion_to(completion)}))

    async def fail(self, reason: str, message: str = "", *, retriable: bool = False) -> None:
        """Reports that the trainer cannot answer: the agent gets an error, retriable or not.

        Args:
            reason: stable UPPER_SNAKE, recorded; the agent does not see it.
            message: for people, recorded.
            retriable: whether the agent gets a retriable error.
        """
        await self._answer(
            self._result(lambda: {"failure": pb.CallFailure(reason=reason, message=message, retriable=retriable)})
        )

    async def delegate(self, sampling: chat.Sampling | None = None) -> None:
        """Lets the rollout's model source answer; `sampling` overrides, field by field, the agent's."""
        await self._answer(
            self._result(lambda: {"delegation": pb.Delegation(sampling_override=wire.sampling_to(sampling))})
        )

    async def release(self) -> None:
        """Puts the call back into the queue, for another session."""
        await self._answer(self._result(lambda: {"release": pb.Release()}))

    def end(self, reason: str) -> None:
        """For the session: marks that no answer is needed any more."""
        if not self._ended.is_set():
            self.end_reason = reason
            self._ended.set()
            if self._span is not None:
                self._span.end(reason)

    def taken(self) -> None:
        """For the session: marks that a task works on it now."""
        if self._message.trace_parent and self._span is None:
            self._span = CallSpan(self._message.trace_parent, self.call_id, self.rollout_id, self.group_id)
        tracing.taken(self)

    def _result(self, made: Callable[[], Mapping[str, Any]]) -> pb.CallResult:
        if self.end_reason == "ANSWERED":
            raise AlreadyDelivered(f"Call {self.call_id} is already answered", reason="ALREADY_DELIVERED")
        try:
            return pb.CallResult(call_id=self.call_id, rollout_id=self.rollout_id, **made())
        except (TypeError, ValueError) as error:
            raise InvalidCompletion(f"The result cannot be sent: {error}", reason="RESULT_NOT_SENDABLE") from error
