"""The mismatch between a trainer's and the engine's logprobs, in figures: per policy version, and the worst tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.client.types.chat import LogprobsMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The gap over some tokens; d = trainer - engine, ratio = exp(d).

    Attributes:
        policy_version: that sampled the tokens; None = unknown, or several.
        scored_version: of the trainer's logprobs; None = the same.
        tokens: how many, at least 1.
        mean: of d; 0 on average between equal models.
        mean_abs, max_abs: of |d|, in nats.
        kl: the mean of exp(d) - 1 - d, an estimate of KL(engine || trainer) per token, in nats; never negative.
        ratio_mean, ratio_p01, ratio_p50, ratio_p99: mean and percentiles of the ratio; 1 between equal models.
        clipped_share: share of the tokens whose ratio is outside `GapReport.clip`, 0 to 1.
        effective_tokens: effective sample size, (sum of ratios)^2 / (sum of ratios^2), from 1 to `tokens`.
        effective_share: the same as a share of the tokens, above 0 to 1.
        policy_id: the policy of `policy_version`; empty = the rollouts have one, or several policies.
    """

    policy_version: int | None
    scored_version: int | None
    tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    kl: float
    ratio_mean: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    clipped_share: float
    effective_tokens: float
    effective_share: float
    policy_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token with a large gap, and its position.

    Attributes:
        turn: position of its call among the sequence's turns, from 0; None = unknown.
        call_id: that sampled it; empty = unknown.
        position: in the sequence, from 0.
        token_id: None = unknown.
        text: the token's own text; empty = unknown.
        engine, trainer: its logprobs.
        gap: trainer - engine.
        policy_id: of `policy_version`; empty = the rollout has one policy.
    """

    rollout_id: str
    call_id: str
    turn: int | None
    position: int
    token_id: int | None
    text: str
    policy_version: int | None
    engine: float
    trainer: float
    gap: float
    policy_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapReport:
    """The gap of many sequences.

    Attributes:
        mode: the distribution of the logprobs, the same for all.
        clip: the range of ratios outside of which a token counts as clipped.
        sequences: with at least one token compared.
        overall: over all tokens.
        versions: by the policy and the version of it that sampled (and the one that scored), unknown first.
        worst: the tokens with the largest gaps, largest first.
        notes: caveats for readers of the figures.
    """

    mode: LogprobsMode
    clip: tuple[float, float]
    sequences: int
    overall: Gap
    versions: tuple[Gap, ...]
    worst: tuple[WorstToken, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON and logs."""
        return asdict(self)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies of `versions`, in order; an empty name is that of rollouts with one policy."""
        return tuple(dict.fromkeys(gap.policy_id for gap in self.versions))

    def name(self, gap: Gap) -> str:
        """Returns the name of one of `versions`: `v3`, with its policy if the report is of several: `solver v3`."""
        version = "unknown" if gap.policy_version is None else f"v{gap.policy_version}"
        return f"{gap.policy_id} {version}".lstrip() if len(self.policies) > 1 else version

    def table(self) -> str:
        """Returns the figures as text: a line per policy and version, then the worst tokens."""
        return "\n".join(itertools.chain(_lines(self), _worst_lines(self), self.notes))

    def __str__(self) -> str:
        gap = self.overall
        return (
            f"gap of {gap.tokens} tokens: mean |d| {gap.mean_abs:.2g}, max {gap.max_abs:.2g}, KL {gap.kl:.2g},"
            f" ratio {gap.ratio_mean:.4f}, effective {gap.effective_share:.1%}"
        )


def _lines(report: GapReport) -> Iterator[str]:
    low, high = report.clip
    named = [(_label(report, gap), gap) for gap in report.versions]
    if len(named) > 1:
        named.append(("all", report.overall))
    width = max([12, *(len(name) for name, _ in named)])
    yield (
        f"{'version':>{width}} {'tokens':>9} {'mean':>10} {'mean |d|':>10} {'max |d|':>10} {'KL (k3)':>10}"
        f" {'ratio':>8} {'p1':>8} {'p99':>8} {'clipped':>8} {'effective':>9}"
    )
    for name, gap in named:
        yield (
            f"{name:>{width}} {gap.tokens:>9} {gap.mean:>10.2e} {gap.mean_abs:>10.2e} {gap.max_abs:>10.2e}"
            f" {gap.kl:>10.2e} {gap.ratio_mean:>8.4f} {gap.ratio_p01:>8.4f} {gap.ratio_p99:>8.4f}"
            f" {gap.clipped_share:>8.2%} {gap.effective_share:>9.2%}"
        )
    yield f"{report.mode} logprobs; d = trainer - engine; clipped: ratio outside [{low:g}, {high:g}]"


def _label(report: GapReport, gap: Gap) -> str:
    return report.name(gap) + ("" if gap.scored_version is None else f" by v{gap.scored_version}")


def _worst_lines(report: GapReport) -> Iterator[str]:
    worst = report.worst
    if worst and worst[0].gap:
        yield "worst tokens:"
    for place in worst:
        if place.gap:
            where = f"rollout {place.rollout_id}, " if place.rollout_id else ""
            where += f"policy {place.policy_id}, " if place.policy_id and len(report.policies) > 1 else ""
            where += f"turn {place.turn}, " if place.turn is not None else ""
            token = "" if place.token_id is None else f", id {place.token_id}"
            token += f" {place.text!r}" if place.text else ""
            yield (
                f"  {place.gap:+.3g}: {where}token {place.position}{token}"
                f" (engine {place.engine:.6g}, trainer {place.trainer:.6g})"
            )
