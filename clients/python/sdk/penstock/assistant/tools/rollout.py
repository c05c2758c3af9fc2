"""One rollout: in short, its events, its grades."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.assistant.answers import Answer, Quote
from penstock.assistant.context import Context
from penstock.assistant.errors import ToolError
from penstock.assistant.redaction import Redactor
from penstock.assistant.tools.base import MAX_LABELS, Arguments, Limit, RolloutId, Tool
from penstock.client import (
    AgentEvent,
    AgentExited,
    ArtifactCollected,
    AttemptFailed,
    CallFinished,
    CommandFinished,
    Ended,
    Exit,
    Failure,
    Grading,
    PhaseChanged,
    Progress,
    Reward,
    RolloutEvent,
    RolloutPaused,
    RolloutResumed,
    UserTurn,
)

_COMPONENTS: Final = 50
_COMMAND: Final = 500
_LINE: Final = 2000
"""Characters of a command and of an agent's line among the events."""
_AGENT: Final = "the agent"
_VERIFIER: Final = "the verifier"


class _Rollout(Arguments):
    rollout_id: RolloutId


class _Events(Arguments):
    rollout_id: RolloutId
    after: Annotated[
        int, Field(ge=0, le=1 << 53, description="Only with a greater sequence: `next_after` leads on.")
    ] = 0
    limit: Limit = 20


async def _one(context: Context, given: _Rollout) -> Answer:
    recording = await context.recording(given.rollout_id)
    rollout, outcome = recording.rollout, recording.outcome
    facts: dict[str, Any] = {
        "rollout_id": recording.rollout_id,
        "group_id": recording.group_id,
        "index": recording.group_index,
        "run_id": recording.run_id,
        "task_id": recording.task_id,
        "agent": recording.agent,
        "labels": dict(list(recording.labels.items())[:MAX_LABELS]),
        "calls": len(recording.turns),
        "prompt_tokens": sum(len(turn.prompt) for turn in recording.turns if turn.prompt is not None),
        "sampled_tokens": sum(len(turn.sampled) for turn in recording.turns if turn.sampled is not None),
        "branches": len(recording.branches),
        "capture": recording.grade or None,
        "findings": [{"severity": one.severity, "reason": one.reason} for one in recording.findings[:20]],
    }
    quotes: list[Quote] = []
    if rollout is not None:
        facts |= {
            "phase": rollout.phase,
            "created": rollout.create_time,
            "ended": rollout.end_time,
            "seconds_in_phases": {str(phase): round(value, 3) for phase, value in rollout.phase_times.items()},
            "attempts": rollout.attempts,
            "paused": rollout.pause is not None,
            "last_event": rollout.last_sequence,
        }
        if rollout.branched_from is not None:
            point = rollout.branched_from
            facts["branched_from"] = {"rollout_id": point.parent_rollout_id, "call": point.call_index}
    if outcome is not None:
        facts["completed"] = outcome.completed
        facts["reward"] = _value(outcome.reward)
        quotes += _failure(outcome.failure, facts)
        if outcome.agent_exit is not None:
            facts["agent_exit"] = _exit(outcome.agent_exit)
        if outcome.agent_stderr:
            quotes.append(Quote(_AGENT, "the end of its standard error", _text(outcome.agent_stderr)))
        if outcome.grading is not None:
            facts["verifier"] = {"passed": outcome.grading.passed, "commands": outcome.grading.total}
    facts["next"] = (
        "`calls` lists its model calls, `grading` has the verifier's output, `events` its phases and what the agent did"
    )
    return Answer(facts, quotes)


async def _events(context: Context, given: _Events) -> Answer:
    recording = await context.recording(given.rollout_id)
    rest = [event for event in recording.events if event.sequence > given.after]
    shown = rest[: given.limit]
    rows, lines = list[Mapping[str, Any]](), list[str]()
    for event, (facts, text) in zip(shown, await asyncio.to_thread(_read, shown, context.redact), strict=True):
        rows.append({"sequence": event.sequence, "time": event.time, "event": type(event.payload).__name__, **facts})
        if text:
            lines.append(f"[{event.sequence}] {text}")
    facts = {
        "rollout_id": recording.rollout_id,
        "total": len(recording.events),
        "events": rows,
        "next_after": shown[-1].sequence if len(rest) > len(shown) else None,
    }
    what = "what the events carry, each after the sequence of its event"
    return Answer(facts, [Quote("the agent, its task and its verifier", what, "\n".join(lines))])


async def _grading(context: Context, given: _Rollout) -> Answer:
    async with context.connected() as ps:
        rollout = await ps.rollouts.get(given.rollout_id)
    outcome = rollout.outcome
    if outcome is None:
        raise ToolError(
            f"rollout {given.rollout_id} runs (phase {rollout.phase}), and has no grade yet",
            reason="ROLLOUT_RUNNING",
            advice="look at it with `rollout` and `events`, and repeat the call once it has ended",
        )
    facts: dict[str, Any] = {"rollout_id": rollout.rollout_id, "reward": _value(outcome.reward)}
    quotes = _failure(outcome.failure, facts)
    quotes += _components("", outcome.reward)
    quotes += _graded("first", outcome.grading, facts)
    further = []
    for grade in rollout.grades[:20]:
        made: dict[str, Any] = {"name": grade.name, "time": grade.time, "reward": _value(grade.reward)}
        quotes += _failure(grade.failure, made)
        quotes += _components(grade.name, grade.reward)
        quotes += _graded(grade.name, grade.grading, made)
        further.append(made)
    facts["further_grades"] = further
    return Answer(facts, quotes)


def _graded(name: str, grading: Grading | None, facts: dict[str, Any]) -> list[Quote]:
    if grading is None:
        return []
    facts["grading"] = {
        "in_a_fresh_fork": grading.fresh_fork,
        "passed": grading.passed,
        "commands": grading.total,
        "restored_paths": grading.restored,
        "exits": [_exit(command.exit) for command in grading.commands[:20]],
    }
    found = []
    for number, command in enumerate(grading.commands[:20]):
        text = "\n".join(filter(None, (_text(command.stdout_tail).rstrip(), _text(command.stderr_tail).rstrip())))
        found.append(Quote(_VERIFIER, f"grade {name}: the end of the output of command {number}", text))
    if grading.changes is not None and grading.changes.left_out_paths:
        paths = "\n".join(grading.changes.left_out_paths)
        found.append(Quote(_AGENT, f"grade {name}: paths of its changes that were left out", paths))
    return found


def _components(name: str, reward: Reward | None) -> list[Quote]:
    if reward is None or not reward.components:
        return []
    parts = list(reward.components.items())[:_COMPONENTS]
    what = f"grade {name or 'first'}: the parts of the reward"
    return [Quote(_VERIFIER, what, "\n".join(f"{part}: {value:g}" for part, value in parts))]


def _failure(failure: Failure | None, facts: dict[str, Any]) -> list[Quote]:
    if failure is None:
        return []
    facts["failure"] = {
        "reason": failure.reason,
        "cause": failure.cause,
        "caused_by": failure.caused_by,
        "phase": failure.phase,
        "retriable": failure.retriable,
    }
    return [Quote("Penstock, with parts of what failed", f"the message of {failure.reason}", failure.message)]


def _read(events: Sequence[RolloutEvent], redact: Redactor) -> list[tuple[dict[str, Any], str]]:
    return [_event(event, redact) for event in events]


def _event(event: RolloutEvent, redact: Redactor) -> tuple[dict[str, Any], str]:
    """An event's facts, and the text that it carries; what is cut of it has no secrets."""
    payload = event.payload
    match payload:
        case PhaseChanged():
            return {"phase": payload.phase}, ""
        case CommandFinished():
            output = "\n".join(filter(None, (_text(payload.stdout_tail).strip(), _text(payload.stderr_tail).strip())))
            facts = {"phase": payload.phase, "index": payload.index, "exit": _exit(payload.exit)}
            return facts, f"$ {redact(payload.command, most=_COMMAND)}\n{output}".rstrip()
        case AgentEvent():
            return {"kind": payload.kind}, redact(_text(payload.raw_line), most=_LINE)
        case AgentExited():
            return {"exit": _exit(payload.exit)}, _text(payload.stderr_tail)
        case AttemptFailed():
            return {"attempt": payload.attempt, "reason": payload.failure.reason}, payload.failure.message
        case CallFinished():
            call = payload.call
            return {"call": call.index, "state": call.state, "sampled_tokens": call.sampled_count}, ""
        case ArtifactCollected():
            return {"bytes": payload.size_bytes, "truncated": payload.truncated}, payload.name
        case Progress():
            return {}, payload.message
        case RolloutPaused() | RolloutResumed():
            return {}, payload.reason
        case UserTurn():
            return {"end": payload.end_reason}, payload.instruction
        case Ended():
            failure = payload.outcome.failure
            return {"reward": _value(payload.outcome.reward), "failure": failure and failure.reason}, ""


def _value(reward: Reward | None) -> dict[str, float] | None:
    return None if reward is None else {"value": reward.value, "min": reward.range_min, "max": reward.range_max}


def _exit(ended: Exit) -> dict[str, Any]:
    return {
        "reason": ended.reason,
        "code": ended.code,
        "signal": ended.signal,
        "seconds": round(ended.duration, 3),
    }


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")


ROLLOUT: Final = (
    Tool(
        "rollout",
        "One rollout in short: how it ended and why, reward, time in phases, calls and tokens, findings.",
        _Rollout,
        _one,
    ),
    Tool(
        "events",
        "What happened in a rollout, in order: phases, commands with output, what the agent reported, its end.",
        _Events,
        _events,
    ),
    Tool(
        "grading",
        "Why a rollout has its reward: exit codes and output of the verifier's commands, parts of the reward, further"
        " grades.",
        _Rollout,
        _grading,
    ),
)
