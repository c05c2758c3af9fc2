"""A rollout's events on a terminal."""

import orjson
from rich.console import RenderableType
from rich.text import Text

from penstock.cli.terminal.console import clean, counted, quoted
from penstock.client import (
    AgentEvent,
    AgentExited,
    ArtifactCollected,
    AttemptFailed,
    Call,
    CallFinished,
    CommandFinished,
    Ended,
    PhaseChanged,
    Progress,
    RolloutEvent,
    RolloutPaused,
    RolloutResumed,
    UserTurn,
)

_MARKS = {"assistant": "", "reasoning": "thinks", "tool_call": "calls", "tool_result": "got", "error": "error"}


def event(item: RolloutEvent) -> RenderableType | None:
    """Returns a few lines for an event; None when it is not for people."""
    match item.payload:
        case PhaseChanged(phase):
            return Text(f"== {phase.value.replace('_', ' ')}", style="bold cyan")
        case Progress(message):
            return quoted(message, "dim", lines=2) if message.strip() else None
        case CommandFinished():
            return _command(item.payload)
        case AgentEvent():
            return _agent(item.payload)
        case CallFinished(call):
            return Text(f"   model call {_call(call)}{_replayed(item.payload)}", style="dim")
        case AgentExited(end):
            return Text(clean(f"   agent: {end}, {end.duration:.1f} s"), style="dim")
        case AttemptFailed(attempt, failure):
            line = f"attempt {attempt} failed: {failure.reason} ({failure.caused_by or failure.cause}); it is retried"
            return Text(clean(line), style="yellow")
        case RolloutPaused(reason, most):
            until = "" if most is None else f", for at most {most:.0f} s"
            return Text(clean(f"paused{until}{reason and f': {reason}'}"), style="yellow")
        case RolloutResumed(took, why):
            return Text(clean(f"goes on after a pause of {took or 0.0:.1f} s ({why})"), style="yellow")
        case UserTurn(instruction=instruction, end_reason=why):
            if why:
                return Text(clean(f"   the user has no further instruction ({why})"), style="dim")
            return Text.assemble(("user: ", "bold"), quoted(instruction))
        case ArtifactCollected(name, _, truncated, size):
            return Text(clean(f"   artifact {name}: {size} bytes{' (cut)' if truncated else ''}"), style="dim")
        case Ended():
            return None


def _command(finished: CommandFinished) -> RenderableType:
    first, _, rest = finished.command.strip("\n").partition("\n")
    more = f" ... and {counted(rest.count(chr(10)) + 1, 'line')}" if rest else ""
    line = Text.assemble(
        ("$ ", "bold"),
        quoted(first, lines=1),
        (clean(f"{more}  [{finished.exit}, {finished.exit.duration:.1f} s]"), "dim"),
    )
    if finished.exit.ok:
        return line
    tail = (finished.stdout_tail + finished.stderr_tail).decode("utf-8", errors="replace")
    return Text.assemble(line, "\n", quoted(tail, "red"))


def _agent(event: AgentEvent) -> RenderableType | None:
    if event.kind not in _MARKS:
        return None
    data = event.data
    body = data.get("text") or data.get("message")
    if body is None:
        name = str(data.get("name", ""))
        content = data.get("arguments", data.get("output", ""))
        text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
        body = f"{name} {text}".strip()
    if not str(body).strip():
        return None  # a model may write nothing beside its tool call
    style = {"reasoning": "dim italic", "tool_call": "yellow", "tool_result": "dim", "error": "red"}.get(event.kind, "")
    mark = _MARKS[event.kind]
    return Text.assemble((f"{mark}: ", f"bold {style}") if mark else "", quoted(str(body), style))


def _call(call: Call) -> str:
    return f"{call.index} ({call.call_class}): {call.prompt_count} + {call.sampled_count} tokens, {call.state}"


def _replayed(finished: CallFinished) -> str:
    """How far a replay has come, behind a call that was not sampled."""
    call = finished.call
    if call.replayed_from is None and not call.given:
        return ""
    so_far = f" ({finished.replayed_count} of {finished.recorded_count})" if finished.recorded_count else ""
    return f", {'given' if call.given else 'replayed'}{so_far}"
