"""Rollouts and groups as rows of a table: the only place that formats a rollout as a line."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal.console import clean
from penstock.cli.views.live_table import GroupStanding, is_cancelled, totals
from penstock.cli.views.reward_curve import strip
from penstock.client.types.results import Phase, RolloutSummary

WIDE: Final = 110
"""Minimum width for the optional columns."""
_ID: Final = 32
_LEAST: Final = 8
_WORD: Final = 16
_STYLES: Final = {
    Phase.QUEUED: "dim", Phase.PREPARING: "blue", Phase.CONFIGURING: "blue", Phase.SETTING_UP: "blue",
    Phase.RUNNING: "cyan", Phase.VERIFYING: "yellow", Phase.COLLECTING: "yellow", Phase.ENDED: "",
}  # fmt: skip


def rollouts(items: Sequence[RolloutSummary], width: int, now: datetime, *, fill: bool = True) -> Table:
    """Returns a row for each; with `fill` as wide as the screen, so that columns keep their position."""
    wide, several = width >= WIDE, any(item.namespace != "default" for item in items)
    table = _table(fill)
    table.add_column("rollout", no_wrap=True, overflow="ellipsis", ratio=3)
    if several:
        table.add_column("namespace", no_wrap=True, overflow="ellipsis", max_width=_WORD)
    if wide:
        for name in ("task", "run"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=_WORD)
    table.add_column("agent", no_wrap=True, overflow="ellipsis", max_width=_WORD if wide else 8)
    table.add_column("state", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("version", "calls", "tokens", "reward", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in items:
        table.add_row(
            _Tail(clean(item.rollout_id), _ID * (2 if wide else 1)),
            *((Text(clean(item.namespace)),) if several else ()),
            *((Text(clean(item.task_id)), Text(clean(item.run_id or ""))) if wide else ()),
            Text(clean(item.agent)),
            state(item),
            versions([item]),
            str(item.calls or ""),
            _tokens([item]),
            Text(f"{item.reward.value:.4g}", style="bold") if item.reward is not None else Text(""),
            duration(item, now),
        )
    return table


def groups(items: Sequence[GroupStanding], width: int, span: tuple[float, float], *, fill: bool = True) -> Table:
    """Returns a row for each; `span` is the range of rewards."""
    wide = width >= WIDE
    table = _table(fill)
    table.add_column("group", no_wrap=True, overflow="ellipsis", ratio=3)
    if wide:
        for name in ("task", "run"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=_WORD)
    cancelled = any(item.cancelled for item in items)
    names = ("ended", "failed", *(("cancelled",) if cancelled else ()), "version", "calls", "tokens", "mean", "sd")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    places = 24 if wide else 11
    table.add_column(f"{span[0]:g}" + f"{span[1]:g}".rjust(places - len(f"{span[0]:g}")), no_wrap=True)
    for item in items:
        first = item.rollouts[0]
        table.add_row(
            _Tail(clean(item.group_id), _ID * (2 if wide else 1)),
            *((Text(clean(first.task_id)), Text(clean(first.run_id or ""))) if wide else ()),
            f"{item.ended}/{len(item.rollouts)}",
            Text(str(item.failed or ""), style="red"),
            *((Text(str(item.cancelled or ""), style="yellow"),) if cancelled else ()),
            versions(item.rollouts),
            str(totals(item.rollouts)[0] or ""),
            _tokens(item.rollouts),
            Text("" if item.mean is None else f"{item.mean:.3f}", style="bold"),
            "" if item.deviation is None else f"{item.deviation:.3f}",
            strip(item.rewards, *span, places),
        )
    return table


def _table(fill: bool) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=fill)


def state(item: RolloutSummary) -> Text:
    """Formats a rollout's phase, or how it ended."""
    if not item.ended:
        again = f" (try {item.attempts})" if item.attempts > 1 else ""
        if item.paused:
            return Text(f"paused, {item.phase.value.replace('_', ' ')}{again}", style="yellow")
        return Text(item.phase.value.replace("_", " ") + again, style=_STYLES[item.phase])
    if item.failure is None:
        return Text("completed", style="green")
    reason = clean(item.failure.reason.lower().replace("_", " "))
    return Text(reason, style="yellow" if is_cancelled(item) else "red")


def line(item: RolloutSummary) -> str:
    """Formats a rollout's state as a line, for programs and logs."""
    reward = "" if item.reward is None else f", reward {item.reward.value:g}"
    return clean(f"{item.rollout_id}: {state(item).plain}{reward}")


def versions(items: Sequence[RolloutSummary]) -> str:
    """Formats the policy versions of the answers."""
    low = min((item.min_version for item in items if item.min_version is not None), default=None)
    high = max((item.max_version for item in items if item.max_version is not None), default=None)
    if low is None or high is None:
        return ""
    return str(low) if low == high else f"{low}-{high}"


def counted_tokens(count: int) -> str:
    """Formats a count with few digits: 950, 12.3k, 4.5M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < size * 100 else f"{count / size:.0f}{unit}"
    return str(count)


def _tokens(items: Sequence[RolloutSummary]) -> str:
    _, prompt, sampled = totals(items)
    return f"{counted_tokens(prompt)}+{counted_tokens(sampled)}" if prompt or sampled else ""


def duration(item: RolloutSummary, now: datetime) -> str:
    """Formats its duration, until now if it runs."""
    if item.create_time is None:
        return ""
    seconds = max(0.0, ((item.end_time or now) - item.create_time).total_seconds())
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


@dataclass(frozen=True, slots=True)
class _Tail:
    """A name that is cut at its beginning: siblings differ at the end."""

    name: str
    most: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = min(len(self.name), self.most, options.max_width)
        return Measurement(min(length, _LEAST), length)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = min(self.most, options.max_width)
        shown = (
            self.name if len(self.name) <= most else "\N{HORIZONTAL ELLIPSIS}" + self.name[len(self.name) - most + 1 :]
        )
        yield Text(shown, style="bold", no_wrap=True, overflow="crop")


def utc_now() -> datetime:
    """Returns the current time, for durations of running rollouts."""
    return datetime.now(UTC)
