"""Budgets of a rollout and of a run: the limits, the usage, and what is left for the next call (R35, R88).

An exhausted budget never cuts an admitted call; it refuses the next one. Plain values; `gate.budgets` enforces them.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class CallRate:
    """A token bucket: it holds `burst` calls and is refilled evenly with `calls` per `period_s`."""

    calls: int
    period_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class RunBudgets:
    """Limits on all rollouts of a run together; None is unlimited. Times in seconds, sizes in bytes."""

    max_calls: int | None = None
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    max_request_bytes: int | None = None
    wall_time_s: float | None = None
    call_rate: CallRate | None = None


@dataclass(frozen=True, slots=True)
class Budgets(RunBudgets):
    """Limits on one rollout, in total and per call."""

    max_tokens_per_call: int | None = None
    max_request_bytes_per_call: int | None = None
    call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    max_tool_calls: int | None = None


@dataclass(slots=True)
class Spent:
    """Usage: calls and request bytes count when a call is admitted, tokens when it is delivered."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def take(self, other: Spent) -> None:
        """Subtracts usage that was added."""
        self.calls -= other.calls
        self.prompt_tokens -= other.prompt_tokens
        self.completion_tokens -= other.completion_tokens
        self.request_bytes -= other.request_bytes

    def add(self, other: Spent) -> None:
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.request_bytes += other.request_bytes


def exhausted(budgets: RunBudgets, spent: Spent, age_s: float, request_bytes: int) -> str:
    """Returns the name of the budget that forbids another call with a body of this size, or ""."""
    used = (
        ("max_calls", budgets.max_calls, spent.calls + 1),
        ("max_prompt_tokens", budgets.max_prompt_tokens, spent.prompt_tokens + 1),
        ("max_completion_tokens", budgets.max_completion_tokens, spent.completion_tokens + 1),
        ("max_total_tokens", budgets.max_total_tokens, spent.tokens + 1),
        ("max_request_bytes", budgets.max_request_bytes, spent.request_bytes + max(1, request_bytes)),
    )
    for name, most, wanted in used:
        if most is not None and wanted > most:
            return name
    if budgets.wall_time_s is not None and age_s >= budgets.wall_time_s:
        return "wall_time"
    return ""


def tokens_left(budgets: RunBudgets, spent: Spent) -> tuple[int | None, str]:
    """Returns how many tokens an admitted call may still sample (None is unlimited), and the budget that limits it."""
    left: int | None = None
    name = ""
    if budgets.max_completion_tokens is not None:
        left, name = max(1, budgets.max_completion_tokens - spent.completion_tokens), "max_completion_tokens"
    if budgets.max_total_tokens is not None:
        total = max(1, budgets.max_total_tokens - spent.tokens)
        if left is None or total < left:
            left, name = total, "max_total_tokens"
    return left, name
