"""Budgets of one rollout: what it may use, what it has used, and what that means for the next call (R35, R88).

Reaching a budget never cuts a call that was admitted: it refuses the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits; None is unlimited. Times in seconds."""

    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    max_tokens_per_call: int | None = None
    call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    wall_time_s: float | None = None
    max_tool_calls: int | None = None


@dataclass(slots=True)
class Spent:
    """What a rollout has used: calls admitted, tokens of calls delivered."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def exhausted(budgets: Budgets, spent: Spent, age_s: float) -> str:
    """The name of the budget that forbids another call; "" when none does."""
    if budgets.max_calls is not None and spent.calls >= budgets.max_calls:
        return "max_calls"
    if budgets.max_completion_tokens is not None and spent.completion_tokens >= budgets.max_completion_tokens:
        return "max_completion_tokens"
    total = spent.prompt_tokens + spent.completion_tokens
    if budgets.max_total_tokens is not None and total >= budgets.max_total_tokens:
        return "max_total_tokens"
    if budgets.wall_time_s is not None and age_s >= budgets.wall_time_s:
        return "wall_time"
    return ""


def allowed_tokens(budgets: Budgets, spent: Spent, asked: int | None) -> int | None:
    """Most tokens that a call may sample: what it asked for, bounded by the budgets; None is unbounded."""
    bounds = [asked, budgets.max_tokens_per_call]
    if budgets.max_completion_tokens is not None:
        bounds.append(max(1, budgets.max_completion_tokens - spent.completion_tokens))
    if budgets.max_total_tokens is not None:
        bounds.append(max(1, budgets.max_total_tokens - spent.prompt_tokens - spent.completion_tokens))
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None
