"""Inference services as a model source: they get tokens, and return tokens and logprobs.

A service whose engine has no token ids gets messages instead; its answer is text and captured as such (R82).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from penstock.chat.v1 import chat_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    Unavailable,
    Unsupported,
)
from penstock_chassis.membership.routing import MAX_PREFIX_TOKENS, prefix_blocks
from penstock_codec.chat import Message, Sampling
from penstock_interception.clients.engines.pool import EnginePool
from penstock_interception.clients.engines.values import EXPECTED_TOKENS, Asked, Needs
from penstock_interception.domain.calls import Answerer, CodecChoice, Dialect, ModelFacts
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.requests import ENABLE_THINKING, ChatRequest, with_thinking
from penstock_interception.domain.state import Call
from penstock_interception.graph.values import Plan
from penstock_interception.sources.base import EXTENDED_SERVERS, ModelSource, Resolved, SourceError
from penstock_interception.sources.codecs import CodecCache
from penstock_interception.wire import convert

CHECK_TIMEOUT_S = 10.0
NO_ENGINE = "none"
"""`GetInfoResponse.engine` of a service that has only a tokenizer."""
_MAY_BE_THE_REQUEST = frozenset({"ENGINE_FAILED", "INTERNAL", "UPSTREAM_ANSWER_INVALID", "UPSTREAM_FAILED"})
"""Failures of an engine that a request can cause too, unless the status of its endpoint is one of overload."""
_OVERLOADED = frozenset({"408", "409", "425", "503", "504"})
_FOR_GOOD = (InvalidArgument, Unsupported, FailedPrecondition)


class InferenceSource(ModelSource):
    """One inference service or several, for one adapter. The caller owns the pool."""

    answerer = Answerer.INFERENCE

    def __init__(
        self,
        pool: EnginePool,
        codecs: CodecCache,
        parse: Callable[[Dialect, bytes], ChatRequest],
        adapter: str,
        choice: CodecChoice,
    ) -> None:
        self._pool = pool
        self._codecs = codecs
        self._parse = parse
        self._adapter = adapter
        self._choice = choice

    async def resolve(self, asked_model: str) -> Resolved:
        try:
            info: pb.GetInfoResponse = await self._pool.ask(_info)
            answers = info.engine != NO_ENGINE
            if not info.capabilities.token_ids:
                text = ModelFacts(
                    model=info.model,
                    max_context_tokens=info.max_context_tokens or None,
                    extended_sampling=info.engine_version.partition(" ")[0]
                    in EXTENDED_SERVERS,  # who serves the endpoint
                )
                return Resolved(text, None)
            if not info.tokenizer_sha256:
                raise FailedPrecondition(
                    "The inference service has no usable tokenizer. The start of its log has the reason; if the "
                    "chat template does not show how tools are called, set its tool_call_parser.",
                    reason="TEMPLATE_UNSUPPORTED",
                )
            facts = ModelFacts(
                model=info.model,
                tokenizer_sha256=info.tokenizer_sha256.hex(),
                template_sha256=info.chat_template_sha256.hex(),
                parser=self._choice.parser or info.tool_call_parser,
                control_tokens=self._choice.control_tokens,
                vocabulary_size=info.vocabulary_size or None,
                max_context_tokens=info.max_context_tokens or None,
                processor_sha256=info.processor_sha256.hex(),
                images=convert.IMAGE in info.capabilities.modalities,
            )
            if self._known(facts):
                return Resolved(facts, await self._codecs.of(facts), answers)
            async with self._codecs.fetching:
                if self._known(facts):
                    return Resolved(facts, await self._codecs.of(facts), answers)
                codec = await self._codecs.from_named(await self._pool.ask(_files), facts.codec)
            files = codec.files
            facts = replace(
                facts,
                tokenizer_sha256=files.tokenizer_sha256,
                template_sha256=files.template_sha256,
                processor_sha256=files.processor_sha256,
            )
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error)
            raise Unavailable(
                f"The inference service does not answer: {failure.reason}.",
                reason="INFERENCE_UNREACHABLE",
                retry_after_s=failure.retry_after_s or 2.0,
            ) from error
        return Resolved(facts, codec, answers)

    async def complete(self, call: Call) -> Completion:
        if call.plan is None:
            raise SourceError("PROMPT_MISSING")
        request = pb.GenerateRequest(
            session_id=call.rollout.spec.session_id,
            sampling=convert.sampling_to(_engines_sampling(call)),
            adapter=self._adapter,
        )
        if call.sampling.token_tensors:
            request.tensor_start = call.plan.tensor_starts.get(call.policy_id, 0)
        if call.facts.tokenizer_sha256:
            request.token_ids = convert.ids_to(call.plan.prompt_ids)
            if call.plan.media:
                request.media.extend(await asyncio.to_thread(self._media, call, call.plan))
        else:
            request.chat.CopyFrom(await asyncio.to_thread(self._chat, call))
        if call.min_policy_version is not None:
            request.version.min_version = call.min_policy_version
        try:
            answer = await self._pool.generate(self._asked(call, call.plan, request, f"{call.id}.{call.leases}"))
            if answer is not None:
                return convert.completion_from(answer.done.completion)
        except PenstockError as error:
            raise SourceError(
                error.reason,
                type(error).__name__,
                retriable=not isinstance(error, _FOR_GOOD),
                may_be_the_request=error.reason in _MAY_BE_THE_REQUEST
                and error.metadata.get("http_status") not in _OVERLOADED,
            ) from error
        raise SourceError("GENERATION_UNFINISHED")

    async def answers_others(self, call: Call) -> bool:
        """See ModelSource. One token after the prompt's first token, which is the template's, or after a fixed text."""
        request = pb.GenerateRequest(sampling=chat_pb2.Sampling(max_tokens=1), adapter=self._adapter)
        if call.facts.tokenizer_sha256 and call.plan is not None:
            request.token_ids = convert.ids_to(call.plan.prompt_ids[:1])
        else:
            request.chat.messages.append(convert.message_to(Message.user(".")))
        try:
            asked = self._asked(call, call.plan, request, f"{call.id}.{call.leases}.other")
            return await self._pool.generate(asked) is not None
        except PenstockError:
            return False

    def _asked(self, call: Call, plan: Plan | None, request: pb.GenerateRequest, request_id: str) -> Asked:
        """The request for one of the engines. The session is the call's own also where the request names none."""
        spec, facts = call.rollout.spec, call.facts

        def numbered(attempt: int) -> pb.GenerateRequest:
            request.request_id = f"{request_id}.{attempt}" if attempt else request_id
            return request

        def blocks() -> tuple[bytes, ...]:
            if plan is None or not facts.tokenizer_sha256:
                return ()
            return prefix_blocks(convert.ids_to(plan.prompt_ids[:MAX_PREFIX_TOKENS]), self._adapter)

        return Asked(
            numbered,
            Needs(
                request.version.min_version if request.HasField("version") else None,
                (spec.namespace, self._adapter) if self._adapter else None,
                facts.tokenizer_sha256,
            ),
            spec.session_id,
            blocks,
            1 if plan is None else max(1, int(plan.prompt_ids.size) - plan.shared_prefix_len),
            call.sampling.max_tokens or EXPECTED_TOKENS,
        )

    def _media(self, call: Call, plan: Plan) -> list[chat_pb2.Media]:
        """The images of a prompt: the agent's request has all of them."""
        data = {image.sha256: image.data for image in self._parse(call.request.dialect, call.request.body).images}
        return [convert.media_to(media, data[media.sha256]) for media in plan.media]

    def _chat(self, call: Call) -> pb.ChatPrompt:
        """The conversation as the agent sent it, and the template's options with what overrides them."""
        asked = self._parse(call.request.dialect, call.request.body)
        thinking = call.sampling.thinking
        options = with_thinking(asked.template_kwargs, thinking)
        if call.thinks_as_agent_asks and not call.facts.extended_sampling:
            # A provider without templates refuses the field: what the agent itself wants is left out, and noted.
            options, thinking = {}, None
        prompt = pb.ChatPrompt(
            messages=[convert.message_to(message) for message in asked.messages],
            tools=[convert.tool_to(tool) for tool in asked.tools],
            thinking=thinking,
        )
        if further := {name: value for name, value in options.items() if name != ENABLE_THINKING}:
            prompt.template_options_json = json.dumps(further)
        return prompt

    def _known(self, facts: ModelFacts) -> bool:
        return self._codecs.known(facts)


def _engines_sampling(call: Call) -> Sampling:
    """Returns the call's sampling without what no engine has: the prompt says whether to think.

    What the prompt cannot say any more, or the rollout's owner sets, stays, so that it is refused by its name (R63): a
    trainer delegates a call whose prompt is made, and only an agent's limit of reasoning may go without effect.
    """
    sampling, before, override = call.sampling, call.request.sampling, call.rollout.spec.sampling_override
    if sampling.thinking is None and sampling.thinking_budget_tokens is None:
        return sampling
    if not call.facts.tokenizer_sha256 or sampling.thinking == before.thinking:
        sampling = replace(sampling, thinking=None)
    budget = sampling.thinking_budget_tokens
    if override.thinking_budget_tokens is None and budget == before.thinking_budget_tokens:
        sampling = replace(sampling, thinking_budget_tokens=None)
    return sampling


async def _info(stub: Any) -> pb.GetInfoResponse:
    answer: pb.GetInfoResponse = await stub.GetInfo(pb.GetInfoRequest(), timeout=CHECK_TIMEOUT_S)
    return answer


async def _files(stub: Any) -> dict[str, bytes]:
    """The tokenizer's files, checked against their digests."""
    files: dict[str, bytearray] = {}
    async for part in stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=6 * CHECK_TIMEOUT_S):
        data = files.setdefault(part.file_name, bytearray())
        data += part.chunk
        if part.sha256 and hashlib.sha256(data).digest() != part.sha256:
            raise DataLoss("A tokenizer file arrived damaged.", reason="TOKENIZER_DAMAGED")
    return {name: bytes(data) for name, data in files.items()}
