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

from penstock_codec.chat import FinishReason
from penstock_interception.domain.calls import Answerer, CallState, Dialect, Mode, RolloutState
from penstock_interception.domain.models import is_trained
from penstock_interception.domain.recordings import Divergence
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph import Branch, CallClass, LogprobsMode, Sample
from penstock_interception.graph.values import TurnSpan
from penstock_interception.rollouts.conversations import Conversation

_TRUNCATED, _BUDGET = "TRUNCATED", "BUDGET"
_TRAINED_ELSEWHERE = ("SHARED", "OTHER_POLICY")
_SIDE = frozenset({CallClass.TITLE, CallClass.PROBE, CallClass.RETRY})
_WITHOUT_BUDGET = frozenset({Answerer.INFERENCE, Answerer.UPSTREAM})  # neither engines nor upstreams limit thoughts
_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


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
    """Returns what was changed or ignored in the agent's request, and what its answer lacks of it, or its source."""
    completion, notes, failure = call.completion, call.request.normalisations, call.failure
    if failure is not None and failure.reason == "UPSTREAM_SAMPLING_UNSUPPORTED":
        return (*notes, failure.message)
    if completion is None:
        return notes
    tokens = completion.tokens
    if call.answerer in _WITHOUT_BUDGET and (budget := call.sampling.thinking_budget_tokens) is not None:
        notes = (*notes, f"thinking_budget_tokens asks for {budget} at most; reasoning was not limited")
    if _lost_thinking(call):
        notes = (*notes, "thinking was left out: the upstream's API has no field for it")
    asked, top = call.sampling.top_logprobs, tokens.top if tokens is not None else None
    if asked and (given := top.count if top is not None else 0) < asked:
        notes = (*notes, f"top_logprobs asks for {asked} alternatives; the answer has {given or 'none'}")
    present = {tensor.name for tensor in tokens.tensors} if tokens is not None else set()
    missing = [name for name in call.sampling.token_tensors or () if name not in present]
    return (*notes, f"token_tensors asks for {', '.join(missing)}; the answer has none") if missing else notes


def _lost_thinking(call: Call) -> bool:
    """Returns whether an endpoint lacks what the agent asked for: its body was written anew, for the bare API."""
    request, answerer = call.request, call.answerer
    written = (answerer is Answerer.UPSTREAM and request.dialect is not Dialect.CHAT_COMPLETIONS) or (
        answerer is Answerer.INFERENCE and not call.facts.tokenizer_sha256
    )
    asked = request.sampling.thinking is not None and call.thinks_as_agent_asks
    return written and asked and not call.facts.extended_sampling


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
    context = _untrained(rollout)
    made = graph.samples(include_top=include_top, context=context) if whole else ()
    samples = tuple(_with_budget_ends(made, rollout.calls)) if whole else None
    findings = tuple(_findings(rollout, classes, samples, conversation.stop_token_ids))
    answered = [call for call in rollout.calls if call.state is CallState.DELIVERED]
    level = min(
        (level_of(call) for call in answered if not is_given(call)), key=_LEVELS.index, default=CaptureLevel.NONE
    )
    grade = _grade(findings) if rollout.state is RolloutState.CLOSED else None
    shown = samples if samples is not None and after_index is None else ()
    return Capture(rollout, calls, classes, graph.branches(), shown, level, grade, findings, graph.chain_head)


def _grade(findings: tuple[Finding, ...]) -> Grade:
    if any(finding.severity is Severity.FATAL for finding in findings):
        return Grade.UNUSABLE
    if any(finding.severity is Severity.WARNING for finding in findings):
        return Grade.USABLE
    return Grade.EXACT


def _findings(
    rollout: Rollout, classes: dict[str, CallClass], samples: tuple[Sample, ...] | None, stop_token_ids: tuple[int, ...]
) -> Iterator[Finding]:
    if rollout.spec.mode is Mode.BLACK_BOX:
        yield Finding(Severity.FATAL, "NOT_CAPTURED", "Nothing is captured in black box mode.")
        return
    if rollout.damaged:
        text = "The journal is damaged: answers after some call could not be read, and no sample has them."
        yield Finding(Severity.FATAL, "JOURNAL_DAMAGED", text)
    yield from _branched(rollout)
    yield from _replayed(rollout)
    for call in rollout.calls:
        side = classes.get(call.id, CallClass.MAIN) in _SIDE
        trained = is_trained(rollout.spec, call.model, call.policy_id)
        yield from _findings_of(call, side, trained)
        if trained:
            yield from _of_its_end(call, side, stop_token_ids)
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


def _untrained(rollout: Rollout) -> dict[str, str]:
    """The calls that this rollout does not train, and why.

    They are of models that are not trained, or of a branch, and were sampled for its parent, which trains them.
    """
    spec, branch = rollout.spec, rollout.spec.branched_from
    found = {
        call.id: "MODEL_UNTRAINED"
        for call in rollout.calls
        if (call.policy_id or spec.models) and not is_trained(spec, call.model, call.policy_id)
    }
    if branch is None or branch.train_prefix:
        return found
    origins = ((call.id, call.completion.origin) for call in rollout.calls if call.completion is not None)
    of_parent = (call_id for call_id, origin in origins if origin is not None and origin.rollout_id != rollout.id)
    return dict.fromkeys(of_parent, "PARENT") | found


def is_given(call: Call) -> bool:
    """Whether a call was answered as the creator of a branch gave it, of this one or of one that it comes from.

    It says nothing of how others were captured.
    """
    return call.completion is not None and call.completion.origin is not None and not call.completion.origin.rollout_id


def _branched(rollout: Rollout) -> Iterator[Finding]:
    """Says where a branch leaves its parent, or that it never came there."""
    branch, recording = rollout.spec.branched_from, rollout.recording
    if branch is None:
        return
    where = f"call {branch.call_index} of {branch.parent_rollout_id}"
    if recording is not None and recording.point_call_id:
        how = "answered as given" if branch.answer_given else "sampled"
        text = f"It leaves its parent at {where}, which is {how} here."
        yield Finding(Severity.INFO, "BRANCHED", text, recording.point_call_id)
    elif rollout.state is RolloutState.CLOSED:
        text = f"No call had the prompt of {where}, so this rollout is no branch of it."
        yield Finding(Severity.WARNING, "BRANCH_MISSED", text)


def _replayed(rollout: Rollout) -> Iterator[Finding]:
    """Says what was replayed, and where the attempts part."""
    recording = rollout.recording
    if recording is None:
        return
    point = next((call for call in rollout.calls if call.id == recording.point_call_id), None)
    is_sampled = point is not None and (point.completion is None or point.completion.origin is None)
    recorded = _counted(recording.count - is_sampled, "recorded call")
    text = f"Replayed, and not sampled again: {rollout.totals.replayed.calls} of {recorded}."
    yield Finding(Severity.INFO, "REPLAYED", text)
    for one in recording.divergences:
        yield Finding(Severity.INFO, "REPLAY_DIVERGED", _described(rollout, one), one.call_id)


def first_divergence(rollout: Rollout) -> str:
    """Says which call was the first to differ from what is recorded at its place; empty if none did."""
    recording = rollout.recording
    return _described(rollout, recording.divergences[0]) if recording is not None and recording.divergences else ""


def _described(rollout: Rollout, one: Divergence) -> str:
    index = next((call.index for call in rollout.calls if call.id == one.call_id), None)
    return (
        f"Call {index} differs from the recorded call {one.recorded_call_id} from token {one.index} of its prompt"
        f" on: {one.recorded!r} was recorded, {one.text!r} is new."
    )


def _excluded(samples: tuple[Sample, ...]) -> Iterator[Finding]:
    """Counts the sampled turns and tokens that no sample trains, by reason (R102)."""
    reasons: dict[str, tuple[str, int]] = {}
    for turn in (turn for sample in samples for turn in sample.turns):
        known = reasons.get(turn.call_id)
        # A turn in several samples counts as trained if any sample trains it; else the sample with all of it counts.
        if known is None or not turn.untrained or (known[0] == "PARTIAL" and turn.untrained not in _TRAINED_ELSEWHERE):
            reasons[turn.call_id] = (turn.untrained, turn.end - turn.start)
    for why in sorted({why for why, _ in reasons.values() if why and why not in _TRAINED_ELSEWHERE}):
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


def _findings_of(call: Call, side: bool, trained: bool) -> Iterator[Finding]:
    weight = Severity.INFO if side or is_given(call) or not trained else Severity.WARNING
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
    if trained and tokens is not None and tokens.logprobs_mode is LogprobsMode.SCRIPTED:
        yield Finding(Severity.FATAL, "LOGPROBS_SCRIPTED", "A test script wrote these logprobs.", call.id)
    if tokens is not None and not tokens.versions:
        yield Finding(Severity.INFO, "VERSIONS_MISSING", f"Call {call.index} has no policy version.", call.id)
    if call.injected:
        yield Finding(
            weight, "INJECTED", f"The trainer wrote the answer that call {call.index} returned to the agent.", call.id
        )


def _of_its_end(call: Call, side: bool, stop_token_ids: tuple[int, ...]) -> Iterator[Finding]:
    """Names what an engine's answer ends with, or goes on after, although the call did not ask for it."""
    completion, asked = call.completion, call.request.sampling
    if call.state is not CallState.DELIVERED or completion is None or completion.tokens is None:
        return
    ids = completion.tokens.ids
    if asked.max_tokens is not None and ids.size > asked.max_tokens:
        text = f"Call {call.index} has {ids.size} sampled tokens; at most {asked.max_tokens} were asked for."
        weight = Severity.INFO if side or is_given(call) else Severity.WARNING
        yield Finding(weight, "TOKENS_OVER_LIMIT", text, call.id)
    stops = {*stop_token_ids, *(asked.stop_token_ids or ())}
    is_stopped = completion.finish_reason in _BY_ITSELF
    by_text = asked.stop or completion.stop_text is not None  # which ends a turn anywhere
    if stop_token_ids and is_stopped and not by_text and (not ids.size or int(ids[-1]) not in stops):
        text = f"Call {call.index} ended by itself without a stop token: the end of its turn is not trained."
        yield Finding(Severity.INFO, "STOP_TOKEN_MISSING", text, call.id)
