"""One generation in flight: the endpoint's events so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_inference.domain.generation import (
    Delta,
    Done,
    FinishReason,
    GenerateRequest,
    Logprobs,
    Timings,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.engines.openai.answers import Read, broken, read_choice
from penstock_inference.engines.openai.wire import cut_off

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(slots=True, eq=False)
class Flight:
    """An admitted request."""

    request: GenerateRequest
    vocab_size: int
    with_logprobs: bool
    version: int | None
    stop_token_ids: frozenset[int]
    queued_at: float
    admitted_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    cached: int = 0
    sent: int = 0
    """Number of tokens sent in deltas."""
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: PenstockError | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an event arrived."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more events will arrive."""

    def take(self, event: Any) -> None:
        """Process one event of the stream. Raises PenstockError for an invalid one."""
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list):
            raise broken("an event without choices")
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        if isinstance(cached, int) and cached >= 0:
            self.cached = min(cached, self.request.prompt_token_ids.size)
        if choices:
            self.append(read_choice(choices[0], self.vocab_size))

    def end(self) -> None:
        """End the stream. Raises Unavailable if the completion is incomplete, FailedPrecondition if it is empty."""
        if self.finish is None:
            raise cut_off("its stream ended without a reason to finish")
        if not self.token_ids and self.finish is not FinishReason.ABORT:
            raise broken("a completion without token ids")
        self.moved.set()
        self.ended.set()

    def abort(self) -> bool:
        """End it with the tokens so far; False if it was already over."""
        if self.ended.is_set():
            return False
        # Without a token it is no completion, whatever its finish reason.
        self.finish = (self.finish if self.token_ids else None) or FinishReason.ABORT
        self.end()
        return True

    def fail(self, error: PenstockError) -> None:
        """End it with an error, unless it is over."""
        if not self.ended.is_set():
            self.error = error
            self.moved.set()
            self.ended.set()

    def deltas(self) -> list[Delta]:
        """The tokens that no delta has carried and whose version is known, one delta per version."""
        return self._send_until(len(self.token_ids), self.version)

    def spans(self) -> tuple[VersionSpan, ...]:
        """The version of every token; none if it is unknown."""
        known = self.version is not None and self.token_ids
        return (VersionSpan(self.version or 0, 0, len(self.token_ids)),) if known else ()

    def done(self) -> Done:
        now = time.monotonic()
        first = self.first_at or now
        ids, logprobs, top = self._arrays(slice(0, len(self.token_ids)))
        finish, stop = self.finish or FinishReason.ABORT, self.stop_reason
        last = self.token_ids[-1] if self.token_ids else None
        stopped = finish is FinishReason.STOP
        # The model's own end token is not always named; a stop token is the last sampled one.
        by_token = stopped and not isinstance(stop, str) and (stop == last or last in self.stop_token_ids)
        return Done(
            finish_reason=finish,
            token_ids=ids,
            logprobs=logprobs,
            version_spans=self.spans(),
            stop_token_id=last if by_token else None,
            prompt_tokens=self.request.prompt_token_ids.size,
            cached_tokens=self.cached,
            timings=Timings(self.admitted_at - self.queued_at, first - self.admitted_at, now - first),
            seed=self.request.sampling.seed,
            top=top,
            stop_text=stop if stopped and isinstance(stop, str) and stop in self.request.sampling.stop else None,
        )

    def _send_until(self, end: int, version: int | None) -> list[Delta]:
        """A delta of the tokens before `end` that were not sent, if any."""
        piece = slice(self.sent, end)
        if piece.start >= piece.stop:
            return []
        self.sent = end
        ids, logprobs, top = self._arrays(piece)
        return [Delta(ids, logprobs, version, top)]

    def append(self, read: Read) -> None:
        """Add what was read. Raises PenstockError if it cannot follow what came before."""
        count = len(read.token_ids)
        prompt = read.prompt_token_ids
        if prompt is not None and not np.array_equal(prompt, self.request.prompt_token_ids):
            raise FailedPrecondition(
                "The upstream changed or cut the prompt.",
                reason="UPSTREAM_PROMPT_CHANGED",
            )
        if self.finish is not None and count:
            raise broken("tokens after the end")
        if count and self.with_logprobs and not read.logprobs:
            raise broken(f"no logprobs for {count} tokens, where it gave some before")
        wanted = self.request.sampling.top_logprobs
        if count and wanted and any(len(ids) < wanted for ids, _ in read.top or [([], [])]):
            raise broken(f"fewer than {wanted} alternatives for a token")
        if len(self.token_ids) + count > self.request.sampling.max_tokens:
            raise broken("more tokens than max_tokens")
        if count and not self.token_ids:
            self.first_at = time.monotonic()
        self.token_ids += read.token_ids
        if self.with_logprobs:
            self.logprobs += read.logprobs
        if wanted:
            self.top += read.top
        if read.finish_reason is not None:
            reason = _REASONS.get(read.finish_reason)
            if reason is None:
                raise broken(f"it ended by {read.finish_reason[:20]!r}")
            self.finish, self.stop_reason = reason, read.stop_reason
        self.moved.set()

    def _arrays(self, piece: slice) -> tuple[Any, Logprobs, TopLogprobs | None]:
        wanted = self.request.sampling.top_logprobs
        top = None
        if wanted and self.with_logprobs and self.top[piece]:
            top = TopLogprobs(
                np.array([ids[:wanted] for ids, _ in self.top[piece]], np.int32),
                np.array([values[:wanted] for _, values in self.top[piece]], np.float32),
            )
        return (
            np.array(self.token_ids[piece], np.int32),
            np.array(self.logprobs[piece] if self.with_logprobs else [], np.float32),
            top,
        )
