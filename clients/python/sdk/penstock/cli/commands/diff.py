"""`penstock diff`: compares two rollouts."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.analysis.differences import Comparison, Divergence, Side, compare
from penstock.analysis.recordings import Recording, of_rollout
from penstock.cli.commands.replay import read_recording
from penstock.cli.connections.completion import recordings
from penstock.cli.connections.options import AsJson, StateDir, Tokenizer
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, Indented, clean, columns, emit, out, quoted, run, usage_error
from penstock.client import Penstock

_VALUE: Final = 300


def diff(
    left: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A rollout, FILE or FILE@ID, as for `replay`; or a group.", autocompletion=recordings
        ),
    ],
    right: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="The other one; without it, A is a group, and its best and worst are compared.",
            autocompletion=recordings,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the differences of two rollouts: task, end, reward, and the first token that differs.

    Exit code 0: the same, as far as they can be compared; 1: they differ. Ids and times are shown and do not count.
    """

    async def work() -> int:
        if right is None:
            async with services(state_dir=state_dir) as ps:
                first, second = await _extremes(ps, left)
        else:
            first = await read_recording(left, tokenizer, state_dir)
            second = await read_recording(right, tokenizer, state_dir)
        found = compare(first, second)
        if as_json:
            emit(found.as_dict())
        else:
            out.print(Group(*drawn(found, first, second)))
        return OK if found.same else FAILED

    run(work())


async def _extremes(ps: Penstock, group_id: str) -> tuple[Recording, Recording]:
    """Returns a group's rollouts with the highest and the lowest reward."""
    await ps.groups.attach(group_id)  # or raise that there is none
    rated = [
        (rollout.outcome.reward.value, -rollout.index, rollout.rollout_id)
        async for rollout in ps.rollouts.list(group_id=group_id, ended=True)
        if rollout.outcome is not None and rollout.outcome.reward is not None
    ]
    if len(rated) < 2:
        usage_error(f"{group_id}: {len(rated)} of its rollouts have a reward so far; a comparison needs two")
    return await of_rollout(ps, max(rated)[2]), await of_rollout(ps, min(rated)[2])


def drawn(found: Comparison, left: Recording, right: Recording) -> Iterator[RenderableType]:
    """Yields the differences, for people."""
    yield Text.assemble(("A ", "bold red"), clean(f"{left.rollout_id}  {left.origin}"))
    yield Text.assemble(("B ", "bold green"), clean(f"{right.rollout_id}  {right.origin}"))
    if found.differences:
        yield Text()
        table = columns("", "", "A", "B")
        for item in found.differences:
            one, other = _without_what_is_alike(item.left, item.right)
            table.add_row(Text(item.part, "dim"), Text(clean(item.name)), _value(one, "red"), _value(other, "green"))
        yield table
    if found.divergence is not None:
        yield Text()
        yield from _parting(found.divergence)
    if found.seconds:
        yield Text()
        table = columns("seconds", ("A", "right"), ("B", "right"))
        for name, pair in found.seconds.items():
            table.add_row(name.replace("_", " "), *("" if value is None else f"{value:.2f}" for value in pair))
        yield table
    yield Text()
    for line in found.unknown:
        yield Text(clean(f"not compared: {line}"), style="yellow")
    same = "no difference in what was compared" if found.unknown else "the same"
    yield Text(same if found.same else "they differ", style="bold green" if found.same else "bold red")


def _without_what_is_alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Returns the differing keys of two mappings, such as the sampling."""
    if not (isinstance(left, Mapping) and isinstance(right, Mapping)):
        return left, right
    differ = [name for name in {**left, **right} if (name in left, left.get(name)) != (name in right, right.get(name))]
    one, other = ({name: side[name] for name in differ if name in side} for side in (left, right))
    return one or None, other or None


def _value(value: Any, style: str) -> Text:
    if value is None:
        return Text("none", style="dim")
    text = (
        value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else orjson.dumps(value).decode()
    )
    return quoted(text, style, lines=4, width=_VALUE)


def _parting(found: Divergence) -> Iterator[RenderableType]:
    if found.where == "calls":
        yield Text(f"they are equal until call {found.turn}, which only one of them has", style="bold")
        return
    what = "message part" if found.where in ("request", "message") else "token"
    yield Text(f"they diverge at call {found.turn}, in its {found.where}, {what} {found.position}", style="bold")
    if found.before is not None:
        yield Text("after", style="dim")
        yield Indented(quoted(found.before[-_VALUE:], "dim"))
    for name, style, side in (("A", "red", found.left), ("B", "green", found.right)):
        yield Text.assemble((f"{name} ", f"bold {style}"), _tokens_text(side))
        if side.text is not None:
            yield Indented(quoted(side.text, style, width=4000))


def _tokens_text(side: Side) -> str:
    if not side.token_ids:
        return "" if side.text else "nothing more"
    text = f"tokens {', '.join(map(str, side.token_ids[:6]))}{' ...' if len(side.token_ids) > 6 else ''}"
    return text if not side.logprobs else f"{text}; the first with logprob {side.logprobs[0]:.3f}"
