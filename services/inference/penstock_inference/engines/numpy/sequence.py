"""The state of one request in the scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from penstock_chassis.errors import PenstockError
from penstock_inference.domain.generation import (
    Delta,
    GenerateEvent,
    GenerateRequest,
    Logprobs,
    Scores,
    TokenIds,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.engines.numpy.sampling import Uniforms
from penstock_inference.engines.stops import StopTexts

Event = GenerateEvent | Scores | PenstockError
"""An event for a request; an error ends it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its prompt, its sampled tokens, and its progress."""

    request: GenerateRequest
    seed: int
    score_temperature: float | None = None
    """Set for a scoring request: it needs the prompt's logprobs and samples nothing."""
    queued_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    slot: int = -1
    cached: int = 0
    stop_texts: StopTexts | None = None
    uniforms: Uniforms | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, index of the first token that it sampled), one per change."""
    top: list[tuple[TokenIds, Logprobs]] = field(default_factory=list)
    """The alternatives to each sampled token, or to each token that was scored."""
    sent: int = 0
    """Number of tokens sent in deltas."""
    sent_at: float = 0.0
    scores: list[Logprobs] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()

    @property
    def prompt(self) -> TokenIds:
        return self.request.prompt_token_ids

    @property
    def unsent(self) -> bool:
        """Whether a streaming request has unsent tokens."""
        return self.request.stream and self.sent < len(self.token_ids)

    def record(self, token: int, logprob: float, version: int) -> None:
        """Append one sampled token."""
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.token_ids)))
        self.token_ids.append(token)
        self.logprobs.append(logprob)

    def delta(self, now: float) -> Delta:
        """The unsent tokens; all of one version, because a delta precedes a swap."""
        news = slice(self.sent, None)
        self.sent, self.sent_at = len(self.token_ids), now
        return Delta(
            np.array(self.token_ids[news], np.int32),
            np.array(self.logprobs[news], np.float32),
            self.version_starts[-1][0],
            _stack_top(self.top[news]),
        )

    def all_top(self) -> TopLogprobs | None:
        """The alternatives to every token, if requested."""
        return _stack_top(self.top)

    def spans(self) -> tuple[VersionSpan, ...]:
        """The tokens that each version sampled."""
        starts = self.version_starts
        ends = [start for _, start in starts[1:]] + [len(self.token_ids)]
        return tuple(VersionSpan(version, start, ends[n]) for n, (version, start) in enumerate(starts))


def _stack_top(top: list[tuple[TokenIds, Logprobs]]) -> TopLogprobs | None:
    return TopLogprobs(np.stack([ids for ids, _ in top]), np.stack([values for _, values in top])) if top else None
