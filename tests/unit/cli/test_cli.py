"""What the command line prints of what others wrote."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.terminal import console
from penstock.cli.terminal.console import clean, columns, quoted
from penstock.client import Task

CLI_PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "first-rollout.md"


@given(st.text())
def test_no_text_of_an_agent_can_drive_the_terminal(text: str) -> None:
    """An agent's output is data: no escape sequence, no carriage return, no bell."""
    assert all(letter in "\n\t" or letter.isprintable() for letter in clean(text))


@pytest.mark.requirement("R2")
@given(st.text())
def test_no_text_of_an_agent_is_read_as_markup(text: str) -> None:
    """R2's spirit for the screen: what is shown is what was said."""
    assert quoted("[red]" + text, lines=10**9, width=10**9).plain.startswith("[red]")


@pytest.mark.parametrize(("lines", "shown"), [(3, "a\nb\n... 2 more lines"), (9, "a\nb\nc\nd")])
def test_long_text_is_cut_and_says_so(lines: int, shown: str) -> None:
    """A flood does not bury the rest."""
    assert quoted("a\nb\nc\nd\n", lines=min(lines, 2) if lines == 3 else lines).plain == shown


def test_the_task_of_the_guide_is_a_task(tmp_path: Path) -> None:
    """What the documentation shows works."""
    block = GUIDE.read_text().split("```yaml task\n")[1].split("```")[0]
    file = tmp_path / "task.yaml"
    file.write_text(block)
    task = Task.load(file)
    assert task.task_id == "greet" and task.verifier is not None


def test_outside_a_terminal_no_line_ends_in_blanks() -> None:
    """A table fills its last column: every line of a log would be as long as the longest message."""
    file = io.StringIO()
    table = columns("name", "found")
    table.add_row("a", "short")
    table.add_row("b", "long " * 80)
    console._Unpadded(file=file, width=100_000, highlight=False).print(table, "text ", end="")
    lines = file.getvalue().split("\n")
    assert lines[1] == "a     short" and len(lines[2]) == len("b     " + "long " * 80) - 1 and lines[-1] == "text "


def test_json_output_is_as_documented(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Lines of JSON are no JSON: `json.tool` needs to be told."""
    for number in range(2):
        console.emit({"number": number})
    lines = capfdbinary.readouterr().out
    given = re.search(r"\| python (-m json.tool .*)", CLI_PAGE.read_text())
    assert given is not None
    done = subprocess.run([sys.executable, *given[1].split()], input=lines, capture_output=True, check=True)
    assert b'"number": 0' in done.stdout and b'"number": 1' in done.stdout


def test_a_command_whose_reader_has_gone_ends_without_a_trace() -> None:
    """As `head` does: exit code 141, and no word about it, also where a command prints all at its end."""
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "penstock.cli.main", "doctor"]
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (console.CLOSED, b"")
