"""A recorded rollout as steps to page through: overview, phase by phase, call by call, and its end."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.agents.replay_check import cause_in_finding
from penstock.analysis.recordings import Recording, Turn
from penstock.cli.terminal.console import clean, columns, counted, quoted
from penstock.cli.views import events as show
from penstock.cli.views import outcomes, turns
from penstock.client import (
    AgentEvent,
    ArtifactCollected,
    CallFinished,
    CommandFinished,
    Ended,
    PhaseChanged,
    RolloutEvent,
)
from penstock.client.types.results import Home
from penstock.client.types.trajectories import Finding

Draw = Callable[[bool], Iterable[RenderableType]]
"""Renders a step; the argument is whether tokens are drawn one by one."""

_RUNS: Final = (
    "it runs, and its model calls are shown here once it has ended: until then `penstock watch` and the dashboard"
    " follow it"
)
_OUTPUT_LINES: Final = 200
_DIFFS: Final = (".diff", ".patch")
_PATCH: Final = (("+++", "bold"), ("---", "bold"), ("diff ", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


@dataclass(frozen=True, slots=True)
class Step:
    title: str
    draw: Draw


@dataclass(slots=True)
class _Open:
    """A step while its events are collected."""

    title: str
    turn: Turn | None = None
    events: list[RolloutEvent] = field(default_factory=list)


def steps(recording: Recording) -> list[Step]:
    """Returns all steps in chronological order. The first is the overview, the last the end."""
    return [
        Step("overview", lambda _: _overview(recording)),
        *(Step(part.title, partial(_drawn, recording, part)) for part in _parts(recording)),
        Step("end", lambda _: _end(recording)),
    ]


def _parts(recording: Recording) -> list[_Open]:
    by_id = {turn.call_id: turn for turn in recording.turns}
    parts: list[_Open] = []
    for event in recording.events:
        payload = event.payload
        if isinstance(payload, PhaseChanged):
            parts.append(_Open(payload.phase.value.replace("_", " ")))
        elif isinstance(payload, CallFinished) and (turn := by_id.pop(payload.call.call_id, None)) is not None:
            parts.append(_Open(turns.title(turn), turn))
        elif not isinstance(payload, Ended):
            if not parts:
                parts.append(_Open("before the first phase"))
            parts[-1].events.append(event)
    parts += [_Open(turns.title(turn), turn) for turn in by_id.values()]  # without events, or reported by none
    return [part for part in parts if part.turn is not None or part.events]


def _drawn(recording: Recording, part: _Open, tokens: bool) -> Iterator[RenderableType]:
    if part.turn is not None:
        yield from turns.draw(recording, part.turn, tokens=tokens)
        if any(isinstance(event.payload, AgentEvent) for event in part.events):
            yield Text()
            yield Text("then the agent", style="bold")
    for event in part.events:
        payload = event.payload
        drawn = _command(payload) if isinstance(payload, CommandFinished) else show.event(event)
        if drawn is not None:
            yield drawn


def _command(finished: CommandFinished) -> RenderableType:
    style = "green" if finished.exit.ok else "red"
    head = Text.assemble(
        ("$ ", "bold"),
        quoted(finished.command, lines=20),
        (clean(f"  [{finished.exit}, {finished.exit.duration:.1f} s]"), style),
    )
    return _with_output(head, finished.stdout_tail, finished.stderr_tail)


def _with_output(head: Text, stdout: bytes, stderr: bytes) -> Text:
    for output, style in ((stdout, ""), (stderr, "yellow")):
        text = output.decode("utf-8", errors="replace").strip("\n")
        if text:
            head = Text.assemble(head, "\n", quoted(text, style, lines=_OUTPUT_LINES, width=4000))
    return head


def _patch(text: str) -> Text:
    """Renders a unified diff with the usual colours."""
    drawn = quoted(text, lines=_OUTPUT_LINES, width=4000)
    for line in (lines := drawn.split("\n", allow_blank=True)):
        line.stylize(next((style for mark, style in _PATCH if line.plain.startswith(mark)), ""))
    return Text("\n").join(lines)


def _overview(recording: Recording) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2))
    rollout = recording.rollout
    rows = {
        "rollout": recording.rollout_id,
        "from": recording.origin,
        "task": recording.task_id,
        "agent": recording.agent,
        "run": recording.run_id or "",
        "group": ""
        if recording.group_id is None
        else f"{recording.group_id}, place {recording.group_index}"
        if recording.group_index is not None
        else recording.group_id,
        "labels": ", ".join(f"{name}={value}" for name, value in recording.labels.items()),
        "began": ""
        if rollout is None or rollout.create_time is None
        else f"{rollout.create_time:%Y-%m-%d %H:%M:%S} UTC",
        "attempts": "" if rollout is None or rollout.attempts == 1 else str(rollout.attempts),
        "home": "" if rollout is None or rollout.home is None else _home(rollout.home),
        "calls": str(len(recording.turns)) if recording.turns else "",
        "versions": ", ".join(dict.fromkeys(filter(None, map(turns.versions, recording.turns)))),
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="dim"), Text(clean(value)))
    yield table
    yield Text()
    yield outcomes.ended(recording)
    if rollout is not None and rollout.phase_times:
        yield Text()
        yield outcomes.phases(rollout.phase_times)
    if not recording.events:
        yield Text("\nthe file has model calls only, without phases, commands and agent events", style="dim")
    elif not recording.turns:
        why = _RUNS if recording.outcome is None else "no model calls: none were made or captured"
        yield Text(f"\n{why}", style="dim")


def _home(home: Home) -> str:
    names = {"driver": home.driver, "gate": home.gate, "sandbox service": home.sandbox_service}
    names["sandbox"] = home.sandbox_id
    return ", ".join(f"{what} {name}" for what, name in names.items() if name)


def _end(recording: Recording) -> Iterator[RenderableType]:
    yield outcomes.ended(recording)
    outcome = recording.outcome
    if outcome is not None and outcome.failure is not None and outcome.agent_stderr:
        yield Text("\nthe agent's standard error ends with", style="bold")
        yield quoted(outcome.agent_stderr.decode("utf-8", errors="replace"), "red", lines=_OUTPUT_LINES)
    if outcome is not None and outcome.grading is not None:
        grading = outcome.grading
        where = "in a fresh fork" if grading.fresh_fork else "in the agent's sandbox"
        restored = f", {counted(grading.restored, 'path')} restored" if grading.restored else ""
        yield Text(
            f"\ngraded {where}: {grading.passed} of {counted(grading.total, 'command')} passed{restored}", "bold"
        )
        for number, command in enumerate(grading.commands):
            style = "green" if command.exit.ok else "red"
            yield _with_output(
                Text(clean(f"  {number}: {command.exit}"), style), command.stdout_tail, command.stderr_tail
            )
        if grading.changes is not None:
            yield from outcomes.changes(grading.changes)
    artifacts = [event.payload for event in recording.events if isinstance(event.payload, ArtifactCollected)]
    if artifacts:
        yield Text("\nfiles that were collected", style="bold")
        table = columns("name", ("bytes", "right"), "")
        for item in artifacts:
            table.add_row(Text(clean(item.name)), str(item.size_bytes), "cut" if item.truncated else "")
        yield table
        for item in artifacts:
            if item.name.endswith(_DIFFS):
                yield Text(clean(f"\n{item.name}"), style="bold")
                yield _patch(item.content.decode("utf-8", errors="replace"))
    if recording.tool_calls:
        yield Text("\nhost tools", style="bold")
        table = columns(("call", "right"), "tool", "state", "arguments")
        for call in recording.tool_calls:
            state = "said that it failed" if call.is_error else clean(call.state)
            table.add_row(str(call.index), Text(clean(call.name)), state, quoted(call.arguments_json, lines=3))
        yield table
    if len(recording.branches) > 1:
        yield Text("\nbranches", style="bold")
        yield outcomes.branches(recording)
    if recording.grade:
        yield Text(clean(f"\ncapture: {recording.grade}"), style="bold")
        findings = Counter(map(_finding, recording.findings))
        for line, count in findings.items():
            yield Text(clean(f"  {line}" + (f" ({count} times)" if count > 1 else "")), style="dim")


def _finding(item: Finding) -> str:
    """Returns a finding as a line; where a replay parts, with the likely cause."""
    cause = cause_in_finding(item.message) if item.reason == "REPLAY_DIVERGED" else None
    return f"{item.severity} {item.reason}: {item.message}" + (f" It is probably {cause}." if cause else "")
