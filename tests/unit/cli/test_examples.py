"""The examples in the help of every command: there is one, and the program takes it as it is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.support.terminal.commandline import commands

from penstock.cli.examples import EXAMPLES
from penstock.cli.main import app
from penstock_demo.command import parse

GROUPS = {"", "agents", "eval", "openenv", "rewards", "tasks"}


@cache
def program() -> Any:
    """The tree of commands."""
    return typer.main.get_command(app)


def found(words: list[str]) -> tuple[str, Any]:
    """The command that a command line begins with, whose words are removed, and its name."""
    command, name = program(), ["penstock"]
    while (below := getattr(command, "commands", {})) and words and not words[0].startswith("-"):
        name.append(words.pop(0))
        command = below[name[-1]]
    return " ".join(name), command


def shown(name: str) -> list[str]:
    """The examples that a command's help ends with, lines that a backslash joins as one."""
    called, command = found(name.split())
    context = command.make_context(called, [], resilient_parsing=True, terminal_width=80)
    _, head, after = command.get_help(context).partition("\n  Examples:\n")
    assert head, f"{name}: no examples"
    text = after.split("\n\n")[0]
    assert max(map(len, text.splitlines())) <= 80, "whole on a narrow terminal"
    return [line.strip() for line in text.replace("\\\n", " ").splitlines()]


def accepted(words: list[str], folder: Path) -> None:
    """Reads a command line as the program does, without running it; a file that it names exists."""
    assert words.pop(0) == "penstock"
    for word in words:
        if re.fullmatch(r"[A-Za-z][\w/.-]*", word):
            path = folder / word
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch() if path.suffix else path.mkdir(exist_ok=True)
    called, command = found(words)
    command.make_context(called, words)


def test_every_command_has_examples() -> None:
    """Not one of a command that is gone, either."""
    assert EXAMPLES.keys() == commands().keys() | GROUPS


@pytest.mark.parametrize("name", EXAMPLES, ids=lambda name: name or "penstock")
def test_every_example_is_taken_as_it_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, options and values: what a reader copies is no wrong usage."""
    monkeypatch.chdir(tmp_path)
    for line in shown(name):
        assert line.startswith(f"penstock {name}".rstrip()), line
        words = shlex.split(re.split(r" [|<>] ", line)[0])
        accepted(words, tmp_path)


@pytest.mark.parametrize("name", ["serve", "demo"])
def test_a_command_that_passes_its_arguments_on_has_its_examples_in_its_help(name: str) -> None:
    """Whichever program answers `--help`."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", name, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in EXAMPLES[name]:
        assert f"  {line}\n" in done.stdout


def test_the_demo_takes_its_examples() -> None:
    """Its options are its own program's."""
    for line in EXAMPLES["demo"]:
        parse(line.split()[2:])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("penstock watch --by hour", "hour"),
        ("penstock rollout --task t.yaml", "agent"),
        ("penstock watch --nothing", "nothing"),
        ("penstock agents shou", "shou"),
    ],
)
def test_an_example_that_the_program_refuses_is_found(line: str, named: str, tmp_path: Path) -> None:
    """Or the tests of the examples would show nothing."""
    with pytest.raises(Exception, match=named):
        accepted(line.split(), tmp_path)
