"""`penstock branch`: continues a rollout from one of its calls, several times."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.cli.commands.rollout import INTERRUPTED, delegating, see_through
from penstock.cli.connections.completion import recordings
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import run, usage_error
from penstock.client import Message, Reasoning, Replay, Role, Text, ToolCall
from penstock.client.rollouts.handles import created

_SHAPE = 'a JSON object like {"text": "...", "reasoning": "...", "tool_calls": [{"name": "...", "arguments": {...}}]}'


def branch(
    rollout_id: Annotated[
        str, typer.Argument(metavar="ROLLOUT", help="The rollout to continue.", autocompletion=recordings)
    ],
    call: Annotated[str, typer.Argument(metavar="CALL", help="One of its calls: its index from 0, or its id.")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=256, help="How many branches.")] = 1,
    answer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="What that call is answered, instead of being sampled: a text, or a .json file with a message.",
        ),
    ] = None,
    replay: Annotated[
        Replay,
        typer.Option(help="exact: a branch whose agent asks something else before that call fails."),
    ] = Replay.EXACT,
    train_prefix: Annotated[bool, typer.Option(help="Train what the rollout sampled before that call too.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the first branch, counted up for each further one; default: that of the rollout, if any.",
        ),
    ] = None,
    delegate: Annotated[
        bool, typer.Option(help="Have the branches' model source answer, as `penstock rollout` does; or a trainer.")
    ] = True,
    save: Annotated[Path, typer.Option(help="Directory for trajectories and artifacts.")] = Path("runs/rollouts"),
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Continue a rollout from one of its calls: each branch is answered alike up to there."""
    given = None if answer is None else read_answer(answer)
    group_id = f"{rollout_id[:90]}-b{secrets.token_hex(4)}"

    async def work() -> int:
        async with services(state_dir=state_dir) as ps, delegating(ps, {"group_id": group_id}, needed=delegate):
            branching = ps.rollouts.branch(
                rollout_id,
                int(call) if call.isdecimal() else call,
                n,
                answer=given,
                group_id=group_id,
                train_prefix=train_prefix,
                replay=replay,
                seed=seed,
            )
            group = await created(branching, INTERRUPTED)
            return await see_through(ps, group, n, save, as_json, f"branches: {group.group_id}")

    run(work())


def read_answer(path: Path) -> Message:
    """Reads an assistant's message. One that cannot be read ends the program."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        usage_error(f"--answer: {path} cannot be read: {error}")
    if path.suffix != ".json":
        return Message.of(Role.ASSISTANT, text)
    try:
        return _message(orjson.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        usage_error(f"--answer: {path} is not {_SHAPE}: {error!r}")


def _message(value: dict[str, Any]) -> Message:
    unknown = set(value) - {"text", "reasoning", "tool_calls"}
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    parts: list[Any] = [Reasoning(value["reasoning"])] if "reasoning" in value else []
    parts += [Text(value["text"])] if "text" in value else []
    for number, item in enumerate(value.get("tool_calls", [])):
        arguments = orjson.dumps(item.get("arguments", {})).decode()
        parts.append(ToolCall(item.get("id", f"given_{number}"), item["name"], arguments))
    if not parts:
        raise ValueError("it is empty")
    return Message(Role.ASSISTANT, tuple(parts))
