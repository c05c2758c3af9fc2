"""Recorded rollouts for viewing: from the services, or offline from exported files.

Model calls are rows of the table `turns` in both cases, so that a recording of a file equals one of the service that it
came from. Data missing in a file (events, phases, the outcome) is empty, never guessed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from penstock.analysis.export import Row, read_rows, sequences, turns
from penstock.analysis.token_text import Pieces
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock.client.types.chat import Logprobs, TokenIds, VersionSpan
from penstock.client.types.results import Outcome, Rollout, RolloutEvent
from penstock.client.types.trajectories import Branch, Finding, RecordedToolCall, Reward

_SAVED: Final = ("turns.jsonl", "sequences.jsonl")
"""Files that `penstock rollout` writes to a rollout's directory."""
_KINDS: Final[Mapping[str, type]] = {
    **dict.fromkeys(
        ("rollout_id", "group_id", "run_id", "task_id", "agent", "tokenizer_sha256", "error", "error_cause",
         "error_caused_by", "call_id", "parent_call_id", "branch_id", "role", "state", "answerer", "finish_reason",
         "end_reason", "engine", "model", "model_requested", "request_body", "receive_time", "end_time", "grade",
         "policy_id"), str,
    ),
    **dict.fromkeys(("labels", "sampling_used", "sampling_requested", "response_message", "reward_components"), dict),
    **dict.fromkeys(("policy_spans", "normalisations", "tools", "findings", "turn_spans"), list),
    "group_index": int,
}  # fmt: skip
"""Types of a row's fields where not null: a file may come from anybody."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One model call, as docs/exports.md describes its row.

    `prompt`, `sampled` and `logprobs` are None where they were not captured; `body` is the agent's request, parsed,
    None where it was left out. `untrained` is why its tokens are not trained; empty = they are, or unknown.
    """

    index: int
    call_id: str
    parent_call_id: str | None
    branch_id: str
    role: str
    state: str
    answerer: str
    prompt: TokenIds | None
    shared: int
    sampled: TokenIds | None
    logprobs: Logprobs | None
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    end_reason: str
    engine: str
    model: str
    sampling: Mapping[str, Any]
    normalisations: tuple[str, ...]
    tools: tuple[str, ...]
    injected: bool
    message: Mapping[str, Any] | None
    body: Any
    receive_time: datetime | None
    end_time: datetime | None
    untrained: str = ""
    policy_id: str = ""
    """The policy of `versions`; empty = the rollout has one, or an older export."""
    seed_drawn: bool = False
    """Whether the engine drew the seed in `sampling` itself: it then draws another each time."""

    @property
    def seconds(self) -> float | None:
        """Seconds from the agent's request to the answer."""
        return (
            (self.end_time - self.receive_time).total_seconds()
            if self.end_time is not None and self.receive_time is not None
            else None
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """One rollout. `origin` is where it was read; `pieces` is None without the tokens' tokenizer."""

    origin: str
    rollout_id: str
    group_id: str | None = None
    group_index: int | None = None
    run_id: str | None = None
    task_id: str = ""
    agent: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tokenizer_sha256: str = ""
    failure: tuple[str, str, str] | None = None
    """Reason, cause and component at fault; None = it completed, or unknown."""
    reward: Reward | None = None
    graded_known: bool = True
    """Whether `reward` None means: not graded."""
    grade: str = ""
    findings: tuple[Finding, ...] = ()
    turns: tuple[Turn, ...] = ()
    branches: tuple[Branch, ...] = ()
    tool_calls: tuple[RecordedToolCall, ...] = ()
    events: tuple[RolloutEvent, ...] = ()
    rollout: Rollout | None = None
    outcome: Outcome | None = None
    pieces: Pieces | None = None


async def of_rollout(ps: Penstock, rollout_id: str, *, bodies: bool = True, calls_so_far: bool = False) -> Recording:
    """Reads a rollout from the services in its current state: a running one has no calls yet, only events.

    Args:
        ps: the services.
        rollout_id: which.
        bodies: whether calls have the agent's requests.
        calls_so_far: whether a running one has the calls that the gate of this connection has recorded until now.

    Raises:
        NotFound: `ROLLOUT_UNKNOWN`.
    """
    handle = await ps.rollouts.attach(rollout_id)
    info = handle.info
    events: list[RolloutEvent] = []
    if info.last_sequence:
        async with aclosing(handle.events()) as past:
            async for event in past:
                events.append(event)
                if event.sequence >= info.last_sequence:
                    break
    common: dict[str, Any] = {
        "origin": f"{rollout_id} at {ps.endpoints.driver}",
        "rollout_id": rollout_id,
        "group_id": info.group_id,
        "group_index": info.index if info.group_id is not None else None,
        "task_id": info.task_id,
        "agent": info.agent,
        "labels": info.labels,
        "events": tuple(events),
        "rollout": info,
        "outcome": info.outcome,
    }
    if info.outcome is not None:
        failure = info.outcome.failure
        common["reward"] = info.outcome.reward
        if failure is not None:
            common["failure"] = (failure.reason, str(failure.cause), str(failure.caused_by or ""))
    try:
        trajectory = await ps.rollouts.trajectory(rollout_id, bodies=bodies)
    except FailedPrecondition:  # it runs, or it ended before the gate was opened
        if not calls_so_far or info.outcome is not None:
            return Recording(**common)
        try:
            trajectory = await ps.gate.capture(rollout_id, bodies=bodies)
        except NotFound:  # of another gate, or not opened yet
            return Recording(**common)
    rows = list(sequences(trajectory))
    return Recording(
        **common,
        run_id=trajectory.run_id,
        tokenizer_sha256=trajectory.tokenizer_sha256.hex(),
        grade=trajectory.grade,
        findings=trajectory.findings,
        turns=_turns(turns(trajectory), rows),
        branches=trajectory.branches,
        tool_calls=trajectory.host_tool_calls,
        pieces=await _served(ps, trajectory.tokenizer_sha256),
    )


async def _served(ps: Penstock, digest: bytes) -> Pieces | None:
    """Returns the token texts, if the inference service has the tokens' tokenizer."""
    if not ps.endpoints.inference or not digest:
        return None
    try:
        if (await ps.inference.info()).tokenizer_sha256 != digest:
            return None
        return Pieces((await ps.inference.tokenizer())["tokenizer.json"])
    except (PenstockError, KeyError):
        return None  # without it everything else can still be shown


def of_files(place: Path, rollout_id: str | None = None, tokenizer: Path | None = None) -> Recording:
    """Reads a rollout from an exported table of turns, or from a directory of `penstock rollout`.

    Args:
        place: a file, or a directory with turns.jsonl and sequences.jsonl.
        rollout_id: which one, if the file has several.
        tokenizer: the tokens' tokenizer.json, or its directory.

    Raises:
        InvalidArgument: `RECORDING_UNREADABLE`, `ROW_INVALID`, `SCHEMA_NEWER`, `TOKENIZER_INVALID`;
            `ROLLOUT_AMBIGUOUS`: there are several, which the message names.
    """
    files = [place / name for name in _SAVED if (place / name).is_file()] if place.is_dir() else [place]
    if not files:
        raise InvalidArgument(
            f"{place} has no turns.jsonl: use a rollout's directory, or a file of `penstock export --table turns`",
            reason="RECORDING_UNREADABLE",
        )
    try:
        rows = [row for file in files for row in read_rows(file)]
    except OSError as error:
        raise InvalidArgument(f"{place}: {error.strerror}", reason="RECORDING_UNREADABLE") from None
    names = list(dict.fromkeys(str(row.get("rollout_id")) for row in rows if row.get("rollout_id")))
    if rollout_id is None and len(names) > 1:
        raise InvalidArgument(
            f"{place} has {len(names)} rollouts: choose one, for example {place}@{names[0]}", reason="ROLLOUT_AMBIGUOUS"
        )
    chosen = rollout_id if rollout_id is not None else next(iter(names), "")
    found = [row for row in rows if row.get("rollout_id") == chosen]
    if not found:
        what = f"no rollout {rollout_id}" if rollout_id is not None else "no row with a rollout"
        raise InvalidArgument(f"{place} has {what}", reason="RECORDING_UNREADABLE")
    try:
        return _of_rows(str(place), found, _tokenizer(tokenizer) if tokenizer is not None else None)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgument(
            f"{place}: {type(error).__name__}: {error}; expected rows from `penstock export`",
            reason="ROW_INVALID",
        ) from None


def _tokenizer(place: Path) -> Pieces:
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        return Pieces(file.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", reason="TOKENIZER_INVALID") from None


def _of_rows(origin: str, rows: list[Row], pieces: Pieces | None) -> Recording:
    for row in rows:
        for name, kind in _KINDS.items():
            if row.get(name) is not None and not isinstance(row[name], kind):
                raise TypeError(f"{name} is {type(row[name]).__name__}, not {kind.__name__}")
    of_calls = [row for row in rows if "turn_index" in row]
    of_samples = [row for row in rows if "sequence_index" in row]
    first = rows[0]
    sample = next(iter(of_samples), {})
    reward = sample.get("reward")
    error = first.get("error")
    return Recording(
        origin=origin,
        rollout_id=str(first["rollout_id"]),
        group_id=first.get("group_id"),
        group_index=first.get("group_index"),
        run_id=first.get("run_id"),
        task_id=first.get("task_id") or "",
        agent=first.get("agent") or "",
        labels=dict(first.get("labels") or {}),
        tokenizer_sha256=first.get("tokenizer_sha256") or "",
        failure=None
        if not error
        else (str(error), str(first.get("error_cause") or ""), str(first.get("error_caused_by") or "")),
        reward=None
        if reward is None
        else Reward(
            float(reward),
            components={name: float(value) for name, value in (sample.get("reward_components") or {}).items()},
        ),
        graded_known=bool(of_samples),
        grade=sample.get("grade") or "",
        findings=tuple(Finding(**item) for item in sample.get("findings") or ()),
        turns=_turns(of_calls, of_samples) if of_calls else _turns(_calls_of(of_samples), of_samples),
        pieces=pieces,
    )


def _calls_of(samples: Iterable[Row]) -> Iterator[Row]:
    """Reconstructs calls from samples, as far as possible: the sampled tokens, in the order of the samples."""
    seen: dict[str, Row] = {}
    for row in samples:
        former: str | None = None
        shared = 0
        for span in row.get("turn_spans") or ():
            start, end, name = int(span["start"]), int(span["end"]), str(span["call_id"])
            trained = not span.get("untrained_reason")
            known = seen.get(name)
            # A branch may share only the beginning of a call's answer; the longest span has all of it.
            if (
                known is None
                or (trained and known["completion_logprobs"] is None)
                or end - start > len(known["completion_token_ids"])
            ):
                logprobs = row.get("logprobs")
                seen[name] = {
                    "turn_index": len(seen) if known is None else known["turn_index"],
                    "call_id": name,
                    "parent_call_id": former,
                    "branch_id": row.get("branch_id"),
                    "role": row.get("role"),
                    "state": "delivered",
                    "prompt_token_ids": row["input_ids"][:start],
                    "prompt_shared_count": shared,
                    "completion_token_ids": row["input_ids"][start:end],
                    # A masked token's logprob is 0.0 in a sample, whatever it was.
                    "completion_logprobs": logprobs[start:end] if logprobs is not None and trained else None,
                    "policy_spans": list(_within(row.get("policy_spans") or (), start, end)),
                }
            former, shared = name, end
    yield from seen.values()


def _within(spans: Iterable[Mapping[str, int]], start: int, end: int) -> Iterator[dict[str, int]]:
    for span in spans:
        first, last = max(span["start"], start), min(span["end"], end)
        if first < last:
            yield {"policy_version": span["policy_version"], "start": first - start, "end": last - start}


def _turns(rows: Iterable[Row], samples: Iterable[Row]) -> tuple[Turn, ...]:
    untrained: dict[str, str] = {}
    for row in samples:
        for span in row.get("turn_spans") or ():
            reason = str(span.get("untrained_reason") or "")
            known = untrained.get(span["call_id"])
            # Tokens that one sample shares are trained by another; else the sample with all of a call's tokens counts.
            if known is None or not reason or known == "PARTIAL":
                untrained[span["call_id"]] = reason
    made = [_turn(row, untrained.get(row["call_id"], "")) for row in rows]
    return tuple(sorted(made, key=lambda turn: turn.index))


def _turn(row: Row, untrained: str) -> Turn:
    sampled = _array(row.get("completion_token_ids"), np.int32)
    logprobs = _array(row.get("completion_logprobs"), np.float32)
    if logprobs is not None and (sampled is None or len(sampled) != len(logprobs)):
        raise ValueError("completion_logprobs and completion_token_ids have different lengths")
    if logprobs is not None and (logprobs > 0.01).any():  # an engine may round up
        raise ValueError("completion_logprobs are above 0")
    return Turn(
        index=int(row["turn_index"]),
        call_id=str(row["call_id"]),
        parent_call_id=row.get("parent_call_id"),
        branch_id=row.get("branch_id") or "",
        role=row.get("role") or "",
        state=row.get("state") or "",
        answerer=row.get("answerer") or "",
        prompt=_array(row.get("prompt_token_ids"), np.int32),
        shared=int(row.get("prompt_shared_count") or 0),
        sampled=sampled,
        logprobs=logprobs,
        versions=tuple(
            VersionSpan(**{name: int(value) for name, value in span.items()}) for span in row.get("policy_spans") or ()
        ),
        finish_reason=row.get("finish_reason") or "",
        end_reason=row.get("end_reason") or "",
        engine=row.get("engine") or "",
        model=row.get("model") or row.get("model_requested") or "",
        sampling=row.get("sampling_used") or row.get("sampling_requested") or {},
        policy_id=row.get("policy_id") or "",
        seed_drawn="seed" not in (row.get("sampling_requested") or {}),
        normalisations=tuple(map(str, row.get("normalisations") or ())),
        tools=tuple(str(tool["name"]) for tool in row.get("tools") or ()),
        injected=bool(row.get("injected")),
        message=row.get("response_message"),
        body=_body(row.get("request_body")),
        receive_time=_time(row.get("receive_time")),
        end_time=_time(row.get("end_time")),
        untrained=untrained,
    )


def _array(values: Any, kind: Any) -> Any:
    if values is None:
        return None
    array = np.asarray(values, kind)
    if array.ndim != 1:
        raise ValueError("expected a list of numbers")
    return array


def _body(text: str | None) -> Any:
    if not text:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return time
