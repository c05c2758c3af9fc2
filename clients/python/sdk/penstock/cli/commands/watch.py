"""`penstock watch`: live rollouts and groups, with the curve and the spread of their rewards."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.connections import completion
from penstock.cli.connections.options import AllNamespaces, AsJson, Labels, StateDir, label_filter
from penstock.cli.connections.watching import Chosen, Connected, Trouble, follow, once
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, err, out, run
from penstock.cli.terminal.screen import Screen, interactive
from penstock.cli.views import rows
from penstock.cli.views.curve_points import By
from penstock.cli.views.json_shapes import summary_shape
from penstock.cli.views.live_table import MOST_ENDED, Standing, is_cancelled, totals
from penstock.cli.views.reward_curve import Curve
from penstock.client.errors import first_of
from penstock.client.types.results import RolloutChanges

_KEYS: Final = "q quit  tab rollouts, groups or both  up/down scroll"
_LOW: Final = 5
_HIGH: Final = 9
"""Lines of the curve; odd, so that there is a middle one."""
_CLOCK_S: Final = 1.0
"""Seconds between redraws of running times."""


def watch(
    run_id: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    group_id: Annotated[
        str | None, typer.Option("--group", help="Only of this group.", autocompletion=completion.group_ids)
    ] = None,
    task_id: Annotated[str | None, typer.Option("--task", help="Only of this task.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Only of this agent.", autocompletion=completion.agent_names)
    ] = None,
    label: Labels = None,
    ended: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_ENDED,
            help="How many ended rollouts are shown, newest first, with all of their groups.",
        ),
    ] = MOST_ENDED,
    by: Annotated[
        By | None,
        typer.Option(
            help="A point of the curve: default the label `step` where rollouts have it, else the policy version."
        ),
    ] = None,
    once_only: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    all_namespaces: AllNamespaces = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Watch rollouts and groups live: state, version, calls, tokens, reward.

    The watch continues when services stop and return. With --json it prints a line for each change. Without a terminal
    it fails at once if no service answers; with --group it then ends with the group: exit code 1 if a rollout failed.
    """
    chosen = Chosen(run_id, group_id, task_id, agent, label_filter(label), ended, state_dir, all_namespaces)
    if once_only:
        run(_once(chosen, by, as_json))
    elif as_json or not interactive(out):
        run(_lines(chosen, as_json))
    else:
        run(_live(chosen, by))


async def _once(chosen: Chosen, by: By | None, as_json: bool) -> int:
    standing = Standing(chosen.ended_limit)
    standing.apply(await once(chosen))
    if as_json:
        for item in standing.rollouts():
            emit(summary_shape(item))
    elif len(standing):
        width = out.width if out.is_terminal else rows.WIDE * 2
        parts: list[RenderableType] = [_summary(standing)]
        parts += _curve(standing, by, _HIGH)
        groups = standing.groups()
        if groups:
            parts += [Text(), rows.groups(groups, width, standing.range(), fill=False)]
        parts += [Text(), rows.rollouts(standing.rollouts(), width, rows.utc_now(), fill=False)]
        out.print(Group(*parts), width=width)
    _show_omissions(standing)
    if absent := _absent(standing):
        err.print(Text(clean(absent)), soft_wrap=True)
    if not len(standing):
        err.print(Text(clean(f"no rollout: {chosen}")))
    return OK if len(standing) else FAILED


def _show_omissions(standing: Standing) -> None:
    """Prints to standard error, for programs and logs, what is left out."""
    if left_out := _left_out(standing):
        err.print(Text(f"{left_out}: --ended N sets how many ended rollouts are shown"), soft_wrap=True)


def _absent(standing: Standing) -> str:
    """Names the drivers that do not answer; empty if all do."""
    if not standing.away:
        return ""
    names = ", ".join(standing.away)
    several = len(standing.away) > 1
    return f"{names} {'do' if several else 'does'} not answer: the rollouts there are missing here, or as they were"


def _left_out(standing: Standing) -> str:
    """Describes how many are not shown; empty if nothing is left out."""
    parts = []
    if standing.hidden:
        parts.append(f"{counted(standing.hidden, 'older rollout')} not shown")
    if standing.older:
        parts.append(f"rollouts that ended before the newest {MOST_ENDED} are not listed")
    return ", ".join(parts)


async def _lines(chosen: Chosen, as_json: bool) -> int:
    """Prints a line for each change, for programs and logs."""
    standing = Standing(chosen.ended_limit)
    shown: dict[str, str] = {}
    first = True
    absent = ""
    async with aclosing(follow(chosen, waits=False)) as changes:
        async for change in changes:
            if isinstance(change, Connected):
                standing.begin()
                continue
            if isinstance(change, Trouble):
                err.print(Text(clean(f"{change.message}; it is retried")))
                continue
            new, gone = standing.apply(change)
            if absent != (absent := _absent(standing)) and absent:
                err.print(Text(clean(absent)), soft_wrap=True)
            if not standing.complete:
                continue  # which ones are shown is known only once all have arrived
            if first:
                first, new = False, list(reversed(standing.rollouts()))
                _show_omissions(standing)
                if not len(standing):
                    err.print(Text(clean(f"no rollout yet: {chosen}; waiting for one to be created")), soft_wrap=True)
            for item in new:
                line = rows.line(item)
                if as_json:
                    emit(summary_shape(item))
                elif shown.get(item.rollout_id) != line:
                    shown[item.rollout_id] = line
                    out.print(Text(line))
            for name in gone:
                if as_json:
                    emit({"rollout_id": name, "deleted": True})
                else:
                    out.print(Text(clean(f"{name}: deleted")))
            if chosen.group_id is not None and standing.ended:
                return FAILED if standing.has_failures else OK
    return OK


async def _live(chosen: Chosen, by: By | None) -> int:
    view = View(chosen, by)
    async with Screen(out) as screen:
        view.changed = screen.wake
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(view.follow()), tasks.create_task(view.tick())]
                while view.open:
                    screen.show(view.frame())
                    view.press(await screen.key())
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            raise first_of(group) from None
    return OK


class View:
    """The state of the screen."""

    def __init__(self, chosen: Chosen, by: By | None = None) -> None:
        self._chosen = chosen
        self._by = by
        self.standing = Standing(chosen.ended_limit)
        self._where = ""
        self._trouble: str | None = None
        self._shown: Final = ["both", "rollouts", "groups"]
        self._top = 0
        self._page = 1
        self.open = True
        self.changed: Callable[[], None] = lambda: None

    async def follow(self) -> None:
        """Applies changes as they come."""
        async with aclosing(follow(self._chosen)) as changes:
            async for change in changes:
                match change:
                    case Connected(address):
                        self._where, self._trouble = address, None
                        self.standing.begin()
                    case Trouble(message):
                        self._trouble = message
                    case RolloutChanges():
                        self.standing.apply(change)
                self.changed()

    async def tick(self) -> None:
        """Redraws running times periodically."""
        while True:
            await asyncio.sleep(_CLOCK_S)
            if len(self.standing) and not self.standing.ended:
                self.changed()

    def press(self, key: str) -> None:
        """Handles a key."""
        match key:
            case "q" | "escape" | "closed":
                self.open = False
            case "tab":
                self._shown.append(self._shown.pop(0))
                self._top = 0
            case "down" | "j":
                self._top += 1
            case "up" | "k":
                self._top -= 1
            case "pagedown" | "space":
                self._top += self._page
            case "pageup" | "b":
                self._top -= self._page
            case "home" | "g":
                self._top = 0
            case "end" | "G":
                self._top = len(self.standing.rollouts())
            case _:
                pass

    def frame(self) -> RenderableType:
        """Returns the whole screen."""
        width, height = out.size.width, out.size.height
        parts: list[RenderableType] = [_one_line(self._head()), _one_line(_summary(self.standing))]
        room = height - 3
        if trouble := self._trouble or _absent(self.standing):
            parts.append(_one_line(Text(clean(trouble), style="bold yellow")))
            room -= 1
        lines = _HIGH if height >= 32 else _LOW
        if height >= 20 and (curve := _curve(self.standing, self._by, lines)):
            parts += curve
            room -= lines + 2
        groups = self.standing.groups()
        if groups and self._shown[0] != "rollouts":
            alone = self._shown[0] == "groups"
            most = max(1, room - 2 if alone else room // 3)
            shown = groups[self._from(len(groups), most) if alone else 0 :][:most]
            parts += [rows.groups(shown, width, self.standing.range()), Text()]
            room -= len(shown) + 2
        if not groups or self._shown[0] != "groups":
            items = self.standing.rollouts()
            shown_items = items[self._from(len(items), room - 1) :][: max(0, room - 1)]
            if items:
                parts.append(rows.rollouts(shown_items, width, rows.utc_now()))
            room -= len(shown_items) + bool(items)
        parts += [Text()] * max(0, room)
        parts.append(_one_line(Text(_KEYS, style="dim")))
        return Group(*parts)

    def _from(self, count: int, page: int) -> int:
        """Returns the first visible row."""
        self._page = max(1, page)
        self._top = min(max(self._top, 0), max(0, count - self._page))
        return self._top

    def _head(self) -> Text:
        state = (
            ("waiting", "bold yellow")
            if self._trouble
            else ("live", "bold green")
            if self._where
            else ("connecting", "dim")
        )
        return Text.assemble(
            ("penstock watch  ", "bold"), clean(str(self._chosen)), "  ", state, "  ", (clean(self._where), "dim")
        )


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _summary(standing: Standing) -> Text:
    """Returns a one-line summary."""
    if not len(standing):
        return Text("no rollout yet" if standing.complete else "", style="dim")
    items = standing.rollouts()
    line = Text.assemble((counted(len(items), "rollout"), "bold"))
    if left_out := _left_out(standing):
        line.append(f" ({left_out})", style="yellow")
    rewards = standing.rewards()
    if rewards:
        line.append(f"  reward {sum(rewards) / len(rewards):.3f}", style="bold cyan")
    for phase, count in standing.phases().items():
        line.append(f"  {count} {phase.value.replace('_', ' ')}")
    cancelled = sum(map(is_cancelled, items))
    failed = sum(item.failure is not None for item in items) - cancelled
    for count, word, style in ((failed, "failed", "red"), (cancelled, "cancelled", "yellow")):
        if count:
            line.append(f" ({count} {word})", style=style)
    calls, prompt, sampled = totals(items)
    if calls:
        tokens = f"{rows.counted_tokens(prompt)}+{rows.counted_tokens(sampled)} tokens"
        line.append(f"  {counted(calls, 'call')}, {tokens}", style="dim")
    return line


def _curve(standing: Standing, by: By | None, lines: int) -> list[RenderableType]:
    points, caption = standing.curve(by)
    return [Curve(points, *standing.range(), lines, caption), Text()] if len(points) > 1 else []
