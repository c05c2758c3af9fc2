"""The gate's metrics; docs/guides/operate.md lists them. Imports nothing of the service."""

from __future__ import annotations

from typing import Final

from penstock_chassis.telemetry.metrics import counter, gauge, histogram

CALLS: Final = counter("penstock_gate_calls_total", "Model calls that ended, by class", "class", "dialect", "state")
OPEN_CALLS: Final = gauge("penstock_gate_open_calls", "Model calls that have not ended", "state")
HELD_CALLS: Final = gauge("penstock_gate_paused_calls", "Open calls whose rollout a trainer has paused")
OLDEST_CALL: Final = gauge("penstock_gate_oldest_open_call_seconds", "Age of the oldest open call; 0 without one")
QUEUE_WAIT: Final = histogram(
    "penstock_gate_queue_wait_seconds", "From an agent's request to the first lease or dispatch of its call"
)
ANSWER: Final = histogram(
    "penstock_gate_answer_seconds", "From the last lease or dispatch of a call to its answer on disk", "by"
)
REDELIVERIES: Final = counter("penstock_gate_redeliveries_total", "Calls leased or dispatched again")
REJECTED: Final = counter("penstock_gate_rejected_results_total", "Results of trainers that were rejected", "reason")
TOKENS: Final = counter("penstock_gate_tokens_total", "Tokens of delivered calls", "kind")
BUDGET_STOPS: Final = counter("penstock_gate_budget_stops_total", "Rollouts that a used-up budget stopped", "budget")
ROLLOUTS: Final = gauge("penstock_gate_rollouts", "Rollouts that are not closed", "mode")
KEPT_CAPTURES: Final = gauge(
    "penstock_gate_kept_captures", "Captures of closed rollouts that their driver has yet to export"
)
KEPT_CAPTURE_BYTES: Final = gauge(
    "penstock_gate_kept_capture_bytes", "Bytes of those captures in the gate's journal, about"
)
DISCARDED_CAPTURES: Final = counter(
    "penstock_gate_discarded_captures_total",
    "Captures that were deleted before their driver had exported them, by the limit that they were beyond",
    "limit",
)
SESSIONS: Final = gauge("penstock_gate_sessions", "Trainers' sessions", "state")
CREDITS: Final = gauge("penstock_gate_credit_calls", "Calls that the connected sessions may hold at once")
CREDITS_USED: Final = gauge("penstock_gate_credit_used_calls", "Calls that the connected sessions hold")
NEEDED_POLICY: Final = gauge(
    "penstock_gate_needed_policy_version", "Lowest policy version that every open call accepts"
)
NEWEST_POLICY: Final = gauge(
    "penstock_gate_newest_policy_version", "Newest policy version that a trainer has announced"
)
ENGINE_RUNNING: Final = gauge(
    "penstock_gate_engine_running_requests",
    "Requests that an engine of a list answers, of all callers",
    "pool",
    "engine",
)
ENGINE_WAITING: Final = gauge(
    "penstock_gate_engine_waiting_requests", "Requests that wait at an engine of a list", "pool", "engine"
)
ENGINE_POLICY: Final = gauge(
    "penstock_gate_engine_policy_version", "Policy version of an engine of a list", "pool", "engine"
)
ENGINE_MOVES: Final = counter(
    "penstock_gate_engine_moves_total", "Calls that left an engine of a list for another one", "why"
)
