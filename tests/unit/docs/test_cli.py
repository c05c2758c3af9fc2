"""docs/cli.md is what the program does: exit codes, and the shape of `--json` of every command."""

from __future__ import annotations

from tests.support.terminal.commandline import commands, json_shapes
from tests.unit.docs.pages import tables

from penstock.cli.terminal import console

WITHOUT = {"serve", "demo", "completion", "tasks schema", "mcp"}
"""They print no result: other programs' output, a script, JSON as it is, messages of a protocol."""


def test_the_exit_codes_of_the_command_line_stand_in_their_table() -> None:
    """An exit code is a promise to scripts."""
    found = {name: value for name, value in vars(console).items() if name.isupper() and isinstance(value, int)}
    assert found == {row["name"]: int(row["code"]) for row in tables("docs/cli.md")["Exit codes"]}
    for code in found.values():
        assert f" {code} " in console.EXIT_CODES, "the help tells them, too"


def test_every_command_that_prints_a_result_prints_it_as_json_when_asked() -> None:
    """`--json` everywhere, each shape documented; a command that is added has both or fails here."""
    found = commands()
    assert found.keys() >= WITHOUT
    assert {name for name, command in found.items() if not any("--json" in item.opts for item in command.params)} == (
        WITHOUT
    )
    assert json_shapes().keys() == found.keys() - WITHOUT


def test_every_command_that_talks_to_services_takes_their_state_directory() -> None:
    """`penstock up --state-dir DIR` names the option; a command without it could not reach what that started."""
    without = (WITHOUT - {"mcp"}) | {
        "agents new", "conformance", "credentials", "eval diff", "eval report", "eval show", "tasks build",
        "tasks check", "tasks import", "tasks lock", "tasks new", "verify",
    }  # fmt: skip
    found = {name for name, command in commands().items() if any("--state-dir" in p.opts for p in command.params)}
    assert commands().keys() - found == without
