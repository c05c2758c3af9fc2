"""`penstock annotate`: adds what a judge, a critic or a person says to an ended rollout's trajectory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import orjson
import typer
from rich.markup import escape

from penstock.cli.connections.completion import recordings
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import OK, clean, counted, emit, out, run, usage_error
from penstock.client import Annotation, NotFound, Penstock
from penstock.values.similar_names import did_you_mean

_KEYS: Final = ("name", "author", "call", "value", "token_values", "details", "chain_sha256")
_MAX_FILE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Line:
    """An annotation, and the call that it is about: its id, or its index until the trajectory was read."""

    annotation: Annotation
    call: str | int | None


def annotate(
    rollout_id: Annotated[str, typer.Argument(metavar="ROLLOUT", help="The ended rollout.", autocompletion=recordings)],
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help=f"JSON Lines, an annotation each: {', '.join(_KEYS)}."),
    ] = None,
    name: Annotated[str, typer.Option(help="What is judged; with --file for lines without a name.")] = "",
    author: Annotated[str, typer.Option(help="Who judged; with --file for lines without an author.")] = "",
    call: Annotated[
        str | None, typer.Option(help="The call: its index from 0, or its id; default: the whole trajectory.")
    ] = None,
    value: Annotated[float | None, typer.Option(help="The number.")] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Add annotations to an ended rollout's trajectory: what a judge, a critic or a person says.

    The reward stays. An annotation of the same name, author and call is replaced.
    """
    if file is not None and (call is not None or value is not None):
        usage_error("--call and --value are in the lines of --file")
    if file is None:
        if value is None:
            usage_error("give --value, or annotations in --file")
        row: dict[str, Any] = {"value": value}
        if call is not None:
            row["call"] = int(call) if call.isdecimal() else call
        lines = [_line(row, "the command line", name, author)]
    else:
        lines = list(read_lines(file, name, author))
    if not lines:
        usage_error(f"--file: {file} has no annotation")

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            found = await _with_ids(ps, rollout_id, lines)
            await ps.rollouts.annotate(rollout_id, *found)
        if as_json:
            emit({"rollout_id": rollout_id, "annotations": len(found)})
        else:
            out.print(escape(clean(f"{counted(len(found), 'annotation')} of {rollout_id}")), soft_wrap=True)
        return OK

    run(work())


def read_lines(file: Path, name: str, author: str) -> Iterator[Line]:
    """Yields a file's annotations. One that cannot be read ends the program."""
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            usage_error(f"--file: {file} is larger than {_MAX_FILE_BYTES} bytes")
        texts = file.read_bytes().splitlines()
    except OSError as error:
        usage_error(f"--file: {file} cannot be read: {error}")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        where = f"--file: line {number} of {file}"
        try:
            row = orjson.loads(text)
        except ValueError as error:
            usage_error(f"{where} is not JSON: {error}")
        if not isinstance(row, dict):
            usage_error(f"{where} is no object")
        yield _line(row, where, name, author)


def _line(row: dict[str, Any], where: str, name: str, author: str) -> Line:
    if unknown := sorted(set(row) - set(_KEYS)):
        meant = did_you_mean(unknown[0], _KEYS) or ";"
        usage_error(f"{where}: unknown {', '.join(unknown)}{meant} there are {', '.join(_KEYS)}")
    named = {"name": row.get("name", name), "author": row.get("author", author)}
    for key, text in named.items():
        if not isinstance(text, str) or not text:
            usage_error(f"{where}: {key} is required, as a text")
    call, value, tokens, details = row.get("call"), row.get("value"), row.get("token_values"), row.get("details")
    if call is not None and not _is(call, str, int):
        usage_error(f"{where}: call is the id of a call, or its index")
    if value is not None and not (_is(value, int, float) and math.isfinite(value)):
        usage_error(f"{where}: value is a number")
    if tokens is not None and not (isinstance(tokens, list) and all(_is(one, int, float) for one in tokens)):
        usage_error(f"{where}: token_values is a list of numbers")
    if details is not None and not isinstance(details, dict):
        usage_error(f"{where}: details is an object")
    try:
        chain = bytes.fromhex(row.get("chain_sha256", ""))
    except (ValueError, TypeError):
        usage_error(f"{where}: chain_sha256 is hexadecimal")
    annotation = Annotation(
        **named,
        call_id=call if isinstance(call, str) else None,
        value=None if value is None else float(value),
        token_values=np.asarray(tokens, np.float32) if tokens else None,
        details=details or {},
        chain_sha256=chain,
    )
    return Line(annotation, call)


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


async def _with_ids(ps: Penstock, rollout_id: str, lines: list[Line]) -> list[Annotation]:
    """Returns the annotations, whose calls have their ids. Raises NotFound `CALL_UNKNOWN`."""
    ids: dict[int, str] = {}
    if any(isinstance(line.call, int) for line in lines):
        trajectory = await ps.rollouts.trajectory(rollout_id)
        ids = {call.index: call.call_id for call in trajectory.calls}
    found = []
    for line in lines:
        one = line.annotation
        if isinstance(line.call, int):
            if line.call not in ids:
                message = f"rollout {rollout_id} has no call {line.call}; it has {len(ids)}, from 0"
                raise NotFound(message, reason="CALL_UNKNOWN")
            one = replace(one, call_id=ids[line.call])
        found.append(one)
    return found
