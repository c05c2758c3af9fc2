"""Generating and scoring: takes a request through admission into vLLM and back."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock_chassis.errors import (
    AlreadyExists,
    Internal,
    PenstockError,
    Unavailable,
    Violation,
)
from penstock_chassis.validation import invalid
from penstock_codec.decoding import Detokenizer
from penstock_inference.domain.generation import (
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Logprobs,
    Sampling,
    Scores,
    Started,
    TokenIds,
    TopLogprobs,
)
from penstock_inference.domain.response_format import FIELD as FORMAT_FIELD
from penstock_inference.engines.adapters import LoadedAdapter
from penstock_inference.engines.checks import check_prompt, check_sampling, check_score, raise_violations
from penstock_inference.engines.stops import StopTexts
from penstock_inference.engines.vllm.adapters import lora_request
from penstock_inference.engines.vllm.core import Core
from penstock_inference.engines.vllm.images import prompt_with_images
from penstock_inference.engines.vllm.in_flight import Flight, alternatives, stacked
from penstock_inference.engines.vllm.params import sampling_params, score_params
from penstock_inference.engines.vllm.runtime import engine_died

try:
    # vLLM's conversion of a raw prompt, which newer versions leave to the caller.
    from vllm.inputs.engine import tokens_input as _prompt
except ImportError:
    from vllm.inputs import TokensPrompt as _prompt  # noqa: N813

_REFUSALS: tuple[type[Exception], ...] = (ValueError,)
"""The errors by which vLLM refuses a request."""
try:
    from vllm.exceptions import VLLMClientError
except ImportError:
    pass  # in earlier versions, all are ValueError
else:
    _REFUSALS += (VLLMClientError,)

DELTA_INTERVAL_S = 0.05
"""Minimum interval between deltas of a stream: a message per token would cost more than the token."""
LEAST_TEMPERATURE = 0.01
"""vLLM silently replaces any smaller temperature except 0 by this."""
MAX_PENALTY = 2.0


class Generations:
    """Runs requests on a core.

    Args:
        core: the running vLLM.
        vocab_size: of the model.
        max_context: prompt and completion together, in tokens.
        stop_token_ids: the model's own.
        tokenizer: for stop texts; without one they are refused.
        text_end_id: vLLM also lets a form end with this token, its tokenizer's end of text.
    """

    def __init__(
        self,
        core: Core,
        vocab_size: int,
        max_context: int,
        stop_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        text_end_id: int | None = None,
    ) -> None:
        self._core = core
        self._text_end_id = text_end_id
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._stop_token_ids = stop_token_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._scores_alone = bool(core.adapters.limit) and core.features.scores_alone_with_adapters
        self._known_ids = 0 if tokenizer is None else tokenizer.get_vocab_size()
        self._request_ids: set[str] = set()
        self._decoding = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See `Engine.generate`. While there is no vLLM, it waits for admission."""
        core = self._core
        self._check(request)
        if request.request_id in self._request_ids:
            raise AlreadyExists(f"request {request.request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        self._request_ids.add(request.request_id)
        queued_at = time.monotonic()
        try:
            let_in = await core.admission.enter(request)
            flight: Flight | None = None
            try:
                flight = Flight(request, core.version_of(request.adapter), queued_at, pinned=bool(request.adapter))
                if not let_in:
                    flight.finish = FinishReason.ABORT
                    yield flight.done()
                    return
                core.admission.check_version(request)
                async for event in self._fly(flight):
                    yield event
            finally:
                if let_in:
                    core.admission.leave(rested=flight is not None and flight.at_rest)
        finally:
            self._request_ids.discard(request.request_id)

    async def score(self, token_ids: TokenIds, temperature: float, adapter: str, top_logprobs: int) -> Scores:
        """See `Engine.score`. Only at temperature 1, the only one at which vLLM scores a prompt."""
        core = self._core
        violations = check_score(token_ids, top_logprobs, self._vocab_size, self._max_context, sampled=1)
        if temperature != 1.0:
            violations.append(Violation("temperature", "must be 1, or unset, on the vllm engine"))
        raise_violations(violations)
        core.version_of(adapter)
        core.runtime  # noqa: B018 - raises when there is none
        params = score_params(min(top_logprobs, self._vocab_size))
        while True:
            request = GenerateRequest(f"score-{uuid.uuid4()}", token_ids, Sampling(max_tokens=1), adapter=adapter)
            if not await core.admission.enter(request, alone=self._scores_alone):
                raise Unavailable("scoring was aborted", reason="ENGINE_ABORTED", retry_after_s=1.0)
            try:
                version, base = core.version_of(adapter), core.version
                values, top = await self._ask_once(request, params)
            finally:
                core.admission.leave()
            if base == core.version:
                return Scores(values, version, top)
            # The weights changed meanwhile: some logprobs may be of the old ones.

    async def _ask_once(self, request: GenerateRequest, params: Any) -> tuple[Logprobs, TopLogprobs | None]:
        core = self._core
        adapter = self._adapter_of(request)
        try:
            collector = await core.ask(lambda llm: self._hand_over(llm, request, params, adapter))
            output = await core.ask(lambda _: collector.get())
        except BaseException:
            # It must not be in vLLM's next step: another request may be, as soon as this one has left.
            with contextlib.suppress(PenstockError):
                await core.ask(lambda llm: llm.abort(request.request_id))
            raise
        finally:
            self._let_go(adapter)
        flat = output.prompt_logprobs
        # The first token has no logprob.
        values = np.array([flat.logprobs[start] for start in flat.start_indices[1:]], np.float32)
        if not np.isfinite(values).all():
            raise _not_finite(core.version)
        wanted = params.prompt_logprobs
        rows = [alternatives(flat, n, wanted) for n in range(1, len(flat.start_indices))] if wanted else []
        return np.minimum(values, 0.0), stacked(rows)

    async def _fly(self, flight: Flight) -> AsyncGenerator[GenerateEvent, None]:
        """One request from admission to its end."""
        core, request = self._core, flight.request
        if request.sampling.stop and self._detokenizer is not None:
            flight.stop_texts = StopTexts(self._detokenizer, request.sampling.stop, self._known_ids)
        adapter = self._adapter_of(request)
        core.flights.add(flight)
        follower = asyncio.create_task(self._follow(flight, adapter))
        try:
            started = False
            while not flight.over:
                await flight.moved.wait()
                flight.moved.clear()
                if flight.error is None and request.stream:
                    if not started:
                        yield Started(flight.starts[0][0] if flight.starts else flight.version, flight.cached)
                        started = True
                    for delta in flight.deltas():
                        yield delta
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DELTA_INTERVAL_S):
                            await flight.ended.wait()
            if flight.error is not None:
                raise flight.error
            if request.stream:
                for delta in flight.deltas():
                    yield delta
            yield flight.done()
        finally:
            await self._end(flight, follower)
            self._let_go(adapter)

    async def _follow(self, flight: Flight, adapter: LoadedAdapter | None) -> None:
        """Read vLLM's output as it comes, however slow the caller reads: a version label is only right at once."""
        request = flight.request
        try:
            llm = self._core.runtime.llm
            collector = await self._hand_over(llm, request, self._params(flight), adapter)
            flight.handed_over = True
            if flight.aborted:
                await llm.abort(request.request_id)
            while not flight.over:
                flight.take(collector.get_nowait() or await collector.get())
        except PenstockError as error:
            flight.fail(error)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            field = "sampling" if request.sampling.response_format is None else FORMAT_FIELD
            flight.fail(self._translated(error, field))
        # A score must not wait for a caller that reads slowly.
        await self._rest(flight)

    async def _end(self, flight: Flight, follower: asyncio.Task[None]) -> None:
        follower.cancel()
        try:
            await asyncio.wait((follower,))
            await self._rest(flight)
        finally:
            self._core.came_to_an_end(flight)

    async def _rest(self, flight: Flight) -> None:
        """Abort whatever is left of it in vLLM; from then on it is not in vLLM. Once, however often it is called."""
        if flight.at_rest:
            return
        if flight.finish is None or flight.stop_text is not None:
            with contextlib.suppress(PenstockError):  # vLLM is gone, and the request with it
                await self._core.abort_in_vllm(flight)
        if flight in self._core.flights:
            flight.at_rest = True
            self._core.admission.rest()

    async def _hand_over(self, llm: Any, request: GenerateRequest, params: Any, adapter: LoadedAdapter | None) -> Any:
        lora = None if adapter is None else lora_request(adapter)
        ids, media = request.prompt_token_ids, request.media
        if not media:
            async with self._core.handing_over():
                prompt: Any = _prompt(ids.tolist(), cache_salt=self._salt(adapter))
                return await llm.add_request(request.request_id, prompt, params, lora_request=lora)
        async with self._decoding:  # decoded images take hundreds of megabytes
            prompt = await asyncio.to_thread(prompt_with_images, ids, media)
            async with self._core.handing_over():  # other weights may be in force by now
                prompt["cache_salt"] = self._salt(adapter)
                return await llm.add_request(request.request_id, prompt, params, lora_request=lora)

    def _salt(self, adapter: LoadedAdapter | None) -> str:
        # Cached blocks of another version or adapter must never match: a salt costs nothing and never fails, while vLLM
        # refuses its own reset when anything runs.
        version = self._core.version
        return f"v{version}" if adapter is None else f"v{version}:{adapter.number}"

    def _params(self, flight: Flight) -> Any:
        sampling = flight.request.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._stop_token_ids))
        if sampling.response_format is not None and self._text_end_id is not None:
            # After this token nothing is constrained to the form.
            stops.add(self._text_end_id)
        whole = not flight.request.stream and not sampling.stop and self._core.features.version_spans
        return sampling_params(sampling, stops, whole=whole, tensor_start=flight.request.tensor_start)

    def _adapter_of(self, request: GenerateRequest) -> LoadedAdapter | None:
        if not request.adapter:
            return None
        adapter = self._core.adapters.get(request.adapter)
        adapter.users += 1
        return adapter

    def _let_go(self, adapter: LoadedAdapter | None) -> None:
        if adapter is not None:
            adapter.users -= 1
            if not adapter.users:
                self._core.admission.wake_idle()
            self._core.drop_if_unused(adapter)

    def _translated(self, error: Exception, field: str) -> PenstockError:
        """Turn vLLM's refusal into our error; only vLLM checks `field`."""
        try:
            runtime = self._core.runtime
        except PenstockError as absent:
            return absent
        if runtime.is_death(error):
            return engine_died()
        if isinstance(error, _REFUSALS):
            text = str(error).splitlines()[0] if str(error) else "is refused"
            return invalid([Violation(field, text)], f"vLLM refuses the request: {text}")
        return Internal(f"the generation failed: {type(error).__name__}", reason="GENERATION_FAILED")

    def _check(self, request: GenerateRequest) -> None:
        s = request.sampling
        violations = check_sampling(s, self._vocab_size)
        violations += check_prompt(request.prompt_token_ids, s.max_tokens, self._vocab_size, self._max_context)
        if 0 < s.temperature < LEAST_TEMPERATURE:
            violations.append(Violation("sampling.temperature", f"must be 0 or at least {LEAST_TEMPERATURE} on vLLM"))
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(getattr(s, name)) > MAX_PENALTY:
                violations.append(
                    Violation(f"sampling.{name}", f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}] on vLLM")
                )
        if s.stop and self._detokenizer is None:
            violations.append(Violation("sampling.stop", "needs a tokenizer, which the model directory lacks"))
        if request.exact_policy_version is not None and request.min_policy_version is not None:
            violations.append(Violation("min_policy_version", "cannot be combined with exact_policy_version"))
        if s.response_format is not None and s.min_tokens > 0:
            violations.append(Violation("sampling.min_tokens", "cannot be combined with a response format"))
        stops = set(s.stop_token_ids) | set(self._stop_token_ids)
        if s.response_format is not None and not stops and self._text_end_id is None:
            violations.append(
                Violation("sampling.stop_token_ids", "must have a token that ends a completion: the model has none")
            )
        if s.min_tokens > 0 and len(stops) >= self._vocab_size:
            violations.append(Violation("sampling.min_tokens", "every token of the vocabulary is a stop token"))
        raise_violations(violations)
        if request.adapter:
            self._core.adapters.get(request.adapter)


def _not_finite(version: int) -> Internal:
    return Internal(
        f"the model's output is not finite under policy version {version}: its weights have diverged",
        reason="LOGITS_NOT_FINITE",
        metadata={"policy_version": str(version)},
    )
