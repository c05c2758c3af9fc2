"""Parses a completion: untrusted JSON to token ids and logprobs, each of them checked and none made up.

An answer that breaks a rule is refused as a whole: one wrong token makes the rest untrustworthy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_chassis.errors import FailedPrecondition, Internal
from penstock_inference.domain.generation import Logprobs, TokenIds, TopLogprobs

_PREFIX = "token_id:"
LEAST_LOGPROB = -9999.0
"""What servers write for minus infinity, which JSON lacks and no sampled token has."""


@dataclass(frozen=True, slots=True)
class Read:
    """One choice, or one event of its stream: tokens and their data."""

    token_ids: list[int]
    logprobs: list[float]
    """One per token, or none at all."""
    top: list[tuple[list[int], list[float]]]
    """Alternatives of each token, most likely first; empty if the endpoint sent none."""
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: Sequence[int] | None


def read_choice(choice: Mapping[str, Any], vocab_size: int) -> Read:
    """Raises FailedPrecondition (UPSTREAM_ANSWER_INVALID), Internal (LOGITS_NOT_FINITE)."""
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    written = logprobs.get("tokens") or []
    if not isinstance(written, list):
        raise broken("its logprobs have no list of tokens")
    ids = choice.get("token_ids")
    if ids is None:
        ids = [token_id(token) for token in written]
        if None in ids:
            ids = []
    if not isinstance(ids, list):
        raise broken("token_ids is no list")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise broken(f"token id {str(token)[:20]} is not in the vocabulary of {vocab_size}")
    if written and any(token_id(token) not in (None, known) for token, known in zip(written, ids, strict=False)):
        raise broken("its logprobs are of other tokens than its token_ids")
    prompt = choice.get("prompt_token_ids")
    finish, stop = choice.get("finish_reason"), choice.get("stop_reason")
    return Read(
        token_ids=ids,
        logprobs=checked_logprobs(logprobs.get("token_logprobs") or [], len(ids)),
        top=_alternatives(logprobs.get("top_logprobs") or [], len(ids), vocab_size),
        finish_reason=finish if isinstance(finish, str) else None,
        stop_reason=stop if isinstance(stop, int | str) else None,
        prompt_token_ids=prompt if isinstance(prompt, list) else None,
    )


def read_scores(answer: Any, token_ids: TokenIds) -> Logprobs:
    """Logprobs of all tokens of a prompt except the first. Raises the errors of `read_choice`."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        values = [row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:].tolist(), strict=True)]
    except (KeyError, IndexError, TypeError, ValueError):
        raise broken("prompt_logprobs are not those of the prompt") from None
    return np.array(checked_logprobs(values, token_ids.size - 1), np.float32)


def read_top_scores(answer: Any, count: int, vocab_size: int) -> TopLogprobs:
    """The `count` likeliest tokens of each row of `read_scores`, which has checked the answer's shape.

    A row has them, and the prompt's own token where it is less likely. Raises the errors of `read_choice`.
    """
    top = []
    for row in answer["choices"][0]["prompt_logprobs"][1:]:
        pairs = [(name, item.get("logprob") if isinstance(item, dict) else None) for name, item in row.items()]
        top.append(_table({f"{_PREFIX}{name}": value for name, value in pairs}, vocab_size))
    if any(len(ids) < count for ids, _ in top):
        raise broken(f"fewer than {count} alternatives")
    return TopLogprobs(
        np.array([ids[:count] for ids, _ in top], np.int32), np.array([values[:count] for _, values in top], np.float32)
    )


def token_id(text: object) -> int | None:
    """The id in `token_id:17`."""
    if not isinstance(text, str) or not text.startswith(_PREFIX):
        return None
    digits = text.removeprefix(_PREFIX)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def checked_logprobs(values: Any, count: int) -> list[float]:
    """The logprobs of `count` sampled tokens; empty if there are none. Raises the errors of `read_choice`."""
    if not values or not count:
        return []
    if not isinstance(values, list):
        raise broken("its logprobs are not a list")
    if len(values) != count:
        raise broken(f"{len(values)} logprobs for {count} tokens")
    if not all(type(value) in (int, float) and math.isfinite(value) and value > LEAST_LOGPROB for value in values):
        raise not_finite()
    if max(values) > 1e-3:
        raise broken(f"a logprob of {max(values):.3g}, which is above 0")
    # A logarithm of 1 may be a rounding error above 0.
    return [min(float(value), 0.0) for value in values]


def _alternatives(tables: Any, count: int, vocab_size: int) -> list[tuple[list[int], list[float]]]:
    if not tables or not count:
        return []
    if not isinstance(tables, list) or len(tables) != count or not all(isinstance(item, dict) for item in tables):
        raise broken(f"alternatives that are not a table for each of {count} tokens")
    return [_table(item, vocab_size) for item in tables]


def _table(item: Mapping[str, Any], vocab_size: int) -> tuple[list[int], list[float]]:
    known = [(token_id(name), value) for name, value in item.items()]
    pairs = [(token, float(value)) for token, value in known if token is not None and type(value) in (int, float)]
    if len(pairs) != len(known) or any(token >= vocab_size for token, _ in pairs):
        raise broken("alternatives that name no tokens of the vocabulary")
    pairs.sort(key=lambda pair: -pair[1])
    return [token for token, _ in pairs], [min(value, 0.0) for _, value in pairs]


def not_finite() -> Internal:
    """The error for a sampled token without a finite logprob."""
    return Internal(
        "a sampled token has no finite logprob at the upstream: its weights have diverged, or it does not sample"
        " from what it reports",
        reason="LOGITS_NOT_FINITE",
    )


def broken(text: str) -> FailedPrecondition:
    """The error for an answer that breaks a rule."""
    return FailedPrecondition(f"The upstream's answer is invalid: {text}.", reason="UPSTREAM_ANSWER_INVALID")
