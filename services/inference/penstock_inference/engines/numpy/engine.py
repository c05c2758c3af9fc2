"""The numpy engine as the service drives it: checked requests, pauses, weight updates. `worker` has the thread."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Sequence_
from contextlib import aclosing
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from penstock.values.token_tensors import ROUTED_EXPERTS
from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    Violation,
)
from penstock_codec.decoding import Detokenizer
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import (
    SAMPLING_FIELDS,
    Done,
    GenerateEvent,
    GenerateRequest,
    LogprobsMode,
    Sampling,
    Scores,
    TokenIds,
)
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checks import (
    MAX_SEED,
    MAX_TEMPERATURE,
    check_prompt,
    check_sampling,
    check_score,
    check_update,
    open_update,
    raise_violations,
)
from penstock_inference.engines.numpy.decoder import KVCache
from penstock_inference.engines.numpy.model import ModelConfig, Weights
from penstock_inference.engines.numpy.scheduler import Scheduler
from penstock_inference.engines.numpy.sequence import Sequence
from penstock_inference.engines.numpy.worker import Worker
from penstock_inference.engines.stops import StopTexts, load_tokenizer

DEFAULT_CONTEXT_TOKENS = 4096
DEFAULT_KV_CACHE_BYTES = 1 << 30


_CAPABILITIES = Capabilities(
    version_spans=True,
    in_flight_update=True,
    weight_update=True,
    score=True,
    seed=True,
    batch_invariant=True,
)


@dataclasses.dataclass(slots=True)
class _Update:
    """An open update: the tensors received so far."""

    version: int
    label: str
    update_format: UpdateFormat
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
    staged: Weights | None = None
    """The complete new weights, once checked."""


class NumpyEngine:
    """A decoder on the CPU, for tests and machines without a GPU. See `base.Engine` for the contract of each method.

    Use as `async with await NumpyEngine.open(options) as engine`, or with your own weights through the constructor and
    `start`. All methods belong to the event loop that called `start`.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, options: EngineOptions, tokenizer: Tokenizer | None = None
    ) -> None:
        """Without a tokenizer, stop texts are refused. Raises FailedPrecondition for a model that is too large."""
        config.check_size()
        if options.extra:
            raise_violations([Violation(f"engine_options.{name}", "not an option of numpy") for name in options.extra])
        self._config = config
        self._capabilities = _CAPABILITIES
        if config.experts is not None:
            self._capabilities = dataclasses.replace(_CAPABILITIES, token_tensors=(ROUTED_EXPERTS,))
        self._model = options.model_name
        self._max_context = min(options.max_context_tokens or DEFAULT_CONTEXT_TOKENS, config.max_position)
        per_slot = KVCache.bytes_per_slot(config, self._max_context)
        self._max_waiting = options.max_waiting
        allowed = options.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        self._slots = min(options.max_concurrency, allowed // per_slot)
        if self._slots < 1:
            raise FailedPrecondition(
                f"one sequence of {self._max_context} tokens needs {per_slot} bytes of KV cache and "
                f"{allowed} are allowed; lower max_context_tokens or raise kv_cache_bytes",
                reason="KV_CACHE_TOO_SMALL",
            )
        self._scheduler = Scheduler(config, weights, self._slots, self._max_context)
        self._worker = Worker(self._scheduler)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._known_ids = 0 if tokenizer is None else tokenizer.get_vocab_size()
        self._request_ids: set[str] = set()
        self._update: _Update | None = None

    @classmethod
    async def open(cls, options: EngineOptions) -> NumpyEngine:
        """Load the model directory off the event loop and start."""

        def build() -> NumpyEngine:
            config = ModelConfig.from_directory(options.model_dir)
            config.check_size()
            tokenizer = load_tokenizer(options.model_dir / "tokenizer.json")
            return cls(config, Weights.from_directory(config, options.model_dir), options, tokenizer)

        engine = await asyncio.to_thread(build)
        engine.start()
        return engine

    def start(self) -> None:
        """Start the compute thread; call it once, on the event loop."""
        self._worker.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def info(self) -> EngineInfo:
        stats = self._scheduler.stats()
        return EngineInfo(
            engine="numpy",
            engine_version=np.__version__,
            model=self._model,
            vocab_size=self._config.vocab_size,
            max_context_tokens=self._max_context,
            max_concurrency=self._slots,
            stop_token_ids=self._config.stop_token_ids,
            sampling_fields=tuple(f for f in SAMPLING_FIELDS if f != "stop" or self._detokenizer is not None),
            dtype="float32",
            parameter_count=self._config.parameter_count,
            logprobs_mode=LogprobsMode.PROCESSED,
            capabilities=self._capabilities,
            policy_version=stats.policy_version,
            policy_label=self._scheduler.label,
            paused=stats.paused,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last finished step."""
        return dataclasses.replace(self._scheduler.stats(), failure=self._worker.failure)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self._check(request)
        seed = request.sampling.seed
        sequence = Sequence(request, secrets.randbelow(MAX_SEED + 1) if seed is None else seed)
        if request.sampling.stop and self._detokenizer is not None:
            sequence.stop_texts = StopTexts(self._detokenizer, request.sampling.stop, self._known_ids)
        if request.request_id in self._request_ids:
            raise AlreadyExists(f"request {request.request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        if self._worker.in_flight >= self._slots + self._max_waiting:
            raise ResourceExhausted(
                f"{self._slots} requests run and {self._max_waiting} wait", reason="QUEUE_FULL", retry_after_s=1.0
            )
        self._request_ids.add(request.request_id)
        try:
            async with aclosing(self._worker.follow(sequence)) as events:
                async for event in events:
                    assert not isinstance(event, Scores)
                    yield event
        finally:
            self._request_ids.discard(request.request_id)

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        violations = check_score(token_ids, top_logprobs, self._config.vocab_size, self._max_context)
        if not 0 < temperature <= MAX_TEMPERATURE:
            violations.append(
                Violation("temperature", f"must be in (0, {MAX_TEMPERATURE}]: greedy sampling has no logprobs")
            )
        raise_violations(violations)
        sampling = Sampling(max_tokens=1, temperature=temperature, top_logprobs=top_logprobs)
        request = GenerateRequest("", token_ids, sampling, stream=False)
        async with aclosing(self._worker.follow(Sequence(request, seed=0, score_temperature=temperature))) as events:
            async for event in events:
                if isinstance(event, Scores):
                    return event
        raise Unavailable("scoring was aborted", reason="ENGINE_ABORTED")

    async def abort(
        self, *, request_ids: Sequence_[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        ids = frozenset(request_ids) - {""}  # every score's

        def chosen(sequence: Sequence) -> bool:
            request = sequence.request
            return everything or request.request_id in ids or (bool(session_id) and request.session_id == session_id)

        def abort() -> int:
            events = self._scheduler.abort(chosen)
            self._worker.deliver(events)
            return sum(isinstance(event, Done) for _, event in events)

        return await self._worker.between_steps(abort)

    async def pause(self, mode: PauseMode) -> None:
        def stop() -> None:
            self._scheduler.admitting = False
            if mode is not PauseMode.WAIT:
                self._scheduler.frozen = True
                self._worker.release()
            if mode is PauseMode.ABORT:
                self._worker.deliver(self._scheduler.abort(lambda _: True))

        await self._worker.between_steps(stop)
        if mode is PauseMode.WAIT:
            await self._worker.idle()

    async def resume(self) -> None:

        def go_on() -> None:
            self._scheduler.admitting = True
            self._scheduler.frozen = False
            self._worker.release()

        await self._worker.between_steps(go_on)

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        check_update(version, self._scheduler.version, another_open=self._update is not None)
        self._update = _Update(version, label, update_format, {})

    async def push_tensors(self, tensors: Tensors) -> None:
        update = open_update(self._update)
        shapes = self._config.tensor_shapes()
        # Unknown names are refused at the commit, all together; a repeated name is refused now.
        raise_violations([Violation(name, "was pushed before") for name in tensors if name in update.tensors])
        if len(update.tensors) + len(tensors) > 2 * len(shapes):
            raise_violations([Violation("tensors", f"more than the model's {len(shapes)}")])
        update.tensors.update(tensors)

    async def stage_update(self) -> None:
        """Check the complete open update and have it ready."""
        update = open_update(self._update)
        try:
            update.staged = await self._weights(update)
        except BaseException:
            self._update = None
            raise

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        update = open_update(self._update)
        try:
            return await self._commit(update, mode)
        finally:
            self._update = None

    async def _commit(self, update: _Update, mode: PauseMode) -> UpdatePhases:
        began = time.monotonic()
        weights = update.staged or await self._weights(update)
        loaded = time.monotonic()
        scheduler, worker = self._scheduler, self._worker

        def swap() -> bool:
            # Frozen generations cannot finish before a resume; others can, no matter who pauses and resumes meanwhile.
            scheduler.held_for_update = mode is PauseMode.WAIT and scheduler.running > 0 and not scheduler.frozen
            if scheduler.held_for_update:
                return False
            if mode is PauseMode.ABORT:
                worker.deliver(scheduler.abort(lambda _: True))
            worker.deliver(scheduler.replace_weights(weights, update.version, update.label))
            return True

        def give_up() -> None:
            scheduler.held_for_update = False

        try:
            while not await worker.between_steps(swap):
                await worker.idle()
        except BaseException:
            await worker.between_steps(give_up)
            raise
        return UpdatePhases(load_s=loaded - began, pause_s=time.monotonic() - loaded)

    async def _weights(self, update: _Update) -> Weights:
        if update.update_format is UpdateFormat.DELTA:
            return await asyncio.to_thread(self._scheduler.weights.merged, self._config, update.tensors)
        return await asyncio.to_thread(Weights.build, self._config, update.tensors)

    async def abort_update(self) -> None:
        self._update = None

    async def aclose(self) -> None:
        """End everything in flight and the thread. Idempotent."""
        await self._worker.aclose()

    def _check(self, request: GenerateRequest) -> None:
        violations = check_sampling(request.sampling, self._config.vocab_size)
        violations += check_prompt(
            request.prompt_token_ids, request.sampling.max_tokens, self._config.vocab_size, self._max_context
        )
        if request.sampling.stop and self._detokenizer is None:
            violations.append(Violation("sampling.stop", "needs a tokenizer, which the model directory lacks"))
        if request.exact_policy_version is not None and request.min_policy_version is not None:
            violations.append(Violation("min_policy_version", "cannot be combined with exact_policy_version"))
        if request.sampling.min_tokens and request.sampling.min_tokens > 0:
            stops = set(request.sampling.stop_token_ids) | set(self._config.stop_token_ids)
            if len(stops) >= self._config.vocab_size:
                violations.append(Violation("sampling.min_tokens", "every token of the vocabulary is a stop token"))
        raise_violations(violations)
