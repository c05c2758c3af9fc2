"""Compares two recorded rollouts.

Two rollouts are equal if they have the same requests, the same sampled tokens (or, without tokens, the same messages),
call by call, and the same end and reward. Names and times are no differences; times are listed separately. Data that
one of the two lacks never counts as equal: it is reported as unknown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np

from penstock.analysis.readable_calls import MessagePart, answered, messages
from penstock.analysis.recordings import Recording, Turn
from penstock.client.types.chat import TokenIds
from penstock.client.types.results import ArtifactCollected, CommandFinished

_AFTER: Final = 12
"""Number of tokens shown from the point of divergence."""
_BEFORE: Final = 48
_CHANGES: Final = "changes.diff"
"""The artifact with the agent's changes, if the task keeps it."""
_NAMED: Final = 5
"""Maximum number of calls named as not fully compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference; None = the recording does not have the value."""

    part: str
    """task, end, reward, calls, files or commands."""
    name: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Side:
    """One rollout's side of a divergence: tokens, their text (None without a tokenizer) and logprobs."""

    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first divergence of two rollouts.

    `turn` counts calls from 0; `where` is prompt, answer (tokens), request, message (the answer's), or calls: one has
    no more. `position` counts tokens of the prompt or of the answer, parts of a request's messages or of the answer's.
    `before` is the common text just before it, None without a tokenizer.
    """

    turn: int
    where: str
    position: int
    before: str | None
    left: Side
    right: Side


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two rollouts side by side."""

    left: str
    right: str
    differences: tuple[Difference, ...]
    divergence: Divergence | None
    seconds: Mapping[str, tuple[float | None, float | None]]
    """By phase, and `calls` for all model calls."""
    unknown: tuple[str, ...]
    """What could not be compared, with the reason."""

    @property
    def same(self) -> bool:
        """Whether nothing that could be compared differs."""
        return not self.differences and self.divergence is None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for programs."""
        return {"same": self.same, **asdict(self)}


def compare(left: Recording, right: Recording) -> Comparison:
    """Compares two recordings, call by call in the order of arrival."""
    unknown: list[str] = []
    divergence = _divergence(left, right)
    last = len(left.turns) if divergence is None else divergence.turn + 1
    pairs = list(zip(left.turns[:last], right.turns[:last], strict=False))
    found = [
        *_facts(left, right),
        *_rewards(left, right),
        *_counts(left, right),
        *_calls(pairs),
        *_happened(left, right),
    ]
    unknown += [*_unsaid(left, right), *_uncompared(pairs), *_unread(left, right)]
    for side in (left, right):
        if not side.graded_known:
            unknown.append(f"reward: {side.origin} has none (a table of sequences has)")
        if not side.events:
            unknown.append(f"phases, commands and files: {side.origin} has no events")
        if not side.turns:
            unknown.append(f"calls: {side.origin} has none")
    return Comparison(
        left=left.rollout_id,
        right=right.rollout_id,
        differences=tuple(found),
        divergence=divergence,
        seconds=_seconds(left, right),
        unknown=tuple(unknown),
    )


def _facts(left: Recording, right: Recording) -> Iterator[Difference]:
    for part, name, get in _FACTS:
        one, other = get(left), get(right)
        # A value that only one of them has is no difference: a file has less than a service.
        if one != other and (name in _OF_FAILURES or (one is not None and other is not None)):
            yield Difference(part, name, one, other)


def _unsaid(left: Recording, right: Recording) -> Iterator[str]:
    """Yields the facts that only one of them has."""
    for side, other in ((left, right), (right, left)):
        names = [
            name for _, name, get in _FACTS if name not in _OF_FAILURES and get(side) is None and get(other) is not None
        ]
        if names:
            yield f"{', '.join(names)}: {side.origin} does not have them"


def _ended(side: Recording) -> str | None:
    if side.failure is not None:
        return side.failure[0]
    return None if side.rollout is not None and side.outcome is None else "completed"


def _first(side: Recording, get: Callable[[Turn], Any]) -> Any:
    return next((value for turn in side.turns if (value := get(turn))), None)


def _sampling(turn: Turn) -> dict[str, Any]:
    """Returns the sampling without seeds that the engine draws anew for each call, as it does ids."""
    return {name: value for name, value in turn.sampling.items() if name != "seed" or not turn.seed_drawn}


def _versions(side: Recording) -> list[int] | None:
    numbers = sorted({span.policy_version for turn in side.turns for span in turn.versions})
    return numbers or None


_FACTS: Final[tuple[tuple[str, str, Callable[[Recording], Any]], ...]] = (
    ("task", "task", lambda side: side.task_id),
    ("task", "agent", lambda side: side.agent),
    ("task", "agent's spec", lambda side: side.rollout.agent_spec_sha256 if side.rollout else None),
    ("task", "labels", lambda side: dict(side.labels)),
    ("task", "model", lambda side: _first(side, lambda turn: turn.model)),
    ("task", "engine", lambda side: _first(side, lambda turn: turn.engine)),
    ("task", "sampling", lambda side: _first(side, _sampling)),
    ("task", "tokenizer", lambda side: side.tokenizer_sha256 or None),
    ("task", "policy versions", _versions),
    ("end", "ended", lambda side: _ended(side)),
    ("end", "cause", lambda side: None if side.failure is None else side.failure[1]),
    ("end", "caused by", lambda side: None if side.failure is None else side.failure[2] or None),
    (
        "end",
        "agent",
        lambda side: str(side.outcome.agent_exit) if side.outcome and side.outcome.agent_exit else None,
    ),
    ("end", "grade of the capture", lambda side: side.grade or None),
)
_OF_FAILURES: Final = ("cause", "caused by")
"""None there means a rollout that did not fail."""


def _rewards(left: Recording, right: Recording) -> Iterator[Difference]:
    if not (left.graded_known and right.graded_known):
        return
    one, other = left.reward, right.reward
    if (one and one.value) != (other and other.value) or (one is None) != (other is None):
        yield Difference("reward", "reward", None if one is None else one.value, None if other is None else other.value)
    first, second = (dict(side.components) if side else {} for side in (one, other))
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield Difference("reward", name, first.get(name), second.get(name))


def _counts(left: Recording, right: Recording) -> Iterator[Difference]:
    if not (left.turns and right.turns):
        return
    if len(left.turns) != len(right.turns):
        yield Difference("calls", "calls", len(left.turns), len(right.turns))
    counts: tuple[tuple[str, Callable[[Turn], TokenIds | None]], ...] = (
        ("prompt tokens", lambda turn: turn.prompt),
        ("sampled tokens", lambda turn: turn.sampled),
    )
    for name, get in counts:
        pairs = ((get(one), get(other)) for one, other in zip(left.turns, right.turns, strict=False))
        if any((one is None) != (other is None) for one, other in pairs):
            continue  # a sum over data that only one of them has is meaningless
        one, other = (sum(len(ids) for turn in side.turns if (ids := get(turn)) is not None) for side in (left, right))
        if one != other:
            yield Difference("calls", name, one, other)


def _calls(pairs: Iterable[tuple[Turn, Turn]]) -> Iterator[Difference]:
    """Compares how each call ended."""
    for number, (one, other) in enumerate(pairs):
        if one.state != other.state:
            yield Difference("calls", f"call {number}: state", one.state or None, other.state or None)
        if one.end_reason != other.end_reason:
            yield Difference("calls", f"call {number}: no answer", one.end_reason or None, other.end_reason or None)
        if one.finish_reason and other.finish_reason and one.finish_reason != other.finish_reason:
            yield Difference("calls", f"call {number}: finish", one.finish_reason, other.finish_reason)


def _uncompared(pairs: Iterable[tuple[Turn, Turn]]) -> Iterator[str]:
    """Names the calls that could not be fully compared."""
    found: dict[str, list[int]] = {"requests": [], "answers": [], "finish reasons": []}
    for number, (one, other) in enumerate(pairs):
        if (one.prompt is None or other.prompt is None) and (one.body is None or other.body is None):
            found["requests"].append(number)
        if one.state != other.state:
            continue  # reported as a difference
        nothing = all(turn.sampled is None and turn.message is None for turn in (one, other))
        if (
            not (nothing and one.state != "delivered")
            and (one.sampled is None or other.sampled is None)
            and (one.message is None or other.message is None)
        ):
            found["answers"].append(number)
        if bool(one.finish_reason) != bool(other.finish_reason):
            found["finish reasons"].append(number)
    for what, calls in found.items():
        if calls:
            more = f" and {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
            named = f"call{'s' if len(calls) > 1 else ''} {', '.join(map(str, calls[:_NAMED]))}{more}"
            how = "" if what == "finish reasons" else ", neither as tokens nor as messages"
            yield f"{what} of {named}: not recorded in both{how}"


def _unread(left: Recording, right: Recording) -> Iterator[str]:
    """Names the files of which only the number or the beginning is known."""
    collected = [
        {event.payload.name: event.payload for event in side.events if isinstance(event.payload, ArtifactCollected)}
        for side in (left, right)
    ]
    for name in collected[0].keys() & collected[1].keys():
        if any(side[name].truncated for side in collected):
            yield f"the rest of {name}: only its beginning was recorded"
    changed = [
        side.outcome is not None and side.outcome.grading is not None and side.outcome.grading.changes is not None
        for side in (left, right)
    ]
    if all(changed) and not all(_CHANGES in side for side in collected):
        yield "the content of the files that the agents changed: only their number and size are known"


def _happened(left: Recording, right: Recording) -> Iterator[Difference]:
    """Compares setup and verifier commands, and collected files, if both have events."""
    if not (left.events and right.events):
        return
    for part, get in (("commands", _commands), ("files", _files)):
        one, other = get(left), get(right)
        for name in dict.fromkeys((*one, *other)):
            if one.get(name) != other.get(name):
                yield Difference(part, name, one.get(name), other.get(name))


def _commands(side: Recording) -> dict[str, str]:
    return {
        f"{event.payload.phase.value} {event.payload.index}: {event.payload.command}": str(event.payload.exit)
        for event in side.events
        if isinstance(event.payload, CommandFinished)
    }


def _files(side: Recording) -> dict[str, str]:
    found = {
        event.payload.name: f"{event.payload.size_bytes} bytes, sha256 {sha256(event.payload.content).hexdigest()[:16]}"
        for event in side.events
        if isinstance(event.payload, ArtifactCollected)
    }
    grading = None if side.outcome is None else side.outcome.grading
    if grading is not None and grading.changes is not None:
        changed = grading.changes
        found["the agent's changes"] = f"{changed.entries} paths, {changed.size_bytes} bytes, {changed.removed} removed"
    return found


def _divergence(left: Recording, right: Recording) -> Divergence | None:
    for number, (one, other) in enumerate(zip(left.turns, right.turns, strict=False)):
        if one.prompt is not None and other.prompt is not None:
            if (at := _parting(one.prompt, other.prompt)) is not None:
                return _at_token(left, right, (one, other), number, "prompt", at)
        elif one.body is not None and other.body is not None:
            asked, also = messages(one.body), messages(other.body)
            if asked != also:
                return _at_part(number, "request", asked, also)
        if (
            one.sampled is not None
            and other.sampled is not None
            and (at := _parting(one.sampled, other.sampled)) is not None
        ):
            return _at_token(left, right, (one, other), number, "answer", at)
        if one.message is not None and other.message is not None:  # with tokens, too: it may not be what was sampled
            one_parts, other_parts = answered(one.message), answered(other.message)
            if one_parts != other_parts:
                return _at_part(number, "message", one_parts, other_parts)
    if len(left.turns) != len(right.turns) and left.turns and right.turns:
        return Divergence(min(len(left.turns), len(right.turns)), "calls", 0, None, Side(), Side())
    return None


def _at_part(
    number: int, where: str, one_parts: tuple[MessagePart, ...], other_parts: tuple[MessagePart, ...]
) -> Divergence:
    common = min(len(one_parts), len(other_parts))
    at = next((i for i in range(common) if one_parts[i] != other_parts[i]), common)
    sides = [
        Side(text=" ".join(filter(None, (part[at].name, part[at].text))) if at < len(part) else "")
        for part in (one_parts, other_parts)
    ]
    return Divergence(number, where, at, one_parts[at - 1].text if at else "", *sides)


def _parting(one: TokenIds, other: TokenIds) -> int | None:
    """Returns the first position at which two differ; None if they are equal."""
    common = min(len(one), len(other))
    unlike = np.flatnonzero(one[:common] != other[:common])
    if len(unlike):
        return int(unlike[0])
    return None if len(one) == len(other) else common


def _at_token(
    left: Recording, right: Recording, turns: tuple[Turn, Turn], number: int, where: str, at: int
) -> Divergence:
    def side(recording: Recording, turn: Turn) -> Side:
        whole = turn.prompt if where == "prompt" else turn.sampled
        assert whole is not None
        ids = whole[at : at + _AFTER]
        logprobs = None
        if where == "answer" and turn.logprobs is not None:
            logprobs = tuple(float(value) for value in turn.logprobs[at : at + _AFTER])
        text = None if recording.pieces is None else recording.pieces.whole(ids)
        return Side(tuple(int(item) for item in ids), text, logprobs)

    turn = turns[0]
    whole = turn.prompt if where == "prompt" else turn.sampled
    assert whole is not None
    before = whole[max(0, at - _BEFORE) : at]
    if where == "answer" and turn.prompt is not None and len(before) < _BEFORE:
        before = np.concatenate((turn.prompt[-(_BEFORE - len(before)) :], before))
    text_before = None if left.pieces is None else left.pieces.whole(before)
    return Divergence(number, where, at, text_before, side(left, turns[0]), side(right, turns[1]))


def _seconds(left: Recording, right: Recording) -> dict[str, tuple[float | None, float | None]]:
    one, other = _times(left), _times(right)
    return {name: (one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other))}


def _times(side: Recording) -> dict[str, float]:
    found = {} if side.rollout is None else {phase.value: spent for phase, spent in side.rollout.phase_times.items()}
    waited = [turn.seconds for turn in side.turns if turn.seconds is not None]
    if waited:
        found["calls"] = sum(waited)
    return found
