"""One generation in flight: vLLM's output so far as arrays, with the version that sampled each token."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.values.token_tensors import ROUTED_EXPERTS, TokenTensor
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError
from penstock_inference.domain.generation import (
    Delta,
    Done,
    FinishReason,
    GenerateRequest,
    Timings,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.engines.stops import StopTexts
from penstock_inference.engines.vllm.images import check_expanded

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(slots=True, eq=False)
class Flight:
    """An admitted request and its sampled tokens. `version` labels the next tokens; the engine updates it."""

    request: GenerateRequest
    version: int
    queued_at: float
    pinned: bool = False
    """An adapter's completion: one version from beginning to end."""
    stop_texts: StopTexts | None = None
    admitted_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, index of the first token that it sampled), one per change."""
    experts: NDArray[Any] | None = None
    """The routed experts of the tokens from `tensor_start` on but the last, if requested: vLLM has them at the end."""
    cached: int = 0
    sent: int = 0
    """Number of tokens sent in deltas."""
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    stop_text: str | None = None
    engine_timings: Timings | None = None
    aborted: bool = False
    handed_over: bool = False
    """vLLM has received it."""
    at_rest: bool = False
    """vLLM has ended it, or was asked to abort it."""
    error: PenstockError | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when output arrived."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more output will arrive."""

    @property
    def over(self) -> bool:
        """Whether no more output will arrive."""
        return self.finish is not None or self.error is not None

    def fail(self, error: PenstockError) -> None:
        """End it with an error, unless it is over."""
        if not self.over:
            self.error = error
            self.moved.set()
            self.ended.set()

    def take(self, output: Any) -> None:
        """Append one `RequestOutput`.

        Raises Internal (LOGITS_NOT_FINITE) for a value that is no logprob; FailedPrecondition (MEDIA_MISMATCH;
        POLICY_VERSION_UNAVAILABLE at the end, if another version than the one required sampled the first token).
        """
        if self.over:
            return
        if self.request.media and not self.token_ids:
            check_expanded(self.request.prompt_token_ids, output.prompt_token_ids)
        completion = output.outputs[0]
        self.cached = output.num_cached_tokens or self.cached
        if completion.token_ids and not self.token_ids:
            self.first_at = time.monotonic()
        self._append(list(completion.token_ids), completion.logprobs)
        if self.finish is None and completion.finish_reason is not None:
            self._finish(completion, output)
        if self.finish is not None:
            self._check_version()
            self.ended.set()
        self.moved.set()

    def _append(self, ids: list[int], logprobs: Any) -> None:
        if not ids:
            return
        if not self.starts or self.starts[-1][0] != self.version:
            self.starts.append((self.version, len(self.token_ids)))
        values = [logprobs.logprobs[start] for start in logprobs.start_indices]
        if len(values) != len(ids) or not np.isfinite(values).all():
            raise Internal(
                f"the model's output is not finite under policy version {self.version}: its weights have diverged",
                reason="LOGITS_NOT_FINITE",
                metadata={"policy_version": str(self.version)},
            )
        least = self.request.sampling.min_tokens
        if self.stop_texts is not None:
            for n, token in enumerate(ids):
                text = self.stop_texts.push(token)
                if text is not None and len(self.token_ids) + n + 1 >= least:
                    # Tokens that vLLM sampled after the stop are dropped.
                    ids, values = ids[: n + 1], values[: n + 1]
                    self.finish, self.stop_text = FinishReason.STOP, text
                    break
        self.token_ids += ids
        # A logarithm of 1 may be a rounding error above 0.
        self.logprobs += [min(value, 0.0) for value in values]
        if self.request.sampling.top_logprobs:
            self.top += [alternatives(logprobs, n, self.request.sampling.top_logprobs) for n in range(len(ids))]

    def _finish(self, completion: Any, output: Any) -> None:
        reason = _REASONS.get(completion.finish_reason)
        if reason is None:
            raise Internal(
                f"the engine ended the generation with {completion.finish_reason!r}", reason="GENERATION_FAILED"
            )
        self.finish = reason
        if reason is FinishReason.STOP and isinstance(completion.stop_reason, int):
            self.stop_token_id = completion.stop_reason
        metrics = output.metrics
        if metrics is not None and metrics.first_token_ts:
            self.engine_timings = Timings(
                max(0.0, metrics.scheduled_ts - metrics.queued_ts),
                max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
                max(0.0, metrics.last_token_ts - metrics.first_token_ts),
            )
        if self.request.sampling.token_tensors:
            self.experts = getattr(completion, "routed_experts", None)
        spans = getattr(completion, "weight_versions", None)
        if spans and not self.pinned:
            self.starts = [(int(span.version), span.start) for span in spans if span.end > span.start]

    def _check_version(self) -> None:
        """Raises FailedPrecondition if weights came between admission and the first token.

        Before the end a label may be a step late. An adapter's completion has the version of its admission.
        """
        exact, spans = self.request.exact_policy_version, self.spans()
        if exact is None or self.pinned or not spans or spans[0].policy_version == exact:
            return
        # It ends with the error: `fail` leaves alone what is over.
        self.finish = None
        version = spans[0].policy_version
        raise FailedPrecondition(
            f"policy version {exact} was requested, but {version} was in force at the start",
            reason="POLICY_VERSION_UNAVAILABLE",
            metadata={"policy_version": str(version)},
        )

    def deltas(self) -> Iterator[Delta]:
        """The tokens that no delta has carried, one delta per version."""
        total = len(self.token_ids)
        for span in self.spans():
            first = max(span.start, self.sent)
            if first < span.end:
                piece = slice(first, span.end)
                yield Delta(
                    np.array(self.token_ids[piece], np.int32),
                    np.array(self.logprobs[piece], np.float32),
                    span.policy_version,
                    stacked(self.top[piece]),
                )
        self.sent = total

    def spans(self) -> tuple[VersionSpan, ...]:
        """The tokens that each version sampled."""
        total = len(self.token_ids)
        borders = [*(min(start, total) for _, start in self.starts), total]
        return tuple(
            VersionSpan(version, start, end)
            for (version, _), (start, end) in zip(self.starts, itertools.pairwise(borders), strict=True)
            if start < end
        )

    def done(self) -> Done:
        now = time.monotonic()
        first = self.first_at or now
        inside = self.engine_timings or Timings(0.0, first - self.admitted_at, now - first)
        return Done(
            finish_reason=self.finish or FinishReason.ABORT,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            version_spans=self.spans(),
            stop_token_id=self.stop_token_id,
            prompt_tokens=self.request.prompt_token_ids.size,
            cached_tokens=self.cached,
            timings=Timings(self.admitted_at - self.queued_at + inside.queue_s, inside.prefill_s, inside.decode_s),
            seed=self.request.sampling.seed,
            top=stacked(self.top),
            stop_text=self.stop_text,
            tensors=self._tensors(),
        )

    def _tensors(self) -> tuple[TokenTensor, ...]:
        """Rows of what vLLM sampled after a stop text are left out, with those tokens."""
        start = self.request.tensor_start
        count = self.request.prompt_token_ids.size + len(self.token_ids) - 1 - start
        if self.experts is None or min(count, len(self.experts)) < 1:
            return ()
        rows = np.ascontiguousarray(self.experts[:count])
        little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
        return (TokenTensor(ROUTED_EXPERTS, rows.dtype.name, start, rows.shape, little.tobytes()),)


def alternatives(logprobs: Any, position: int, count: int) -> tuple[list[int], list[float]]:
    """The most likely tokens of a position. vLLM lists the sampled token first, and perhaps again by its rank."""
    where = range(logprobs.start_indices[position], logprobs.end_indices[position])
    by_rank = {logprobs.ranks[n]: n for n in where if logprobs.ranks[n] is not None}
    chosen = [by_rank[rank] for rank in sorted(by_rank)][:count]
    return [logprobs.token_ids[n] for n in chosen], [min(logprobs.logprobs[n], 0.0) for n in chosen]


def stacked(top: list[tuple[list[int], list[float]]]) -> TopLogprobs | None:
    """The alternatives of consecutive tokens as arrays; None without any."""
    if not top:
        return None
    return TopLogprobs(np.array([ids for ids, _ in top], np.int32), np.array([values for _, values in top], np.float32))
