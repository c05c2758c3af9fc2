"""Logprob gaps of exported trajectories: rows of `turns` or `sequences` become `Scored` sequences, with the trainer's
logprobs from a column, from an .npz file, or from a running inference service that scores the tokens now.

A score is of the distribution at a temperature, without filters. So raw logprobs are scored at temperature 1 and
processed ones at that of their turn; greedily sampled tokens have no distribution and are left out; tokens sampled
under top_p, top_k, min_p or penalties are compared, with a note.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.analysis.export import Row
from penstock.analysis.logprob_diff import Scored, refuse_mixed
from penstock.analysis.readable_calls import counted
from penstock.client.errors import FailedPrecondition, InvalidArgument, NotFound, Violation
from penstock.client.inference.client import InferenceClient
from penstock.client.types.chat import LogprobsMode, VersionSpan
from penstock.client.types.trajectories import TurnSpan

_AT_ONCE: Final = 8
"""Sequences scored concurrently."""
_NEUTRAL: Final = {
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(slots=True)
class RowCounts:
    """Remarks in token counts: tokens left out with the reason, and tokens with a caveat."""

    greedy: int = 0
    filtered: int = 0
    unknown_sampling: int = 0
    other_versions: Counter[int | None] = field(default_factory=Counter)
    other_policies: Counter[str] = field(default_factory=Counter)
    rows_without_logprobs: int = 0

    def notes(self) -> Iterator[str]:
        """Yields notes for a report."""
        if self.other_policies:
            count = sum(self.other_policies.values())
            yield f"left out: {counted(count, 'token')} of other policies ({_named(self.other_policies)})"
        if self.other_versions:
            names = ", ".join("unknown" if v is None else f"v{v}" for v in sorted(self.other_versions, key=str))
            count = sum(self.other_versions.values())
            yield f"left out: {counted(count, 'token')} of versions that are no longer in force ({names})"
        if self.greedy:
            yield f"left out: {counted(self.greedy, 'token')} sampled at temperature 0"
        if self.rows_without_logprobs:
            yield f"left out: {counted(self.rows_without_logprobs, 'row')} without the engine's tokens and logprobs"
        if self.filtered:
            yield (
                f"{self.filtered} tokens were sampled under top_p, top_k, min_p or penalties, which a score does "
                "not apply: their processed logprobs are of a smaller distribution"
            )
        if self.unknown_sampling:
            yield f"{self.unknown_sampling} tokens have no sampling: scored at temperature 1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """A row as arrays: ids, mask and the engine's logprobs of shape (n,), and each turn's sampling (None: unknown).

    The mask selects tokens of `policy_id` alone; empty = the rollout has one policy. The row itself covers the tokens
    from `start` on: those of a call's completion, or all of a sample.
    """

    key: str
    start: int
    rollout_id: str
    tokenizer_sha256: str
    token_ids: NDArray[np.int32]
    engine: NDArray[np.float64]
    mask: NDArray[np.bool_]
    mode: LogprobsMode
    versions: tuple[VersionSpan, ...]
    turns: tuple[TurnSpan, ...]
    policy_id: str
    samplings: tuple[Mapping[str, Any] | None, ...]

    def scored(self, trainer: NDArray[np.float64], *, mask: NDArray[np.bool_] | None = None) -> Scored:
        """Adds the trainer's logprobs, shape (n,)."""
        return Scored(
            engine=self.engine,
            trainer=trainer,
            mask=self.mask if mask is None else mask,
            versions=self.versions,
            mode=self.mode,
            token_ids=self.token_ids,
            turns=self.turns,
            rollout_id=self.rollout_id,
            policy_id=self.policy_id,
        )


def lines(rows: Iterable[Row], counts: RowCounts, policy: str | None = None) -> Iterator[tuple[Line, Row]]:
    """Yields each row of either table that has the engine's tokens and logprobs.

    With a `policy` only its rows: "" are those of rollouts with one policy, without a name.

    Raises:
        InvalidArgument: `ROW_INVALID`, with the row; `LOGPROBS_MODES_MIXED`, it has several kinds of logprobs;
            `POLICY_UNKNOWN`, rows are of other policies only.
    """
    found = False
    for number, row in enumerate(rows, 1):
        try:
            line = _of_sequence(row) if "input_ids" in row else _of_turn(row)
        except (KeyError, TypeError, ValueError) as error:
            what = f"row {number}: {type(error).__name__}: {error}"
            message = f"{what}; expected rows of turns or sequences from `penstock export`"
            raise InvalidArgument(message, reason="ROW_INVALID") from None
        if line is None:
            counts.rows_without_logprobs += 1
        elif policy is not None and line.policy_id != policy:
            counts.other_policies[line.policy_id] += int(line.mask.sum())
        else:
            found = True
            yield line, row
    if counts.other_policies and not found:
        message = f"No row is of the policy {_named([policy or ''])}, but of {_named(counts.other_policies)}"
        raise InvalidArgument(message, reason="POLICY_UNKNOWN")


def with_column(rows: Iterable[Row], column: str, counts: RowCounts, *, policy: str | None = None) -> Iterator[Scored]:
    """Reads the trainer's logprobs from a column: one per token of `input_ids`, or of the completion in `turns`.

    Raises:
        InvalidArgument: `ROW_INVALID`, the column is absent or of another length; as `lines`.
    """
    for line, row in lines(rows, counts, policy):
        if row.get(column) is None:
            raise InvalidArgument(f"{line.key} has no {column}", reason="ROW_INVALID")
        yield line.scored(_whole(line, row[column], column))


def with_arrays(
    rows: Iterable[Row], arrays: Mapping[str, NDArray[Any]], counts: RowCounts, *, policy: str | None = None
) -> Iterator[Scored]:
    """Looks up the trainer's logprobs by `sample_id` (or `call_id` in `turns`); otherwise as `with_column`."""
    for line, _ in lines(rows, counts, policy):
        if line.key not in arrays:
            raise InvalidArgument(f"There is no array {line.key}", reason="ROW_INVALID")
        yield line.scored(_whole(line, arrays[line.key], line.key))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz file.

    Raises:
        InvalidArgument: `FILE_UNREADABLE`.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, AttributeError, EOFError) as error:
        raise InvalidArgument(f"{path}: not an .npz file of arrays: {error}", reason="FILE_UNREADABLE") from None


async def with_scores(
    rows: Iterable[Row],
    inference: InferenceClient,
    counts: RowCounts,
    *,
    policy: str | None = None,
    adapter: str = "",
    any_version: bool = False,
) -> AsyncIterator[Scored]:
    """Scores the tokens with the inference service's current weights, which stand for the trainer.

    Only tokens of the version in force are compared, unless `any_version`: then the others too, labelled with the
    version that scored them. With an `adapter` that is the adapter's version; rows do not record the adapter that
    sampled them, so they must be its own. The weights are of one policy, whose versions say nothing of another's: where
    the rows are of several, `policy` says whose they are.

    Raises:
        InvalidArgument: `POLICY_NOT_CHOSEN`, the rows are of several policies; as `lines`.
        NotFound: `ADAPTER_UNKNOWN`.
        FailedPrecondition: `POLICY_VERSION_UNAVAILABLE`, no token is of the version in force, or it changed meanwhile;
            `TOKENIZER_MISMATCH`, the rows are another model's.
    """
    info = await inference.info()
    version = await _version(inference, adapter) if adapter else info.policy_version
    scorer = _Scorer(inference, version, info.tokenizer_sha256.hex(), counts, adapter=adapter, any_version=any_version)
    found = 0
    source = _of_one_policy(line for line, _ in lines(rows, counts, policy))
    while batch := list(islice(source, _AT_ONCE)):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(scorer.score(line)) for line in batch]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for scored in [one for task in tasks for one in task.result()]:
            found += 1
            yield scored
    if not found and counts.other_versions:
        versions = ", ".join("unknown" if v is None else f"v{v}" for v in sorted(counts.other_versions, key=str))
        raise FailedPrecondition(
            f"Version {version} is in force, but sampled none of these tokens ({versions})",
            reason="POLICY_VERSION_UNAVAILABLE",
        )


def _of_one_policy(found: Iterable[Line]) -> Iterator[Line]:
    first: str | None = None
    for line in found:
        if first is None:
            first = line.policy_id
        elif first != line.policy_id:
            names = _named([first, line.policy_id])
            message = (
                f"The rows are of several policies ({names}), the weights of one: name the policy that they are of"
            )
            raise InvalidArgument(message, reason="POLICY_NOT_CHOSEN")
        yield line


def _named(policies: Iterable[str]) -> str:
    return ", ".join(policy or "without a name" for policy in sorted(policies))


async def _version(inference: InferenceClient, adapter: str) -> int:
    for found in await inference.adapters():
        if found.name == adapter:
            return found.policy_version
    raise NotFound(f"No adapter {adapter} is loaded: load it, or leave it out", reason="ADAPTER_UNKNOWN")


class _Scorer:
    def __init__(
        self,
        inference: InferenceClient,
        version: int,
        tokenizer: str,
        counts: RowCounts,
        *,
        adapter: str,
        any_version: bool,
    ) -> None:
        self._inference = inference
        self._version = version
        self._tokenizer = tokenizer
        self._counts = counts
        self._adapter = adapter
        self._any_version = any_version

    async def score(self, line: Line) -> list[Scored]:
        if self._tokenizer and line.tokenizer_sha256 and line.tokenizer_sha256 != self._tokenizer:
            raise FailedPrecondition(
                f"{line.key} was made with another tokenizer than the inference service has: another model's tokens",
                reason="TOKENIZER_MISMATCH",
            )
        mask = line.mask if self._any_version else self._of_this_version(line)
        trainer = np.zeros(line.token_ids.size)
        chosen = np.zeros(line.token_ids.size, bool)
        for temperature, here in self._temperatures(line, mask).items():
            first, last = int(here.argmax()), int(np.flatnonzero(here)[-1])
            found = await self._inference.score(
                line.token_ids[: last + 1],
                first,
                adapter=self._adapter,
                temperature=None if temperature == 1.0 else temperature,
                exact_version=self._version,
            )
            trainer[here] = found[np.flatnonzero(here) - first]
            chosen |= here
        if not chosen.any():
            return []
        scored = line.scored(trainer, mask=chosen)
        return [replace(scored, scored_version=self._version) if self._any_version else scored]

    def _of_this_version(self, line: Line) -> NDArray[np.bool_]:
        ours, rest = np.zeros(line.mask.size, bool), line.mask.copy()
        for span in line.versions:
            inside = slice(span.start, span.end)
            if span.policy_version == self._version:
                ours[inside] = line.mask[inside]
            elif count := int(rest[inside].sum()):
                self._counts.other_versions[span.policy_version] += count
            rest[inside] = False
        if rest.any():
            self._counts.other_versions[None] += int(rest.sum())
        return ours

    def _temperatures(self, line: Line, mask: NDArray[np.bool_]) -> dict[float, NDArray[np.bool_]]:
        """Returns the tokens to score at each temperature."""
        found: dict[float, NDArray[np.bool_]] = {}
        rest = mask.copy()
        for turn, sampling in zip(line.turns, line.samplings, strict=True):
            here = np.zeros(mask.size, bool)
            here[turn.start : turn.end] = rest[turn.start : turn.end]
            count = int(here.sum())
            if not count:
                continue
            rest[turn.start : turn.end] = False
            temperature = 1.0
            if line.mode is not LogprobsMode.RAW:
                if sampling is None:
                    self._counts.unknown_sampling += count
                else:
                    temperature = 1.0 if sampling.get("temperature") is None else float(sampling["temperature"])
                    if any(sampling.get(name) not in (None, neutral) for name, neutral in _NEUTRAL.items()):
                        self._counts.filtered += count
            if temperature == 0.0:
                self._counts.greedy += count
                continue
            found[temperature] = found.get(temperature, np.zeros(mask.size, bool)) | here
        if rest.any():  # in no turn
            self._counts.unknown_sampling += int(rest.sum())
            found[1.0] = found.get(1.0, np.zeros(mask.size, bool)) | rest
        return found


def _of_sequence(row: Row) -> Line | None:
    if row["logprobs"] is None:
        return None
    turns = tuple(TurnSpan(turn["call_id"], turn["start"], turn["end"]) for turn in row["turn_spans"])
    samplings = row.get("samplings")
    if samplings is None:  # older rows have the temperatures only
        known = row.get("temperatures") or [None] * len(turns)
        samplings = [None if value is None else {"temperature": value} for value in known]
    if len(samplings) != len(turns):
        raise ValueError(f"{len(samplings)} samplings of {len(turns)} turns")
    refuse_mixed(str(row["sample_id"]), LogprobsMode(row["logprobs_mode"]), np.asarray(row["loss_mask"], np.bool_))
    return _checked(
        Line(
            key=str(row["sample_id"]),
            start=0,
            rollout_id=str(row["rollout_id"]),
            tokenizer_sha256=row.get("tokenizer_sha256") or "",
            token_ids=np.asarray(row["input_ids"], np.int32),
            engine=np.asarray(row["logprobs"], np.float64),
            mask=np.asarray(row["loss_mask"], np.uint8).astype(bool),
            mode=LogprobsMode(row["logprobs_mode"]),
            versions=_spans(row, 0),
            turns=turns,
            policy_id=str(row.get("policy_id") or ""),
            samplings=tuple(samplings),
        )
    )


def _of_turn(row: Row) -> Line | None:
    prompt, sampled, logprobs = (
        row[name] for name in ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
    )
    if prompt is None or not sampled or logprobs is None:
        return None
    count = len(prompt)
    return _checked(
        Line(
            key=str(row["call_id"]),
            start=count,
            rollout_id=str(row["rollout_id"]),
            tokenizer_sha256=row.get("tokenizer_sha256") or "",
            token_ids=np.asarray([*prompt, *sampled], np.int32),
            engine=np.concatenate((np.zeros(count), np.asarray(logprobs, np.float64))),
            mask=np.arange(count + len(sampled)) >= count,
            mode=LogprobsMode(row["logprobs_mode"]),
            versions=_spans(row, count),
            turns=(TurnSpan(str(row["call_id"]), count, count + len(sampled)),),
            policy_id=str(row.get("policy_id") or ""),
            samplings=(row["sampling_used"],),
        )
    )


def _spans(row: Row, offset: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(span["policy_version"], span["start"] + offset, span["end"] + offset)
        for span in row["policy_spans"]
    )


def _checked(line: Line) -> Line:
    if not line.token_ids.shape == line.engine.shape == line.mask.shape:
        raise ValueError(f"{line.key} has arrays of several lengths")
    if line.mask[:1].any():
        raise ValueError(f"{line.key}: the first token has no logprob")
    return line


def _whole(line: Line, values: Any, name: str) -> NDArray[np.float64]:
    """Returns the trainer's logprobs over the whole sequence; a turn's column covers its completion only."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    missing = line.token_ids.size - found.size
    if found.ndim != 1 or missing not in (0, line.start):
        what = f"{line.key} has {found.size} of {name} for {line.token_ids.size - line.start} tokens"
        raise InvalidArgument(what, reason="ROW_INVALID", violations=(Violation(name, what),))
    return np.concatenate((np.zeros(missing), found))
