"""A group that a command runs: its rollouts kept up to date by their events, drawn as one table, and its summary."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from penstock.cli.terminal.console import Indented, clean, counted
from penstock.cli.views import outcomes, rows
from penstock.cli.views.live_table import GroupStanding, Standing
from penstock.client.types.results import (
    AttemptFailed,
    CallFinished,
    Ended,
    Outcome,
    Phase,
    PhaseChanged,
    Rollout,
    RolloutChanges,
    RolloutEvent,
    RolloutPaused,
    RolloutResumed,
    RolloutSummary,
)
from penstock.evaluation.statistics import bounded_mean

_BESIDE: Final = 6
"""Lines of the screen that the live table leaves: the group, its header, blanks, and the line of the cursor."""
_STDERR_LINES: Final = 6


class GroupProgress:
    """The rollouts of a group.

    Args:
        rollouts: all of the group, as created.
        run_id: of all of them.
    """

    def __init__(self, rollouts: Iterable[Rollout], run_id: str | None = None) -> None:
        self._standing = Standing()
        self._items = {item.rollout_id: _begun(item, run_id) for item in rollouts}
        self._standing.apply(RolloutChanges(tuple(self._items.values()), complete=True))

    @property
    def group(self) -> GroupStanding:
        """The group, its rollouts in the order of their index."""
        (found,) = self._standing.groups()
        return found

    def apply(self, event: RolloutEvent) -> RolloutSummary | None:
        """Applies an event; returns the rollout if it is in another state than before."""
        before = self._items.get(event.rollout_id)
        if before is None:
            return None
        after = self._items[event.rollout_id] = _after(before, event)
        self._standing.apply(RolloutChanges((after,)))
        return None if rows.line(after) == rows.line(before) else after

    def table(self, width: int, *, most: int | None = None, fill: bool = False) -> RenderableType:
        """Returns a row for the group and one for each rollout; with `most`, running rollouts first, as many."""
        shown: Sequence[RolloutSummary] = self.group.rollouts
        if most is not None and len(shown) > most:
            shown = self._standing.rollouts()[: max(0, most - 1)]
        parts: list[RenderableType] = [
            rows.groups([self.group], width, self._standing.range(), fill=fill),
            Text(),
            rows.rollouts(shown, width, rows.utc_now(), fill=fill),
        ]
        if len(shown) < len(self.group.rollouts):
            parts.append(Text(f"... {len(self.group.rollouts) - len(shown)} more", style="dim"))
        return Group(*parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width, most=options.size.height - _BESIDE, fill=True)


def _begun(item: Rollout, run_id: str | None) -> RolloutSummary:
    outcome = item.outcome
    return RolloutSummary(
        rollout_id=item.rollout_id, group_id=item.group_id, index=item.index, run_id=run_id, task_id=item.task_id,
        agent=item.agent, labels=item.labels, phase=item.phase, create_time=item.create_time, end_time=item.end_time,
        failure=None if outcome is None else outcome.failure, reward=None if outcome is None else outcome.reward,
        calls=0, prompt_tokens=0, completion_tokens=0, min_version=None, max_version=None, attempts=item.attempts,
        namespace=item.namespace, home=item.home, paused=item.pause is not None,
    )  # fmt: skip


def _after(item: RolloutSummary, event: RolloutEvent) -> RolloutSummary:
    match event.payload:
        case PhaseChanged(phase) if phase is not Phase.ENDED:  # how it ended comes with `Ended`
            return replace(item, phase=phase)
        case CallFinished(call):
            version = None if call.completion is None else call.completion.policy_version
            known = [found for found in (item.min_version, item.max_version, version) if found is not None]
            return replace(
                item,
                calls=item.calls + 1,
                prompt_tokens=item.prompt_tokens + call.prompt_count,
                completion_tokens=item.completion_tokens + call.sampled_count,
                min_version=min(known, default=None),
                max_version=max(known, default=None),
            )
        case AttemptFailed(attempt):
            return replace(item, attempts=attempt + 1)
        case RolloutPaused():
            return replace(item, paused=True)
        case RolloutResumed():
            return replace(item, paused=False)
        case Ended(outcome):
            return replace(
                item, phase=Phase.ENDED, end_time=event.time, failure=outcome.failure, reward=outcome.reward,
                paused=False,
            )  # fmt: skip
        case _:
            return item


def failures(ended: Mapping[str, Outcome]) -> list[RenderableType]:
    """Shows why rollouts failed."""
    parts: list[RenderableType] = []
    for rollout_id, outcome in sorted(ended.items()):
        if outcome.failure is None:
            continue
        parts.append(Group(Text(clean(rollout_id), style="bold"), Indented(outcomes.outcome(outcome))))
        if outcome.agent_stderr:
            parts.append(Indented(outcomes.agent_stderr(outcome.agent_stderr, _STDERR_LINES)))
    return parts


def summary(group: GroupStanding) -> list[Text]:
    """Returns the group's id, how its rollouts ended, and their mean reward with its interval."""
    ends = [f"{group.ended - group.failed - group.cancelled} completed"]
    ends += [f"{count} {word}" for count, word in ((group.failed, "failed"), (group.cancelled, "cancelled")) if count]
    ends += [f"{len(group.rollouts) - group.ended} not ended"] if group.ended < len(group.rollouts) else []
    lines = [
        Text.assemble(
            ("group ", "bold"), clean(group.group_id), f"  {counted(len(group.rollouts), 'rollout')}: {', '.join(ends)}"
        )
    ]
    ranges = [item.reward for item in group.rollouts if item.reward is not None]
    found = bounded_mean(
        {group.group_id: group.rewards},
        min((item.range_min for item in ranges), default=0.0),
        max((item.range_max for item in ranges), default=1.0),
    )
    if found is None:
        lines.append(Text("reward none: no rollout was graded", style="dim"))
    else:
        of = f"{counted(found.attempts, 'graded rollout')} of one task"
        lines.append(
            Text.assemble(("reward ", "bold"), f"{found.value:.3f}  95 % {found.low:.3f} to {found.high:.3f}  ({of})")
        )
    return lines
