"""One generation in flight at an SGLang server, with the version of the weights that sampled each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_inference.domain.generation import Delta, FinishReason, VersionSpan
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.in_flight import Flight
from penstock_inference.engines.openai.wire import RETRY_S
from penstock_inference.engines.sglang.answers import Asked, foreign, read_chunk


@dataclass(slots=True, eq=False)
class SglangFlight(Flight):
    """An admitted request.

    The server reports which weights sampled which tokens, but only at a completion's end. So tokens that arrive after a
    change of weights began are not sent before the end, when their version is known.
    """

    asked: Asked = field(kw_only=True)
    pinned: bool = field(kw_only=True)
    """One version samples it from its start to its end: an adapter's, or weights that change only between requests."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Versions put in force since it was admitted, each with the number of tokens that had arrived before."""
    reported: tuple[VersionSpan, ...] | None = None
    aborting: bool = False

    def take(self, event: Any) -> None:
        """Process one event of the stream. Raises PenstockError for an invalid one."""
        try:
            chunk = read_chunk(event, self.token_ids, self.vocab_size, self.asked)
        except InvalidArgument:
            if not self.aborting:
                raise
            # What is aborted while its grammar is compiled ends as if it were refused.
            self.finish = FinishReason.ABORT
            return
        self.cached = chunk.cached_tokens
        sampling = self.request.sampling
        if chunk.retractions and (sampling.presence_penalty or sampling.frequency_penalty):
            raise Unavailable(
                "The upstream interrupted a request with penalties, and counts no token from before for them: send it "
                "again.",
                reason="UPSTREAM_FAILED",
                retry_after_s=RETRY_S,
            )
        self.append(chunk.read)
        if self.finish is not None:
            if sampling.response_format is not None and not isinstance(self.stop_reason, str):
                # A form that is complete is reported as a stop at its last token.
                self.stop_reason = None
            self._report(chunk.spans)

    def weights_change(self, version: int) -> None:
        """Report that the weights are about to become those of `version`."""
        self.changes.append((version, len(self.token_ids)))

    def deltas(self) -> list[Delta]:
        """The tokens that no delta has carried and whose version is known, one delta per version."""
        if self.finish is None:
            return self._send_until(self._certain(), self.version)
        spans = self.spans()
        if not spans:
            return self._send_until(len(self.token_ids), None)
        return [delta for span in spans for delta in self._send_until(span.end, span.policy_version)]

    def spans(self) -> tuple[VersionSpan, ...]:
        """The version of every token; none if it is unknown."""
        return Flight.spans(self) if self.reported is None else self.reported

    def cut(self) -> None:
        """Drop the tokens whose version no end will report."""
        if self.finish is None:
            end = self._certain()
            del self.token_ids[end:], self.logprobs[end:], self.top[end:]

    def _certain(self) -> int:
        """Number of tokens whose version is known before the end: those that arrived before any change."""
        return self.changes[0][1] if self.changes else len(self.token_ids)

    def _report(self, spans: tuple[tuple[str, int, int], ...] | None) -> None:
        if self.pinned or self.version is None:
            if spans is not None and self.version is not None and not self.request.adapter and len(spans) > 1:
                raise broken("the weights changed during a completion, but their version is a setting")
            return
        if spans is None:
            raise broken("no weight_versions, where it gave some before")
        # Of a version that was pushed twice, the first time in vain, only the last has sampled.
        known = {str(version): place for place, (version, _) in enumerate(((self.version, 0), *self.changes))}
        if unknown := [name for name, _, _ in spans if name not in known]:
            raise foreign(unknown[0])
        places = [known[name] for name, _, _ in spans]
        if places != sorted(places):
            raise broken("weight_versions are not in the order in which the weights changed")
        arrived = [0, *(tokens for _, tokens in self.changes)]
        if any(start < arrived[place] for place, (_, start, _) in zip(places, spans, strict=True)):
            raise broken("weight_versions give tokens to weights that came after them")
        found = tuple(VersionSpan(int(name), start, end) for name, start, end in spans)
        exact = self.request.exact_policy_version
        if exact is not None and found and found[0].policy_version != exact:
            raise FailedPrecondition(
                f"policy version {exact} was requested, but {found[0].policy_version} was in force at the start",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(found[0].policy_version)},
            )
        self.reported = found
