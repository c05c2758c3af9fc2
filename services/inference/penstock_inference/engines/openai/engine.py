"""The upstream engine as the service drives it. See `base.Engine` and `optional.Chats` for the contract of each method.

Queueing, pausing and aborting are done here; each completion is one request to the endpoint. While it is unreachable
every call is UNAVAILABLE with the reason, and it is probed again with growing delays. Its features are then probed
anew, since another server may have replaced it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from penstock_chassis.errors import (
    PenstockError,
    Violation,
)
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import (
    SAMPLING_FIELDS,
    GenerateEvent,
    GenerateRequest,
    LogprobsMode,
    Scores,
    TokenIds,
)
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.admission import Admission
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checks import check_prompt, check_sampling, check_score, closed, raise_violations
from penstock_inference.engines.openai.answers import read_scores, read_top_scores
from penstock_inference.engines.openai.calls import Calls, check_fixed_version
from penstock_inference.engines.openai.chat import CHAT_FIELDS, ask, chat_body
from penstock_inference.engines.openai.in_flight import Flight
from penstock_inference.engines.openai.model import Model
from penstock_inference.engines.openai.options import OpenAiOptions, check_context
from penstock_inference.engines.openai.probe import Facts, Level, Wanted, probe
from penstock_inference.engines.openai.upstream_monitor import UpstreamMonitor
from penstock_inference.engines.openai.wire import Endpoint
from penstock_inference.engines.optional_features import ChatAnswer, ChatRequest, missing_capability

STREAM_INTERVAL = 32
"""Tokens per event when the caller does not stream: the stream only shows that the endpoint is alive."""


class OpenAiEngine:
    """An endpoint behind `base.Engine`, and behind `optional.Chats` if it returns only text."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: EngineOptions,
        chosen: OpenAiOptions,
        model: Model,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._chosen = chosen
        self._model = model
        self._lookout = UpstreamMonitor(endpoint, self._probe)
        self._calls = Calls(self._lookout.failed)
        self._stops = frozenset(model.stop_token_ids)
        self._version = chosen.policy_version
        self._admission = Admission(options.max_concurrency, options.max_waiting, lambda _: self._version or 0)
        self._paused = False
        self._closed = False

    @classmethod
    async def open(cls, options: EngineOptions) -> OpenAiEngine:
        """Probe the endpoint; if it is unreachable, open anyway and keep probing.

        Raises errors that only a person can fix: InvalidArgument (ENGINE_OPTIONS_INVALID), FailedPrecondition
        (UPSTREAM_KEY_REFUSED, UPSTREAM_MODEL_UNKNOWN, UPSTREAM_ANSWER_INVALID, UPSTREAM_TOKENIZER_DIFFERS,
        UPSTREAM_PROMPT_CHANGED).
        """
        chosen = OpenAiOptions.parse(options)
        key = await asyncio.to_thread(chosen.api_key, options)
        model = await asyncio.to_thread(Model.read, options.model_dir)
        endpoint = chosen.endpoint(key, options.max_concurrency)
        engine = cls(endpoint, options, chosen, model)
        try:
            await engine._lookout.open()
        except BaseException:
            await endpoint.aclose()
            raise
        return engine

    def info(self) -> EngineInfo:
        """The engine's properties and current state. Raises Unavailable until the endpoint was reached."""
        facts = self._found()
        tokens = facts.level is Level.TOKENS
        logprobs = facts.logprobs_mode is not LogprobsMode.NONE
        fields = SAMPLING_FIELDS if tokens else CHAT_FIELDS
        return EngineInfo(
            engine="openai",
            engine_version=facts.server,
            model=self._options.model_name,
            vocab_size=(self._model.vocab_size or 0) if tokens else 0,
            max_context_tokens=self._context(facts),
            max_concurrency=self._options.max_concurrency,
            stop_token_ids=self._model.stop_token_ids if tokens else (),
            sampling_fields=tuple(name for name in fields if logprobs or name != "top_logprobs"),
            dtype="unknown",
            parameter_count=0,
            logprobs_mode=facts.logprobs_mode,
            capabilities=Capabilities(
                token_ids=tokens,
                logprobs=logprobs,
                seed=True,
                # A score must name its version.
                score=facts.score and self._version is not None,
            ),
            policy_version=self._version or 0,
            policy_label=self._chosen.policy_label,
            paused=self._paused,
        )

    def stats(self) -> EngineStats:
        return self._calls.stats(
            waiting=self._admission.waiting,
            slots=self._options.max_concurrency,
            policy_version=self._version or 0,
            paused=self._paused,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Request a completion of token ids."""
        facts = self._found()
        if facts.level is not Level.TOKENS:
            raise missing_capability("token_ids")
        s, vocab = request.sampling, self._model.vocab_size or 0
        violations = check_sampling(s, vocab)
        violations += check_prompt(request.prompt_token_ids, s.max_tokens, vocab, self._context(facts))
        raise_violations(violations)
        check_fixed_version(request, self._version)
        queued_at = time.monotonic()
        with self._calls.named(request.request_id):
            let_in = await self._admission.enter(request)
            flight = Flight(
                request,
                vocab,
                facts.logprobs_mode is not LogprobsMode.NONE,
                self._version,
                frozenset() if s.ignore_eos else self._stops | set(s.stop_token_ids),
                queued_at,
            )
            try:
                if not let_in:
                    flight.abort()
                    self._calls.counts["aborted"] += 1
                    yield flight.done()
                    return

                def end(follower: asyncio.Task[None]) -> bool:
                    follower.cancel()
                    return flight.abort()

                async with aclosing(self._calls.fly(flight, lambda: self._follow(flight, facts), end)) as events:
                    async for event in events:
                        yield event
            finally:
                if let_in:
                    self._admission.leave()

    async def chat(self, request: ChatRequest) -> ChatAnswer:
        """Request a message, if there are no token ids."""
        facts = self._found()
        if facts.level is Level.TOKENS:
            raise missing_capability("chat: this endpoint returns token ids: send token_ids")
        # No prompt ids are known; the vocabulary's limit does not apply.
        raise_violations(check_sampling(request.sampling, 1 << 31))
        place = GenerateRequest(request.request_id, np.empty(0, np.int32), request.sampling, request.session_id)
        queued_at = time.monotonic()
        body = chat_body(request, facts.model)
        with self._calls.named(request.request_id):
            if not await self._admission.enter(place):
                return self._count(ChatAnswer.aborted(time.monotonic() - queued_at))
            task = asyncio.create_task(ask(self._endpoint, body, queued_at, request.session_id))
            self._calls.running[request.request_id] = (place, task.cancel)
            try:
                await asyncio.wait((task,))
                if task.cancelled():
                    return self._count(ChatAnswer.aborted(time.monotonic() - queued_at))
                return self._count(task.result())
            except PenstockError as error:
                self._calls.failure(error)
                raise
            finally:
                task.cancel()
                await asyncio.wait((task,))
                del self._calls.running[request.request_id]
                self._admission.leave()

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Logprobs of `token_ids[1:]`, if the endpoint returns those of a prompt; only at temperature 1."""
        facts = self._found()
        if not facts.score or self._version is None:
            raise missing_capability("score")
        vocab = self._model.vocab_size or 0
        violations = check_score(token_ids, top_logprobs, vocab, self._context(facts), sampled=1)
        if temperature != 1.0:
            violations.append(Violation("temperature", "must be 1, or unset, on the openai engine"))
        raise_violations(violations)
        body = {"model": facts.model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = top_logprobs
        try:
            answer = await self._endpoint.post("/completions", body)
        except PenstockError as error:
            self._calls.failure(error)
            raise
        return Scores(
            read_scores(answer, token_ids),
            self._version,
            read_top_scores(answer, min(top_logprobs, vocab), vocab) if top_logprobs else None,
        )

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """Abort the named generations by closing their connections, which also aborts them upstream."""
        ids = frozenset(request_ids)

        def chosen(request: GenerateRequest) -> bool:
            return everything or request.request_id in ids or (bool(session_id) and request.session_id == session_id)

        return self._admission.abort(chosen) + self._calls.abort(chosen)

    async def pause(self, mode: PauseMode) -> None:
        """Send no more requests. KEEP is refused: generations on a foreign server cannot be frozen."""
        if mode is PauseMode.KEEP:
            raise missing_capability("pause with PAUSE_MODE_KEEP, but with WAIT and ABORT")
        if not self._paused:
            self._paused = True
            self._admission.hold()
        if mode is PauseMode.ABORT:
            await self.abort(everything=True)
        else:
            await self._admission.idle()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._admission.release()
            self._admission.wake_idle()

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """Raises Unsupported: the weights are foreign."""
        raise missing_capability("weight_update")

    async def push_tensors(self, tensors: Tensors) -> None:
        """Raises Unsupported: the weights are foreign."""
        raise missing_capability("weight_update")

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Raises Unsupported: the weights are foreign."""
        raise missing_capability("weight_update")

    async def abort_update(self) -> None:
        """No update is ever open."""

    async def aclose(self) -> None:
        """End everything in flight and all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._lookout.aclose()
        self._admission.fail(closed)
        await self.abort(everything=True)
        await self._endpoint.aclose()

    # Generating ------------------------------------------------------------------------------------------------------

    async def _follow(self, flight: Flight, facts: Facts) -> None:
        """Read the endpoint's events. Cancellation closes the connection, which aborts the generation."""
        body, session_id = self._body(flight, facts), flight.request.session_id
        async with aclosing(self._endpoint.events("/completions", body, session_id)) as events:
            async for event in events:
                flight.take(event)

    def _body(self, flight: Flight, facts: Facts) -> dict[str, Any]:
        s = flight.request.sampling
        body: dict[str, Any] = {
            "model": facts.model,
            "prompt": flight.request.prompt_token_ids,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # Send all of them, or the endpoint would use its own defaults.
            "max_tokens": s.max_tokens,
            "min_tokens": s.min_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": s.repetition_penalty,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "stop": list(s.stop),
            "stop_token_ids": list(s.stop_token_ids),
            "ignore_eos": s.ignore_eos,
        }
        if flight.with_logprobs or facts.ids_by_name:
            body["logprobs"] = s.top_logprobs
        if s.seed is not None:
            body["seed"] = s.seed
        if facts.stream_interval and not flight.request.stream:
            body["stream_interval"] = STREAM_INTERVAL
        return body

    def _context(self, facts: Facts) -> int:
        """The smallest limit of the endpoint, the operator and the model's configuration; 0 if there is none."""
        limits = (facts.max_context_tokens or self._model.max_context, self._options.max_context_tokens)
        return min((value for value in limits if value), default=0)

    def _found(self) -> Facts:
        """The facts about the endpoint. If there are none, raises the reason."""
        if self._closed:
            raise closed()
        return self._lookout.facts()

    async def _probe(self) -> Facts:
        """Probe the endpoint. Raises InvalidArgument (ENGINE_OPTIONS_INVALID) when the context length is unknown."""
        chosen, model = self._chosen, self._model
        wanted = Wanted(chosen.model, self._options.model_name, model.vocab_size, model.tokenizer, chosen.stated_mode)
        facts = await probe(self._endpoint, wanted)
        if facts.level is Level.TOKENS:
            check_context(self._context(facts))
        return facts

    def _count(self, answer: ChatAnswer) -> ChatAnswer:
        self._calls.counts["finished" if answer.message is not None else "aborted"] += 1
        self._calls.counts["prompt"] += answer.usage.prompt_tokens
        self._calls.counts["sampled"] += answer.usage.completion_tokens
        return answer
