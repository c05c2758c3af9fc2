"""The `--json` form of rollouts: plain values in one shape, shared by all commands (docs/cli.md)."""

from datetime import datetime
from typing import Any

from penstock.analysis.readable_calls import news
from penstock.analysis.recordings import Recording, Turn
from penstock.cli.views.turns import answer_text
from penstock.client import RolloutEvent
from penstock.client.types.results import RolloutSummary


def event_shape(item: RolloutEvent) -> dict[str, Any]:
    """Converts an event; `data` has the fields of its class in `penstock.client.types.results`."""
    return {
        "rollout_id": item.rollout_id,
        "sequence": item.sequence,
        "time": moment(item.time),
        "event": type(item.payload).__name__,
        "data": item.payload,
    }


def moment(time: datetime | None) -> str | None:
    """Formats a time in UTC as ISO 8601."""
    return None if time is None else time.isoformat()


def summary_shape(item: RolloutSummary) -> dict[str, Any]:
    """Converts a rollout's summary, for `watch`; `reward` null = not graded, or not yet."""
    return {
        "rollout_id": item.rollout_id,
        "namespace": item.namespace,
        "group_id": item.group_id,
        "index": item.index,
        "run_id": item.run_id,
        "task_id": item.task_id,
        "agent": item.agent,
        "labels": item.labels,
        "phase": item.phase,
        "paused": item.paused,
        "attempts": item.attempts,
        "home": item.home,
        "create_time": moment(item.create_time),
        "end_time": moment(item.end_time),
        "failure": item.failure,
        "reward": item.reward,
        "calls": item.calls,
        "prompt_tokens": item.prompt_tokens,
        "sampled_tokens": item.completion_tokens,
        "min_version": item.min_version,
        "max_version": item.max_version,
    }


def recording_shape(recording: Recording) -> dict[str, Any]:
    """Converts a recorded rollout without its events and calls; unknown values are null."""
    reason, cause, party = recording.failure or (None, None, None)
    rollout = recording.rollout
    return {
        "rollout_id": recording.rollout_id,
        "origin": recording.origin,
        "group_id": recording.group_id,
        "group_index": recording.group_index,
        "run_id": recording.run_id,
        "task_id": recording.task_id,
        "agent": recording.agent,
        "labels": recording.labels,
        "phase": None if rollout is None else rollout.phase,
        "create_time": None if rollout is None else moment(rollout.create_time),
        "end_time": None if rollout is None else moment(rollout.end_time),
        "phase_seconds": None if rollout is None else rollout.phase_times,
        "home": None if rollout is None else rollout.home,
        "failure": None if reason is None else {"reason": reason, "cause": cause, "caused_by": party or None},
        "reward": recording.reward,
        "grade": recording.grade or None,
        "findings": recording.findings,
        "branches": recording.branches,
        "outcome": recording.outcome,
    }


def turn_shape(recording: Recording, turn: Turn, *, tokens: bool) -> dict[str, Any]:
    """Converts a model call; with `tokens` also the sampled ids and their logprobs."""
    parent = next((item for item in recording.turns if item.call_id == turn.parent_call_id), None)
    same, fresh = news(turn.body, None if parent is None else parent.body)
    shape: dict[str, Any] = {
        "index": turn.index,
        "call_id": turn.call_id,
        "parent_call_id": turn.parent_call_id,
        "branch_id": turn.branch_id,
        "class": turn.role,
        "state": turn.state,
        "answerer": turn.answerer,
        "prompt_tokens": None if turn.prompt is None else len(turn.prompt),
        "sampled_tokens": None if turn.sampled is None else len(turn.sampled),
        "policy_id": turn.policy_id or None,
        "versions": turn.versions,
        "seconds": turn.seconds,
        "finish_reason": turn.finish_reason or None,
        "end_reason": turn.end_reason or None,
        "untrained_reason": turn.untrained or None,
        "injected": turn.injected,
        "same_as_before": same,
        "new_in_prompt": fresh,
        "answer": answer_text(recording, turn),
    }
    if tokens:
        shape["token_ids"] = turn.sampled
        shape["logprobs"] = turn.logprobs
    return shape
