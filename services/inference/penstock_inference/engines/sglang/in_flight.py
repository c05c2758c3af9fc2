"""One generation in flight at an SGLang server, with the version of the weights that sampled each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_inference.engines.base import Delta, FinishReason, VersionSpan
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.in_flight import Flight
from penstock_inference.engines.openai.wire import RETRY_S
from penstock_inference.engines.sglang.answers import Asked, read_chunk


@dataclass(slots=True, eq=False)
class SglangFlight(Flight):
    """An admitted request.

    The server reports which weights sampled which tokens, but only at a completion's end. So tokens that arrive after a
    change of weights began are not sent before the end, when their version is known.
    """

    asked: Asked = field(kw_only=True)
    pinned: bool = field(kw_only=True)
    """One version samples it from its start to its end: an adapter's, or weights that change only between requests."""
    versions: list[int] = field(default_factory=list)
    """Those put in force since it was admitted."""
    boundary: int | None = None
    """Number of tokens that had arrived when the weights first changed."""
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
        if self.boundary is None:
            self.boundary = len(self.token_ids)
        self.versions.append(version)

    def deltas(self) -> list[Delta]:
        """The tokens that no delta has carried and whose version is known, one delta per version."""
        if self.finish is None:
            return self._send_until(len(self.token_ids) if self.boundary is None else self.boundary, self.version)
        spans = self.spans()
        if not spans:
            return self._send_until(len(self.token_ids), None)
        return [delta for span in spans for delta in self._send_until(span.end, span.policy_version)]

    def spans(self) -> tuple[VersionSpan, ...]:
        """The version of every token; none if it is unknown."""
        return Flight.spans(self) if self.reported is None else self.reported

    def cut(self) -> None:
        """Drop the tokens whose version no end will report."""
        if self.finish is None and self.boundary is not None:
            end = self.boundary
            del self.token_ids[end:], self.logprobs[end:], self.top[end:]

    def _report(self, spans: tuple[tuple[str, int, int], ...] | None) -> None:
        if self.pinned or self.version is None:
            if spans is not None and self.version is not None and not self.request.adapter and len(spans) > 1:
                raise broken("the weights changed during a completion, but their version is a setting")
            return
        if spans is None:
            raise broken("no weight_versions, where it gave some before")
        known = {str(version): version for version in (self.version, *self.versions)}
        if foreign := [name for name, _, _ in spans if name not in known]:
            raise broken(f"it names weights {foreign[0][:40]!r}, which this service did not put in force")
        found = tuple(VersionSpan(known[name], start, end) for name, start, end in spans)
        if any(span.start < self.sent and span.policy_version != self.version for span in found):
            raise broken("weight_versions contradict what it sent before")
        exact = self.request.exact_policy_version
        if exact is not None and found and found[0].policy_version != exact:
            raise FailedPrecondition(
                f"policy version {exact} was requested, but {found[0].policy_version} was in force at the start",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(found[0].policy_version)},
            )
        self.reported = found
