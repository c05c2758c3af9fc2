"""A rollout's trajectory from its calls and its graph, graded with the reasons (R82-R88). Plain values; rpc/ writes it.

A trajectory contains every call, however it ended. The grade states how far its tokens can be trusted: EXACT if every
call of the trained lines has exact tokens and logprobs, USABLE with the reservations in its findings, UNUSABLE if there
is nothing to train on or training on it would be wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock_interception.conversation.conversation import Conversation
from penstock_interception.domain.calls import CallState, Mode, RolloutState
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph import Branch, CallClass, LogprobsMode, Sample
from penstock_interception.graph.values import TurnSpan

_TRUNCATED, _BUDGET = "TRUNCATED", "BUDGET"
_SIDE = frozenset({CallClass.TITLE, CallClass.PROBE, CallClass.RETRY})


class CaptureLevel(StrEnum):
    """How much of a call was captured."""

    NONE = "none"
    TEXT = "text"
    TOKENS = "tokens"
    TOKENS_AND_LOGPROBS = "tokens_and_logprobs"


_LEVELS = list(CaptureLevel)


class Grade(StrEnum):
    """How far a trajectory can be trusted."""

    EXACT = "exact"
    USABLE = "usable"
    UNUSABLE = "unusable"


class Severity(StrEnum):
    """How much a finding matters."""

    INFO = "info"
    WARNING = "warning"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation about the trajectory; `reason` is a stable UPPER_SNAKE name."""

    severity: Severity
    reason: str
    message: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """A rollout's trajectory so far. `grade` is None while the rollout is open."""

    rollout: Rollout
    calls: tuple[Call, ...]
    classes: dict[str, CallClass]
    branches: tuple[Branch, ...]
    samples: tuple[Sample, ...]
    level: CaptureLevel
    grade: Grade | None
    findings: tuple[Finding, ...]
    chain_sha256: bytes


def level_of(call: Call) -> CaptureLevel:
    """How much of a call was captured."""
    completion = call.completion
    if completion is None:
        return CaptureLevel.NONE
    if completion.tokens is None:
        return CaptureLevel.TEXT
    return CaptureLevel.TOKENS if completion.tokens.logprobs is None else CaptureLevel.TOKENS_AND_LOGPROBS


def notes_of(call: Call) -> tuple[str, ...]:
    """Returns what was changed or ignored in the agent's request, and what its answer lacks of it."""
    asked, completion = call.sampling.top_logprobs, call.completion
    if not asked or completion is None:
        return call.request.normalisations
    top = completion.tokens.top if completion.tokens is not None else None
    given = top.count if top is not None else 0
    if given >= asked:
        return call.request.normalisations
    note = f"top_logprobs asks for {asked} alternatives; the answer has {given or 'none'}"
    return (*call.request.normalisations, note)


def capture(
    rollout: Rollout, conversation: Conversation, *, after_index: int | None = None, include_top: bool = False
) -> Capture:
    """Returns the trajectory, or only its calls after `after_index` (then without samples).

    `include_top`: samples have the alternatives of their trained tokens.
    """
    graph = conversation.graph
    # Searched by index: a call that the journal refused leaves a gap.
    first = 0 if after_index is None else bisect_right(rollout.calls, after_index, key=lambda call: call.index)
    calls = tuple(rollout.calls[first:])
    classes = graph.call_classes()
    # A reader that polls an open rollout needs neither samples nor the findings made from them.
    whole = after_index is None or rollout.state is RolloutState.CLOSED
    samples = tuple(_with_budget_ends(graph.samples(include_top=include_top), rollout.calls)) if whole else None
    findings = tuple(_findings(rollout, classes, samples))
    answered = [call for call in rollout.calls if call.state is CallState.DELIVERED]
    level = min((level_of(call) for call in answered), key=_LEVELS.index, default=CaptureLevel.NONE)
    grade = _grade(findings) if rollout.state is RolloutState.CLOSED else None
    shown = samples if samples is not None and after_index is None else ()
    return Capture(rollout, calls, classes, graph.branches(), shown, level, grade, findings, graph.chain_head)


def _grade(findings: tuple[Finding, ...]) -> Grade:
    if any(finding.severity is Severity.FATAL for finding in findings):
        return Grade.UNUSABLE
    if any(finding.severity is Severity.WARNING for finding in findings):
        return Grade.USABLE
    return Grade.EXACT


def _findings(rollout: Rollout, classes: dict[str, CallClass], samples: tuple[Sample, ...] | None) -> Iterator[Finding]:
    if rollout.spec.mode is Mode.BLACK_BOX:
        yield Finding(Severity.FATAL, "NOT_CAPTURED", "Nothing is captured in black box mode.")
        return
    if rollout.damaged:
        text = "The journal is damaged: answers after some call could not be read, and no sample has them."
        yield Finding(Severity.FATAL, "JOURNAL_DAMAGED", text)
    for call in rollout.calls:
        yield from _findings_of(call, classes.get(call.id, CallClass.MAIN) in _SIDE)
    if samples is not None and not any(sample.loss_mask.any() for sample in samples):
        yield Finding(Severity.FATAL, "NOTHING_TO_TRAIN", "No token of any sample can be trained.")
    if samples is not None and rollout.state is RolloutState.CLOSED:
        yield from _excluded(samples)
    if rollout.exhausted_budget:
        yield Finding(Severity.WARNING, "BUDGET_EXHAUSTED", f"The budget {rollout.exhausted_budget} was used up.")
    bounded = {call.id: call.request.bounded_by for call in rollout.calls if call.request.bounded_by}
    for sample in samples or ():
        if sample.modes_mixed:
            text = f"Turns of branch {sample.branch_id} have logprobs of different modes, which no ratio may mix."
            yield Finding(Severity.WARNING, "LOGPROBS_MODES_MIXED", text, sample.turns[-1].call_id)
        if not sample.truncated:
            continue
        turn, limit = sample.turns[-1] if sample.turns else None, "a limit"
        if turn is not None and turn.untrained == _BUDGET:
            limit = f"the budget {bounded[turn.call_id]}"
        text = f"The last turn of branch {sample.branch_id} was cut by {limit} and is not trained."
        yield Finding(Severity.WARNING, "TURN_TRUNCATED", text, turn.call_id if turn is not None else None)


def _excluded(samples: tuple[Sample, ...]) -> Iterator[Finding]:
    """Counts the sampled turns and tokens that no sample trains, by reason (R102)."""
    reasons: dict[str, tuple[str, int]] = {}
    for turn in (turn for sample in samples for turn in sample.turns):
        known = reasons.get(turn.call_id)
        # A turn in several samples counts as trained if any sample trains it; else the sample with all of it counts.
        if known is None or not turn.untrained or (known[0] == "PARTIAL" and turn.untrained != "SHARED"):
            reasons[turn.call_id] = (turn.untrained, turn.end - turn.start)
    for why in sorted({why for why, _ in reasons.values() if why and why != "SHARED"}):
        counts = [count for reason, count in reasons.values() if reason == why]
        turns, tokens = _counted(len(counts), "turn"), _counted(sum(counts), "sampled token")
        yield Finding(Severity.INFO, "TURNS_UNTRAINED", f"{turns} with {tokens} not trained: {why}.")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _with_budget_ends(samples: tuple[Sample, ...], calls: list[Call]) -> Iterator[Sample]:
    """Marks turns that a budget truncated as BUDGET instead of TRUNCATED. Neither kind is trained."""
    bounded = {call.id for call in calls if call.request.bounded_by}
    for sample in samples:
        cut = bounded and any(turn.untrained == _TRUNCATED and turn.call_id in bounded for turn in sample.turns)
        yield replace(sample, turns=tuple(_by_budget(turn, bounded) for turn in sample.turns)) if cut else sample


def _by_budget(turn: TurnSpan, bounded: set[str]) -> TurnSpan:
    return replace(turn, untrained=_BUDGET) if turn.untrained == _TRUNCATED and turn.call_id in bounded else turn


def _findings_of(call: Call, side: bool) -> Iterator[Finding]:
    weight = Severity.INFO if side else Severity.WARNING
    if call.state is not CallState.DELIVERED:
        if call.state.terminal:
            text = f"Call {call.index} ended without an answer."
            yield Finding(Severity.INFO, f"CALL_{call.state.name}", text, call.id)
        return
    level, tokens = level_of(call), call.completion.tokens if call.completion is not None else None
    if level is CaptureLevel.TEXT:
        yield Finding(weight, "TOKENS_MISSING", f"Call {call.index} has no token ids.", call.id)
    elif level is CaptureLevel.TOKENS:
        yield Finding(weight, "LOGPROBS_MISSING", f"Call {call.index} has no logprobs.", call.id)
    if tokens is not None and tokens.logprobs_mode is LogprobsMode.SCRIPTED:
        yield Finding(Severity.FATAL, "LOGPROBS_SCRIPTED", "A test script wrote these logprobs.", call.id)
    if tokens is not None and not tokens.versions:
        yield Finding(Severity.INFO, "VERSIONS_MISSING", f"Call {call.index} has no policy version.", call.id)
    if call.injected:
        yield Finding(
            weight, "INJECTED", f"The trainer wrote the answer that call {call.index} returned to the agent.", call.id
        )
