"""`penstock gap`: compares the trainer's logprobs with those that the engine sampled with."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.analysis.export import Row, read_rows
from penstock.analysis.logprob_diff import Scored, compare
from penstock.analysis.logprob_diff_rows import RowCounts, read_arrays, with_arrays, with_column, with_scores
from penstock.analysis.token_text import Pieces
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.terminal.console import FAILED, OK, clean, emit, out, run, usage_error
from penstock.client import Penstock, connect
from penstock.client.transport.endpoints import of_state_dir


def gap(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="File of `penstock export`; either table.")
    ],
    column: Annotated[
        str | None, typer.Option(help="Column with the trainer's logprobs. Default: the service scores.")
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Trainer's logprobs: an .npz file, by sample_id or call_id."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only tokens of this policy. Needed where the service scores rows of several policies.",
        ),
    ] = None,
    adapter: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Adapter that sampled the tokens and scores them now. Default: the base weights."
        ),
    ] = "",
    any_version: Annotated[
        bool, typer.Option(help="Also score tokens of versions that are not in force; they are labelled.")
    ] = False,
    max_kl: Annotated[
        float | None, typer.Option(min=0.0, help="Fail if the KL of any version is above this, in nats per token.")
    ] = None,
    clip: Annotated[float, typer.Option(min=0.0, max=1.0, help="Ratios outside 1 +- this count as clipped.")] = 0.2,
    worst: Annotated[int, typer.Option(min=0, max=1000, help="How many of the worst tokens to show.")] = 5,
    report: Annotated[bool, typer.Option(help="Report the result to the inference service, for its watchers.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Compare the engine's logprobs of exported trajectories with the trainer's, per policy and version."""
    if column is not None and trainer is not None:
        usage_error("--column and --trainer: set only one of them")
    by_service = column is None and trainer is None
    if not by_service and (any_version or adapter):
        usage_error("--any-version and --adapter are for scores of the service")
    if report and adapter:
        usage_error("--report: the service accepts gaps of the base weights' versions only")

    async def work() -> int:
        counts = RowCounts()
        rows = chain.from_iterable(read_rows(file) for file in files)
        async with AsyncExitStack() as stack:
            ps: Penstock | None = None
            if by_service or report:
                endpoints = None if state_dir is None else of_state_dir(state_dir)
                ps = await stack.enter_async_context(connect(endpoints))
            found = [one async for one in _scored(rows, column, trainer, ps, counts, policy, adapter, any_version)]
            text = None
            if ps is not None and worst and (await ps.inference.info()).tokenizer_sha256:
                text = Pieces((await ps.inference.tokenizer())["tokenizer.json"]).text
            made = compare(found, clip=(1 - clip, 1 + clip), worst=worst, text=text, notes=counts.notes())
            if report and ps is not None:
                await ps.inference.report_gap(made)
        over = [one for one in made.versions if max_kl is not None and one.kl > max_kl]
        if as_json:
            emit({"holds": not over, **made.as_dict()})
        else:
            out.print(escape(clean(made.table())), soft_wrap=True)
            for one in over:
                name = escape(clean(made.name(one)))
                out.print(f"[red]above the limit[/]: version {name} has a KL of {one.kl:.3g}, more than {max_kl:g}")
        return FAILED if over else OK

    run(work())


async def _scored(
    rows: Iterator[Row],
    column: str | None,
    trainer: Path | None,
    ps: Penstock | None,
    counts: RowCounts,
    policy: str | None,
    adapter: str,
    any_version: bool,
) -> AsyncIterator[Scored]:
    given: Iterable[Scored] = ()
    if column is not None:
        given = with_column(rows, column, counts, policy=policy)
    elif trainer is not None:
        given = with_arrays(rows, read_arrays(trainer), counts, policy=policy)
    elif ps is not None:
        async for one in with_scores(
            rows, ps.inference, counts, policy=policy, adapter=adapter, any_version=any_version
        ):
            yield one
    for one in given:
        yield one
