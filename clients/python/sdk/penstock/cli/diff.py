"""`penstock diff`: what differs between two rollouts."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.completing import recordings
from penstock.cli.console import FAILED, OK, Indented, clean, columns, emit, out, quoted, run, usage_error
from penstock.cli.options import AsJson, StateDir, Tokenizer
from penstock.cli.replay import read_recording
from penstock.cli.services import services
from penstock.client import Penstock
from penstock.client.differences import Comparison, Divergence, Side, compare
from penstock.client.recordings import Recording, of_rollout

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
            help="The other one; without it A is a group: its best and its worst.",
            autocompletion=recordings,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Say what differs between two rollouts: task, end, reward, the first token at which they part.

    Exit code 0: the same, as far as they can be compared; 1: they differ. Ids and times are told and count for nothing.
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
    """The siblings of a group with the highest and the lowest reward."""
    await ps.groups.attach(group_id)  # or it is said that there is none
    rated = [
        (rollout.outcome.reward.value, -rollout.index, rollout.rollout_id)
        async for rollout in ps.rollouts.list(group_id=group_id, ended=True)
        if rollout.outcome is not None and rollout.outcome.reward is not None
    ]
    if len(rated) < 2:
        usage_error(f"{group_id}: {len(rated)} of its rollouts have a reward so far; two are needed to compare them")
    return await of_rollout(ps, max(rated)[2]), await of_rollout(ps, min(rated)[2])


def drawn(found: Comparison, left: Recording, right: Recording) -> Iterator[RenderableType]:
    """What differs, for people."""
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
    same = "the same as far as compared" if found.unknown else "the same"
    yield Text(same if found.same else "they differ", style="bold green" if found.same else "bold red")


def _without_what_is_alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Of two mappings, such as the sampling, the keys in which they differ."""
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
        yield Text(f"they are alike until call {found.turn}, which only one of them has", style="bold")
        return
    what = "message part" if found.where in ("request", "message") else "token"
    yield Text(f"they part at call {found.turn}, in its {found.where}, {what} {found.position}", style="bold")
    if found.before is not None:
        yield Text("after", style="dim")
        yield Indented(quoted(found.before[-_VALUE:], "dim"))
    for name, style, side in (("A", "red", found.left), ("B", "green", found.right)):
        yield Text.assemble((f"{name} ", f"bold {style}"), _said(side))
        if side.text is not None:
            yield Indented(quoted(side.text, style, width=4000))


def _said(side: Side) -> str:
    if not side.token_ids:
        return "" if side.text else "nothing more"
    told = f"tokens {', '.join(map(str, side.token_ids[:6]))}{' ...' if len(side.token_ids) > 6 else ''}"
    return told if not side.logprobs else f"{told}; the first with logprob {side.logprobs[0]:.3f}"
