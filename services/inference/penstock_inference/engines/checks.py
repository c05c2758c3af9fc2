"""The checks of every engine before it starts: values out of range, each named."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from penstock_chassis.errors import Aborted, FailedPrecondition, Unavailable, Violation
from penstock_chassis.validation import invalid
from penstock_inference.domain.generation import Sampling, TokenIds

T = TypeVar("T")

MAX_TEMPERATURE = 5.0
MAX_TOP_LOGPROBS = 20
_TOP_RANGE = f"must be in [0, {MAX_TOP_LOGPROBS}]"
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_SEED = 2**63 - 1


def check_sampling(sampling: Sampling, vocab_size: int) -> list[Violation]:
    """The violations of every field out of its range."""
    s = sampling
    rules = (
        ("max_tokens", s.max_tokens >= 1, "must be at least 1"),
        ("temperature", 0 <= s.temperature <= MAX_TEMPERATURE, f"must be in [0, {MAX_TEMPERATURE}]"),
        ("top_p", 0 < s.top_p <= 1, "must be in (0, 1]"),
        ("top_k", s.top_k >= 0, "must be at least 0 (0 is off)"),
        ("min_p", 0 <= s.min_p <= 1, "must be in [0, 1]"),
        ("min_tokens", 0 <= s.min_tokens <= s.max_tokens, "must be in [0, max_tokens]"),
        ("stop_token_ids", all(0 <= t < vocab_size for t in s.stop_token_ids), f"must be in [0, {vocab_size})"),
        ("stop", len(s.stop) <= MAX_STOPS, f"must be at most {MAX_STOPS} texts"),
        ("stop", all(0 < len(t) <= MAX_STOP_LENGTH for t in s.stop), f"must be of 1 to {MAX_STOP_LENGTH} characters"),
        ("seed", s.seed is None or 0 <= s.seed <= MAX_SEED, "must be in [0, 2**63)"),
        ("repetition_penalty", math.isfinite(s.repetition_penalty) and s.repetition_penalty > 0, "must be above 0"),
        ("presence_penalty", math.isfinite(s.presence_penalty), "must be finite"),
        ("frequency_penalty", math.isfinite(s.frequency_penalty), "must be finite"),
        ("top_logprobs", 0 <= s.top_logprobs <= MAX_TOP_LOGPROBS, _TOP_RANGE),
    )
    return [Violation(f"sampling.{name}", text) for name, holds, text in rules if not holds]


def check_score(
    ids: TokenIds, top_logprobs: int, vocab_size: int, max_context: int, *, sampled: int = 0
) -> list[Violation]:
    """The violations of tokens to score, where the engine must sample `sampled` tokens to score a prompt."""
    violations = [
        Violation("token_ids" + v.field.removeprefix("prompt_token_ids"), v.description)
        for v in check_prompt(ids, sampled, vocab_size, max_context)
    ]
    if ids.size < 2:
        violations.append(Violation("token_ids", "must have at least two tokens: the first has no logprob"))
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        violations.append(Violation("top_logprobs", _TOP_RANGE))
    return violations


def raise_violations(violations: list[Violation]) -> None:
    """Raises InvalidArgument when there are any."""
    if violations:
        raise invalid(violations)


def check_update(version: int, in_force: int, *, another_open: bool) -> None:
    """Raises Aborted (UPDATE_IN_PROGRESS), or FailedPrecondition (POLICY_VERSION_NOT_NEWER)."""
    if another_open:
        raise Aborted("another update is open", reason="UPDATE_IN_PROGRESS", retry_after_s=1.0)
    if version <= in_force:
        raise FailedPrecondition(
            f"policy version {version} is not newer than {in_force}, which is in force",
            reason="POLICY_VERSION_NOT_NEWER",
            metadata={"policy_version": str(in_force)},
        )


def open_update(update: T | None) -> T:
    """Returns the open update. Raises FailedPrecondition (NO_UPDATE_OPEN) for None."""
    if update is None:
        raise FailedPrecondition("no update is open", reason="NO_UPDATE_OPEN")
    return update


def closed() -> Unavailable:
    """The error of a call to an engine that was closed."""
    return Unavailable("the engine is closed", reason="ENGINE_CLOSED")


def check_prompt(ids: TokenIds, max_tokens: int, vocab_size: int, max_context: int) -> list[Violation]:
    """The violations of a prompt that, with `max_tokens` to sample, does not fit the model."""
    if ids.ndim != 1 or ids.size == 0:
        return [Violation("prompt_token_ids", "must have at least one token")]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        where = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        return [Violation(f"prompt_token_ids[{where}]", f"{ids[where]} is not in [0, {vocab_size})")]
    if ids.size + max_tokens > max_context:
        return [
            Violation(
                "sampling.max_tokens" if ids.size < max_context else "prompt_token_ids",
                f"{ids.size} prompt tokens and {max_tokens} to sample exceed the context of {max_context}",
            )
        ]
    return []
