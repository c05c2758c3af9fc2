"""A rollout's end on a terminal: outcome and reward, its calls, phases, branches and changed files."""

from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.analysis.recordings import Recording
from penstock.cli.terminal.console import clean, columns, counted, quoted
from penstock.client import Call, Failure, Outcome, Phase, Reward, Trajectory
from penstock.client.types.results import Changes

_BAR: Final = 30
_OF_A_GRADE: Final = ("warning", "fatal")
"""Severities of findings that make a trajectory less than exact."""


def outcome(result: Outcome) -> RenderableType:
    """Shows the outcome in one or two lines."""
    if result.failure is None:
        line = Text("completed", style="bold green")
    else:
        failure = result.failure
        line = Text.assemble(
            (clean(f"failed: {failure.reason}"), "bold red"),
            f" ({_blame(failure)}{', retriable' if failure.retriable else ''})  ",
            quoted(failure.message, lines=6),
        )
    if result.reward is None:
        return Text.assemble(line, ("   not graded", "dim"))
    reward = result.reward
    scale = f" of {reward.range_min:g} to {reward.range_max:g}{_components(reward)}"
    return Text.assemble(line, "   reward ", (f"{reward.value:g}", "bold"), (scale, "dim"))


def agent_stderr(text: bytes, lines: int = 12) -> RenderableType:
    """Shows the last lines of a failed agent's standard error."""
    shown = quoted(text.decode("utf-8", errors="replace"), "red", lines=lines)
    return Text.assemble(("the agent's standard error ends with:", "dim"), "\n", shown)


def _components(reward: Reward) -> str:
    return "".join(f"  {clean(name)} {value:g}" for name, value in reward.components.items())


def _blame(failure: Failure) -> str:
    """Formats the kind of failure, with the component at fault where that adds something."""
    return f"{failure.cause} of {failure.caused_by}" if failure.cause == "infrastructure" else str(failure.cause)


def calls(trajectory: Trajectory) -> Table:
    """Returns a table with a row per model call."""
    table = columns(
        ("call", "right"), ("parent", "right"), "class", ("prompt", "right"), ("reused", "right"), ("sampled", "right"),
        "finish", "answered by", ("version", "right"), ("seconds", "right"),
    )  # fmt: skip
    numbers = {call.call_id: str(call.index) for call in trajectory.calls}
    for call in trajectory.calls:
        completion = call.completion
        waited = (
            f"{(call.end_time - call.receive_time).total_seconds():.2f}" if call.end_time and call.receive_time else ""
        )
        table.add_row(
            str(call.index),
            numbers.get(call.parent_call_id or "", ""),
            _shown(call.call_class),
            str(call.prompt_count or ""),
            str(call.prompt_shared_count or ""),
            str(call.sampled_count or ""),
            _shown(str(completion.finish_reason)) if completion is not None else call.end_reason or call.state,
            _answered_by(call),
            _version(call),
            waited,
        )
    return table


def _version(call: Call) -> str:
    """Names the oldest version that sampled an answer, and its policy, where the rollout has several."""
    version = None if call.completion is None else call.completion.policy_version
    return " ".join(filter(None, (call.policy_id, "" if version is None else str(version))))


def _answered_by(call: Call) -> str:
    """Names what answered a call: also where nothing was sampled for it."""
    if call.given:
        return "given answer"
    origin = call.replayed_from
    if origin is None:
        return _shown(call.answerer)
    return f"replay of attempt {origin.attempt}" if origin.rollout_id == call.rollout_id else "replay of its parent"


def _shown(word: str) -> str:
    """Formats a word of an enum; empty for an unspecified one."""
    return "" if word == "unspecified" else word


def totals(trajectory: Trajectory) -> str:
    """Formats the token totals and the trajectory's grade."""
    prompt = sum(call.prompt_count for call in trajectory.calls)
    sampled = sum(call.sampled_count for call in trajectory.calls)
    trainable = sum(int(sample.loss_mask.sum()) for sample in trajectory.samples)
    excluded = "".join(f"\n{item.message}" for item in trajectory.findings if item.reason == "TURNS_UNTRAINED")
    reasons = {item.reason: item.message for item in trajectory.findings if item.severity in _OF_A_GRADE}
    why = "".join(f"\n{reason}: {message}" for reason, message in reasons.items())
    return (
        f"{counted(len(trajectory.calls), 'call')}, {prompt} prompt and {sampled} sampled tokens;"
        f" {counted(len(trajectory.samples), 'sample')} with {counted(trainable, 'trainable token')};"
        f" capture {trajectory.capture_level}, grade {trajectory.grade}{why}{excluded}"
    )


def ended(recording: Recording) -> RenderableType:
    """Shows how a recorded rollout ended, as far as the recording has it."""
    if recording.outcome is not None:
        return outcome(recording.outcome)
    if recording.failure is not None:
        reason, cause, party = recording.failure
        line = Text.assemble((clean(f"failed: {reason}"), "bold red"), clean(f" ({cause} of {party or '?'})"))
    elif recording.rollout is not None:
        return Text(f"not over: {recording.rollout.phase.value.replace('_', ' ')}", style="bold cyan")
    else:
        line = Text("completed", style="bold green")
    if recording.reward is not None:
        parts = _components(recording.reward)
        return Text.assemble(line, "   reward ", (f"{recording.reward.value:g}", "bold"), (parts, "dim"))
    return Text.assemble(line, ("   not graded" if recording.graded_known else "   the file has no reward", "dim"))


def phases(times: Mapping[Phase, float]) -> Table:
    table = columns("phase", ("seconds", "right"), "")
    whole = sum(times.values()) or 1.0
    for phase, seconds in times.items():
        bar = "\N{FULL BLOCK}" * round(_BAR * seconds / whole)
        table.add_row(phase.value.replace("_", " "), f"{seconds:.2f}", Text(bar or "\N{LEFT ONE EIGHTH BLOCK}", "cyan"))
    return table


def changes(taken: Changes) -> Iterator[RenderableType]:
    """Shows the agent's changes that a fresh fork applied."""
    what = f"{counted(taken.entries, 'path')} changed ({taken.size_bytes} bytes), {taken.removed} removed"
    yield Text(f"  the agent's work: {what}, {taken.left_out} left out", style="dim")
    for path in taken.left_out_paths:
        yield Text(clean(f"    left out: {path}"), style="dim")


def branches(recording: Recording) -> Table:
    """Returns a table of the paths through the calls."""
    table = columns("class", "calls", ("shared tokens", "right"), "why")
    numbers = {turn.call_id: turn.index for turn in recording.turns}
    for branch in recording.branches:
        calls = ", ".join(str(numbers[call]) for call in branch.call_ids if call in numbers)
        table.add_row(Text(clean(branch.branch_class)), calls, str(branch.shared_count), Text(clean(branch.reason)))
    return table
