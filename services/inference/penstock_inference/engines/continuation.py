"""Continues a generation whose engine died: tracks the tokens sent so far and requests the rest.

Invariant: nothing already sent to the caller is contradicted. If nothing was sent, the original request is repeated.
Otherwise the rest is requested with the sampled token ids appended to the prompt, but only if the distribution of what
follows does not depend on where the prompt ends; see `Continuation.can_go_on`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from penstock.values.token_tensors import TokenTensor
from penstock_chassis.errors import Unavailable
from penstock_inference.domain.generation import (
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Started,
    Timings,
    TopLogprobs,
    VersionSpan,
)

MAX_DEATHS = 3
"""Number of engine deaths after which a request fails: it may be the cause."""


class Continuation:
    """One request, over one or several engines.

    Args:
        request: as the caller made it.
        stop_token_ids: the model's own.
    """

    def __init__(self, request: GenerateRequest, stop_token_ids: tuple[int, ...]) -> None:
        self.request = request
        self._stops = frozenset(request.sampling.stop_token_ids) | (
            frozenset() if request.sampling.ignore_eos else frozenset(stop_token_ids)
        )
        self._started: Started | None = None
        self._sent: list[Delta] = []
        self._before = 0
        """Tokens sent before the current attempt."""

    @property
    def sent(self) -> int:
        """Number of tokens sent to the caller."""
        return sum(delta.token_ids.size for delta in self._sent)

    @property
    def can_go_on(self) -> bool:
        """Whether the rest can be requested: it must not depend on where the prompt ends."""
        sampling = self.request.sampling
        return not self.sent or not (
            # Penalties and stop texts look at the completion only; a seed's random stream and a form's grammar start at
            # its beginning.
            sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.stop
            or sampling.response_format is not None
            or (sampling.seed is not None and sampling.temperature > 0)
        )

    def next(self) -> GenerateRequest:
        """The next request for an engine; call it when the previous attempt has ended."""
        self._before = sent = self.sent
        request, sampling = self.request, self.request.sampling
        if not sent:
            return request
        return replace(
            request,
            prompt_token_ids=np.concatenate([request.prompt_token_ids, *(delta.token_ids for delta in self._sent)]),
            sampling=replace(
                sampling, max_tokens=sampling.max_tokens - sent, min_tokens=max(0, sampling.min_tokens - sent)
            ),
            # The version bounds applied to the start. But an adapter's completion uses one version throughout.
            min_policy_version=None,
            exact_policy_version=self._sent[0].policy_version if request.adapter else None,
        )

    def ended(self) -> Done | None:
        """The `Done` of a completion whose tokens are all sent, when only the end event was lost; otherwise None."""
        sent, sampling = self.sent, self.request.sampling
        if not sent:
            return None
        last = int(self._sent[-1].token_ids[-1])
        if last in self._stops and sent >= sampling.min_tokens:
            return self._closed(FinishReason.STOP, last)
        if sent >= sampling.max_tokens:
            return self._closed(FinishReason.LENGTH)
        return None

    def aborted(self) -> Done:
        """The `Done` of a request that is aborted while no engine has it."""
        return self._closed(FinishReason.ABORT)

    def take(self, event: GenerateEvent) -> GenerateEvent | None:
        """The event to send to the caller for an event of the current attempt, if any."""
        if isinstance(event, Started):
            if self._started is not None:
                return None
            self._started = event
        elif isinstance(event, Delta):
            self._sent.append(event)
        elif self._before:
            return self._whole(event)
        return event

    def _whole(self, rest: Done) -> Done:
        """The completions of several engines as one."""
        earlier = self._pieces(self._before)
        spans = [
            *_spans(earlier),
            *(VersionSpan(s.policy_version, s.start + self._before, s.end + self._before) for s in rest.version_spans),
        ]
        return replace(
            rest,
            token_ids=np.concatenate([*(d.token_ids for d in earlier), rest.token_ids]),
            logprobs=np.concatenate([*(d.logprobs for d in earlier), rest.logprobs]),
            version_spans=_joined(spans),
            prompt_tokens=self.request.prompt_token_ids.size,
            cached_tokens=self._started.cached_tokens if self._started is not None else 0,
            # No seed repeats the samples of two engines.
            seed=self.request.sampling.seed,
            top=_stacked([*(d.top for d in earlier), rest.top]),
            tensors=self._captured(rest.tensors),
        )

    def _captured(self, tensors: Iterable[TokenTensor]) -> tuple[TokenTensor, ...]:
        """Without the rows that chose the tokens of earlier attempts: another engine's pass, later, is not theirs."""
        prompt = self.request.prompt_token_ids.size
        ranges = ((0, prompt - 1), (prompt + self._before - 1, sys.maxsize))
        return tuple(piece for one in tensors for start, end in ranges if (piece := one.cut(start, end)) is not None)

    def _closed(self, reason: FinishReason, stop_token_id: int | None = None) -> Done:
        sent = self._sent
        return Done(
            finish_reason=reason,
            token_ids=np.concatenate([np.zeros(0, np.int32), *(d.token_ids for d in sent)]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(d.logprobs for d in sent)]),
            version_spans=_joined(_spans(sent)),
            stop_token_id=stop_token_id,
            prompt_tokens=self.request.prompt_token_ids.size,
            cached_tokens=self._started.cached_tokens if self._started is not None else 0,
            timings=Timings(0.0, 0.0, 0.0),
            seed=self.request.sampling.seed,
            top=_stacked([d.top for d in sent]),
        )

    def _pieces(self, tokens: int) -> list[Delta]:
        """The deltas with the first `tokens` tokens; attempts end between two deltas."""
        sizes = itertools.accumulate(delta.token_ids.size for delta in self._sent)
        return [delta for delta, end in zip(self._sent, sizes, strict=True) if end <= tokens]


async def unbroken(
    request: GenerateRequest,
    stop_token_ids: tuple[int, ...],
    attempt: Callable[[GenerateRequest], AsyncGenerator[GenerateEvent, None]],
    ready: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[GenerateEvent, None]:
    """Generate, continuing on another engine when one dies.

    Args:
        request: the caller's.
        stop_token_ids: the model's own.
        attempt: an engine's `generate`. Unavailable (ENGINE_DIED) means that the engine died; an end without a `Done`
            means that the request was aborted as its engine died.
        ready: waits until an attempt makes sense, before each; False when the request was aborted meanwhile.
    """
    journey = Continuation(request, stop_token_ids)
    deaths = 0
    while True:
        asked = journey.next()
        if not await ready():
            yield journey.aborted()
            return
        try:
            async with aclosing(attempt(asked)) as events:
                async for event in events:
                    piece = journey.take(event)
                    if piece is not None:
                        yield piece
                    if isinstance(event, Done):
                        return
            yield journey.ended() or journey.aborted()
            return
        except Unavailable as error:
            deaths += 1
            if error.reason != "ENGINE_DIED" or deaths >= MAX_DEATHS or not journey.can_go_on:
                raise
        done = journey.ended()
        if done is not None:
            yield done
            return


def _spans(deltas: list[Delta]) -> list[VersionSpan]:
    ends = list(itertools.accumulate((delta.token_ids.size for delta in deltas), initial=0))
    return [
        VersionSpan(delta.policy_version, start, end)
        for delta, (start, end) in zip(deltas, itertools.pairwise(ends), strict=True)
        if delta.policy_version is not None
    ]


def _joined(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same spans, with neighbours of one version merged."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = VersionSpan(span.policy_version, joined[-1].start, span.end)
        elif span.start < span.end:
            joined.append(span)
    return tuple(joined)


def _stacked(parts: list[TopLogprobs | None]) -> TopLogprobs | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    return TopLogprobs(
        np.concatenate([part.token_ids for part in there]), np.concatenate([part.logprobs for part in there])
    )
