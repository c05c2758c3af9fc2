"""Parses SGLang's answers: untrusted JSON to token ids, logprobs and spans, each of them checked and none made up.

An event of a stream has all tokens so far, or only those since the last event, as the server was started
(`--incremental-streaming-output`); the count that it states shows which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable, Violation
from penstock_chassis.validation import invalid
from penstock_inference.domain.generation import Logprobs, TokenIds, TopLogprobs
from penstock_inference.engines.openai.answers import Read, broken, checked_logprobs, not_finite
from penstock_inference.engines.openai.wire import RETRY_S, shown

NOT_A_NUMBER = "NaN happened"
"""The stop text that the server reports when it sampled no token of the vocabulary."""
MAX_SPANS = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for."""

    prompt_tokens: int
    logprobs: str
    """The field of meta_info with the logprobs; empty for none."""
    top_logprobs: int
    stops: frozenset[str]
    field: str
    """The field that a refusal is about where the server alone can check it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one event that no event before had."""

    read: Read
    cached_tokens: int
    spans: tuple[tuple[str, int, int], ...] | None
    """Of a completion that ended: version's name, start and end. None: the server reports none."""
    retractions: int
    """How often the server has taken the request out of its batch so far."""


def read_chunk(event: Any, held: Sequence[int], vocab_size: int, asked: Asked) -> Chunk:
    """Read one event, after the tokens `held`.

    Raises FailedPrecondition (UPSTREAM_ANSWER_INVALID, UPSTREAM_PROMPT_CHANGED), Internal (LOGITS_NOT_FINITE), and for
    requests that the server refused in its scheduler InvalidArgument (FIELD_INVALID) or Unavailable (UPSTREAM_FAILED).
    """
    meta = meta_info(event)
    reason, matched = _finish(meta.get("finish_reason"), asked)
    prompt = meta.get("prompt_tokens", asked.prompt_tokens)
    if prompt != asked.prompt_tokens:
        raise FailedPrecondition("The upstream changed or cut the prompt.", reason="UPSTREAM_PROMPT_CHANGED")
    total = _count(meta, "completion_tokens", None)
    try:
        new, logprobs, top = _tokens(event, meta, held, total, vocab_size, asked)
    except FailedPrecondition:
        if reason != "abort":
            raise
        # What was aborted while it waited repeats tokens, and may lack logprobs: what came before is all there is.
        new, logprobs, top = [], [], []
    return Chunk(
        Read(new, logprobs, top, reason, matched, None),
        min(_count(meta, "cached_tokens", 0), asked.prompt_tokens),
        None if reason is None else _spans(meta.get("weight_versions"), total, len(held) + len(new)),
        _count(meta, "num_retractions", 0),
    )


def meta_info(answer: Any) -> Mapping[str, Any]:
    """The metadata of an answer. Raises FailedPrecondition (UPSTREAM_ANSWER_INVALID)."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise broken("an answer without meta_info")
    return meta


def foreign(name: Any) -> FailedPrecondition:
    """The error for an answer of weights with this name."""
    return broken(f"it names weights {str(name)[:40]!r}, which this service did not put in force")


def read_scores(answer: Any, token_ids: TokenIds) -> Logprobs:
    """Logprobs of all tokens of a prompt except the first. Raises the errors of `read_chunk`."""
    rows = meta_info(answer).get("input_token_logprobs")
    if not isinstance(rows, list) or len(rows) != token_ids.size:
        raise broken("input_token_logprobs are not those of the prompt")
    values = [_logprob_of(row, token) for row, token in zip(rows, token_ids.tolist(), strict=True)]
    return np.array(checked_logprobs(values[1:], token_ids.size - 1), np.float32)


def read_top_scores(answer: Any, count: int, tokens: int, vocab_size: int) -> TopLogprobs:
    """The `count` likeliest tokens of each row of `read_scores`. Raises the errors of `read_chunk`."""
    tables = meta_info(answer).get("input_top_logprobs")
    if not isinstance(tables, list) or len(tables) != tokens:
        raise broken("input_top_logprobs are not those of the prompt")
    top = [read_table(table, vocab_size) for table in tables[1:]]
    if any(len(ids) < count for ids, _ in top):
        raise broken(f"fewer than {count} alternatives")
    return TopLogprobs(
        np.array([ids[:count] for ids, _ in top], np.int32), np.array([values[:count] for _, values in top], np.float32)
    )


def read_table(table: Any, vocab_size: int) -> tuple[list[int], list[float]]:
    """Alternatives to a token, most likely first: ids and logprobs. Raises the errors of `read_chunk`."""
    pairs = []
    for row in table if isinstance(table, list) else [None]:
        if not isinstance(row, list) or len(row) < 2 or type(row[0]) not in (int, float):
            raise broken("alternatives that are no logprobs of tokens")
        if type(row[1]) is not int or not 0 <= row[1] < vocab_size:
            raise broken("alternatives that name no tokens of the vocabulary")
        pairs.append((row[1], min(float(row[0]), 0.0)))
    pairs.sort(key=lambda pair: -pair[1])
    return [token for token, _ in pairs], [value for _, value in pairs]


def _finish(finish: Any, asked: Asked) -> tuple[str | None, int | str | None]:
    """Type and what matched; raises the error of a request that the server aborted."""
    if finish is None:
        return None, None
    kind = finish.get("type") if isinstance(finish, dict) else None
    if not isinstance(kind, str):
        raise broken("a finish_reason without a type")
    if kind == "abort" and finish.get("status_code") is not None:
        raise _given_up(finish, asked)
    matched = finish.get("matched")
    if kind == "stop" and matched == NOT_A_NUMBER and NOT_A_NUMBER not in asked.stops:
        raise not_finite()
    return kind, matched if type(matched) in (int, str) else None


def _given_up(finish: Mapping[str, Any], asked: Asked) -> PenstockError:
    message = finish.get("message")
    text = shown(message) if isinstance(message, str) else "is refused by the upstream"
    if finish["status_code"] == 400:
        return invalid([Violation(asked.field, text)], f"The upstream refuses the request: {text}")
    return Unavailable(f"The upstream gave the request up: {text}", reason="UPSTREAM_FAILED", retry_after_s=RETRY_S)


def _tokens(
    event: Any, meta: Mapping[str, Any], held: Sequence[int], total: int, vocab_size: int, asked: Asked
) -> tuple[list[int], list[float], list[tuple[list[int], list[float]]]]:
    """The new tokens, their logprobs and their alternatives."""
    new = _new_tokens(event.get("output_ids"), held, total, vocab_size)
    cut = slice(len(held), None)
    logprobs: list[float] = []
    if asked.logprobs and new:
        rows = _rows(meta, asked.logprobs, total, len(new), cut)
        logprobs = checked_logprobs([_logprob_of(row, token) for row, token in zip(rows, new, strict=True)], len(new))
    top: list[tuple[list[int], list[float]]] = []
    if asked.top_logprobs and new:
        tables = _rows(meta, "output_top_logprobs", total, len(new), cut)
        top = [read_table(table, vocab_size) for table in tables]
    return new, logprobs, top


def _new_tokens(ids: Any, held: Sequence[int], total: int, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise broken("output_ids is no list")
    if len(ids) == total:
        if ids[: len(held)] != held:
            raise broken("tokens that it had sent have changed")
        new = ids[len(held) :]
    elif len(held) + len(ids) == total:
        new = ids
    else:
        raise broken(f"{len(ids)} tokens after {len(held)}, where it counts {total}")
    for token in new:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise broken(f"token id {str(token)[:20]} is not in the vocabulary of {vocab_size}")
    return new


def _rows(meta: Mapping[str, Any], name: str, total: int, count: int, cut: slice) -> list[Any]:
    """The rows of the new tokens, out of all so far or of these alone."""
    rows = meta.get(name)
    if isinstance(rows, list) and len(rows) == total:
        rows = rows[cut]
    if not isinstance(rows, list) or len(rows) != count:
        raise broken(f"{name} that are not those of {count} tokens")
    return rows


def _logprob_of(row: Any, token: int) -> Any:
    """The logprob in `[logprob, token, text]`, or the logprob itself."""
    if not isinstance(row, list):
        return row
    if len(row) < 2 or row[1] != token:
        raise broken("its logprobs are of other tokens than its output_ids")
    return row[0]


def _count(meta: Mapping[str, Any], name: str, default: int | None) -> int:
    value = meta.get(name, default)
    if type(value) is not int or value < 0:
        raise broken(f"{name} is no count")
    return value


def _spans(spans: Any, total: int, kept: int) -> tuple[tuple[str, int, int], ...] | None:
    """The spans of the first `kept` of all tokens."""
    if spans is None:
        return None
    found: list[tuple[str, int, int]] = []
    end = 0
    if not isinstance(spans, list) or len(spans) > MAX_SPANS or not all(isinstance(span, dict) for span in spans):
        raise broken("weight_versions that are no spans")
    for span in spans:
        version, start, stop = span.get("version"), span.get("start"), span.get("end")
        if not isinstance(version, str) or start != end or type(stop) is not int or not end <= stop <= total:
            raise broken("weight_versions that are no spans of its tokens")
        end = stop
        if start < min(stop, kept):
            found.append((version, start, min(stop, kept)))
    if end != total:
        raise broken("weight_versions that do not cover its tokens")
    return tuple(found)
