"""The tree of commands of `penstock`, and what docs/cli.md promises of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import typer
from tests.unit.docs.pages import tables, words

from penstock.cli.main import app


def commands() -> dict[str, Any]:
    """Every command that can be run, by its words; a group that runs without a further word is one, too."""
    return dict(_commands(typer.main.get_command(app), ()))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if path and (not below or command.invoke_without_command):
        yield " ".join(path), command
    for name, item in below.items():
        yield from _commands(item, (*path, name))


def json_shapes() -> dict[str, list[set[str]]]:
    """The keys of the lines that a command prints with `--json`, by command."""
    found: dict[str, list[set[str]]] = {}
    for row in tables("docs/cli.md")["JSON"]:
        for name in re.findall(r"`([^`]+)`", row["command"]):
            found.setdefault(name, []).append(words(row["keys"]))
    return found


def json_lines(command: str, out: str) -> list[dict[str, Any]]:
    """What a command printed, each line an object of a documented shape."""
    lines = [orjson.loads(line) for line in out.splitlines()]
    for line in lines:
        assert set(line) in json_shapes()[command], (command, line.keys())
    return lines
