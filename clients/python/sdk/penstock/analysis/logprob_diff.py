"""The mismatch between the trainer's and the engine's logprobs, on tokens that the engine sampled.

With d = trainer - engine on one token, exp(d) is its importance ratio, and exp(d) - 1 - d estimates the divergence
KL(engine || trainer) with little variance and never below zero (k3 in John Schulman's "Approximating KL Divergence",
2020). Versions are each policy's own. All sums are in float64 over the masked-in tokens; other tokens are not read.

Invariants: values that are not finite, have another shape, or mix two kinds of logprobs are refused, never left out; a
report has at least one token. A ratio beyond exp(600) counts as that, so that every figure is finite.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.types.chat import LogprobsMode, VersionSpan
from penstock.client.types.logprob_diff import Gap, GapReport, WorstToken
from penstock.client.types.trajectories import Sample, TurnSpan

_LARGEST: Final = 600.0
_ROUNDING: Final = 1e-3
"""How far above 0 a logprob summed in half precision may be."""

Floats = NDArray[np.float64]
_Key: TypeAlias = tuple[str, int | None, int | None]
"""Policy, the version that sampled, the one that scored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """One token sequence with the logprobs of both sides.

    Attributes:
        engine, trainer: natural logarithms, shape (n,); any array-like. Read under the mask only.
        mask: bool, shape (n,): the sampled tokens; None = all.
        versions: the policy version of each token span; a token in no span has an unknown version.
        mode: the distribution of the engine's logprobs.
        trainer_mode: the distribution of the trainer's; None = the same.
        scored_version: the policy version of the trainer's, if known; else the one that sampled.
        token_ids, turns, rollout_id: to report a token's position.
        policy_id: the policy whose tokens the mask selects, which `versions` are of there; empty = the rollout has one.
    """

    engine: ArrayLike
    trainer: ArrayLike
    mask: ArrayLike | None = None
    versions: tuple[VersionSpan, ...] = ()
    mode: LogprobsMode = LogprobsMode.UNSPECIFIED
    trainer_mode: LogprobsMode | None = None
    scored_version: int | None = None
    token_ids: ArrayLike | None = None
    turns: tuple[TurnSpan, ...] = ()
    rollout_id: str = ""
    policy_id: str = ""

    @classmethod
    def of_sample(
        cls,
        sample: Sample,
        trainer: ArrayLike,
        *,
        rollout_id: str = "",
        trainer_mode: LogprobsMode | None = None,
    ) -> Self:
        """Combines a trajectory's sample with the trainer's logprobs of its tokens, shape (n,).

        Raises:
            InvalidArgument: `LOGPROBS_ABSENT`, the engine gave none; `LOGPROBS_MODES_MIXED`, its turns have several
                kinds.
        """
        if sample.logprobs is None:
            raise InvalidArgument(f"Sample {sample.sample_id} has no logprobs of the engine", reason="LOGPROBS_ABSENT")
        refuse_mixed(sample.sample_id, sample.logprobs_mode, sample.loss_mask)
        return cls(
            engine=sample.logprobs,
            trainer=trainer,
            mask=sample.loss_mask,
            versions=sample.versions,
            mode=sample.logprobs_mode,
            trainer_mode=trainer_mode,
            token_ids=sample.input_ids,
            turns=sample.turns,
            rollout_id=rollout_id,
            policy_id=sample.policy_id,
        )


def refuse_mixed(sample_id: str, mode: LogprobsMode, mask: NDArray[np.bool_]) -> None:
    """Refuses a sample that trains turns with logprobs of several kinds: the gate marks it with none.

    Raises:
        InvalidArgument: `LOGPROBS_MODES_MIXED`.
    """
    if mode is LogprobsMode.UNSPECIFIED and mask.any():
        message = f"Sample {sample_id} has turns with raw and with processed logprobs, which no gap may mix"
        raise InvalidArgument(message, reason="LOGPROBS_MODES_MIXED")


def measure(
    engine: ArrayLike, trainer: ArrayLike, *, mask: ArrayLike | None = None, clip: tuple[float, float] = (0.8, 1.2)
) -> Gap:
    """Returns the gap between two arrays of logprobs of the same tokens.

    Args:
        engine, trainer: natural logarithms, one shape.
        mask: bool, the same shape: the tokens to compare; None = all.
        clip: ratios outside count in `clipped_share`.

    Raises:
        InvalidArgument: as `compare`.
    """
    arrays = [_floats(value, name) for value, name in ((engine, "engine"), (trainer, "trainer"))]
    chosen = None if mask is None else np.asarray(mask).ravel()
    shapes = {np.shape(engine), np.shape(trainer), *(() if mask is None else (np.shape(mask),))}
    if len(shapes) > 1:
        raise InvalidArgument(
            reason="GAP_SHAPE",
            **_about("engine", f"engine, trainer and mask must have one shape, not {sorted(shapes)}"),
        )
    return compare([Scored(engine=arrays[0].ravel(), trainer=arrays[1].ravel(), mask=chosen)], clip=clip).overall


def compare(
    scored: Iterable[Scored],
    *,
    clip: tuple[float, float] = (0.8, 1.2),
    worst: int = 10,
    text: Callable[[int], str] | None = None,
    notes: Iterable[str] = (),
) -> GapReport:
    """Returns the gap of many sequences, per policy and version.

    Args:
        scored: the sequences; 16 bytes are kept for each compared token.
        clip: ratios outside count in `clipped_share`.
        worst: how many of the worst tokens to keep.
        text: returns the text of a token id.
        notes: for the report; read after all of `scored`.

    Raises:
        InvalidArgument: `GAP_EMPTY`, no token is under a mask; `GAP_SHAPE`, arrays of several shapes, spans outside;
            `GAP_NOT_FINITE`, `GAP_NOT_LOGPROBS` (above 0), with the field and the place; `LOGPROBS_MODES_MIXED`, raw
            and processed logprobs; `LOGPROBS_SCRIPTED`, a script has no distribution; `GAP_CLIP`.
    """
    low, high = clip
    if not 0 <= low <= 1 <= high:
        raise InvalidArgument(reason="GAP_CLIP", **_about("clip", f"must be a range of ratios around 1, not {clip}"))
    found: dict[_Key, list[Floats]] = defaultdict(list)
    places: list[tuple[float, int, WorstToken]] = []
    modes: dict[LogprobsMode, None] = {}
    sequences = 0
    order = itertools.count()
    for item in scored:
        checked = _Checked(item)
        if not checked.at.size:
            continue
        sequences += 1
        modes[_mode(item)] = None
        if len(modes) > 1:
            names = " and ".join(modes)
            raise InvalidArgument(
                reason="LOGPROBS_MODES_MIXED",
                **_about("mode", f"{names} logprobs are of different distributions: compare each separately"),
            )
        for version, chosen in checked.by_version():
            found[item.policy_id, version, item.scored_version].append(checked.d[chosen])
        for place in checked.worst(worst):
            heapq.heappush(places, (abs(place.gap), -next(order), place))
            if len(places) > worst:
                heapq.heappop(places)
    if not found:
        raise InvalidArgument(reason="GAP_EMPTY", **_about("mask", "it selects no token: there is nothing to compare"))
    joined = {key: np.concatenate(parts) for key, parts in found.items()}
    keys = sorted(joined, key=lambda key: (key[0], *(-1 if version is None else version for version in key[1:])))
    policies = {policy_id for policy_id, _, _ in keys}
    all_of_them = keys[0] if len(keys) == 1 else (policies.pop() if len(policies) == 1 else "", None, None)
    whole = np.concatenate([joined[key] for key in keys])
    named = [place for _, _, place in sorted(places, key=lambda entry: entry[:2], reverse=True)]
    return GapReport(
        mode=next(iter(modes)),
        clip=(low, high),
        sequences=sequences,
        overall=_gap(whole, clip, all_of_them),
        versions=tuple(_gap(joined[key], clip, key) for key in keys),
        worst=tuple(named if text is None else _with_text(named, text)),
        notes=tuple(notes),
    )


def _gap(d: Floats, clip: tuple[float, float], key: _Key) -> Gap:
    policy_id, version, scored_version = key
    bounded = np.minimum(d, _LARGEST)
    ratio = np.exp(bounded)
    # expm1 keeps the precision that exp(d) - 1 loses for small d; rounding may still leave -1e-17 there.
    k3 = np.maximum(np.expm1(bounded) - bounded, 0.0)
    # A common factor of all ratios changes nothing here, and keeps their squares finite.
    scaled = np.exp(bounded - bounded.max())
    effective = float(scaled.sum() ** 2 / np.square(scaled).sum())
    p01, p50, p99 = np.percentile(ratio, (1, 50, 99))
    outside = (ratio < clip[0]) | (ratio > clip[1])
    return Gap(
        policy_version=version,
        scored_version=None if scored_version == version else scored_version,
        tokens=d.size,
        mean=float(d.mean()),
        mean_abs=float(np.abs(d).mean()),
        max_abs=float(np.abs(d).max()),
        kl=float(k3.mean()),
        ratio_mean=float(ratio.mean()),
        ratio_p01=float(p01),
        ratio_p50=float(p50),
        ratio_p99=float(p99),
        clipped_share=float(outside.mean()),
        effective_tokens=effective,
        effective_share=min(1.0, effective / d.size),
        policy_id=policy_id,
    )


class _Checked:
    """The compared tokens of one sequence: positions `at`, the differences `d` there."""

    def __init__(self, item: Scored) -> None:
        self.item = item
        engine, trainer = _floats(item.engine, "engine"), _floats(item.trainer, "trainer")
        if engine.ndim != 1:
            raise InvalidArgument(
                reason="GAP_SHAPE", **_about("engine", f"must have one dimension, not the shape {engine.shape}")
            )
        self.length = engine.size
        for name, value in (("trainer", trainer), ("mask", item.mask), ("token_ids", item.token_ids)):
            if value is not None and np.shape(value) != engine.shape:
                raise InvalidArgument(
                    reason="GAP_SHAPE", **_about(name, f"has the shape {np.shape(value)}, engine has {engine.shape}")
                )
        spans: tuple[VersionSpan | TurnSpan, ...] = (*item.versions, *item.turns)
        for span in spans:
            if not 0 <= span.start <= span.end <= self.length:
                field = "versions" if isinstance(span, VersionSpan) else "turns"
                raise InvalidArgument(
                    reason="GAP_SHAPE", **_about(field, f"[{span.start}, {span.end}) is not within [0, {self.length})")
                )
        mask = np.ones(self.length, bool) if item.mask is None else np.asarray(item.mask).astype(bool)
        self.at = np.flatnonzero(mask)
        self.engine, self.trainer = engine[self.at], trainer[self.at]
        for name, found in (("engine", self.engine), ("trainer", self.trainer)):
            if not (finite := np.isfinite(found)).all():
                wrong = self._place(name, found, ~finite, "is not finite")
                raise InvalidArgument(reason="GAP_NOT_FINITE", **wrong)
            if (above := found > _ROUNDING).any():
                raise InvalidArgument(reason="GAP_NOT_LOGPROBS", **self._place(name, found, above, "is above 0"))
        self.d = self.trainer - self.engine

    def by_version(self) -> Iterator[tuple[int | None, NDArray[np.bool_]]]:
        """Yields each version with the tokens that it sampled."""
        rest = np.ones(self.at.size, bool)
        versions: dict[int, NDArray[np.bool_]] = {}
        for span in self.item.versions:
            inside = (self.at >= span.start) & (self.at < span.end) & rest
            rest &= ~inside
            before = versions.get(span.policy_version)
            versions[span.policy_version] = inside if before is None else before | inside
        yield from ((version, chosen) for version, chosen in versions.items() if chosen.any())
        if rest.any():
            yield None, rest

    def worst(self, count: int) -> Iterator[WorstToken]:
        """Yields the `count` tokens with the largest |d|."""
        if count <= 0:
            return
        size = np.abs(self.d)
        chosen = np.argpartition(size, -count)[-count:] if size.size > count else np.arange(size.size)
        ids = None if self.item.token_ids is None else np.asarray(self.item.token_ids)
        for index in chosen[np.argsort(-size[chosen], kind="stable")]:
            at = int(self.at[index])
            turn = _holder(self.item.turns, at)
            version = _holder(self.item.versions, at)
            yield WorstToken(
                rollout_id=self.item.rollout_id,
                call_id="" if turn is None else self.item.turns[turn].call_id,
                turn=turn,
                position=at,
                token_id=None if ids is None else int(ids[at]),
                text="",
                policy_version=None if version is None else self.item.versions[version].policy_version,
                engine=float(self.engine[index]),
                trainer=float(self.trainer[index]),
                gap=float(self.d[index]),
                policy_id=self.item.policy_id,
            )

    def _place(self, name: str, values: Floats, wrong: NDArray[np.bool_], what: str) -> dict[str, Any]:
        """Returns the position of the first wrong token, as the arguments of an error."""
        first = int(wrong.argmax())
        of = f" of rollout {self.item.rollout_id}" if self.item.rollout_id else ""
        return _about(name, f"token {int(self.at[first])}{of}: {values[first]} {what}")


def _mode(item: Scored) -> LogprobsMode:
    """Returns the distribution of one sequence's logprobs.

    Raises:
        InvalidArgument: it is none, or both sides differ.
    """
    if LogprobsMode.SCRIPTED in (item.mode, item.trainer_mode):
        raise InvalidArgument(reason="LOGPROBS_SCRIPTED", **_about("mode", "a script's logprobs have no distribution"))
    if item.trainer_mode not in (None, item.mode):
        what = f"the engine's logprobs are {item.mode}, the trainer's {item.trainer_mode}: use one kind"
        raise InvalidArgument(reason="LOGPROBS_MODES_MIXED", **_about("trainer_mode", what))
    return item.mode


def _floats(value: ArrayLike, name: str) -> Floats:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument(reason="GAP_SHAPE", **_about(name, "has values that are not numbers")) from None


def _holder(spans: Sequence[VersionSpan | TurnSpan], at: int) -> int | None:
    return next((index for index, span in enumerate(spans) if span.start <= at < span.end), None)


def _with_text(places: Iterable[WorstToken], text: Callable[[int], str]) -> Iterator[WorstToken]:
    for place in places:
        fields = {name: getattr(place, name) for name in WorstToken.__dataclass_fields__}
        yield WorstToken(**fields | {"text": "" if place.token_id is None else text(place.token_id)})


def _about(field: str, what: str) -> dict[str, Any]:
    """Returns an error's arguments that name the field."""
    return {"message": f"{field}: {what}", "violations": (Violation(field, what),)}
