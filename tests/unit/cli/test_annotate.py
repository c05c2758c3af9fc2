"""What a line of `penstock annotate --file` may be."""

import re
from pathlib import Path

import pytest

from penstock.cli.commands.grades.annotate import read_lines


@pytest.mark.requirement("R135")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "line 1 of .* is no object"),
        ("{", "is not JSON"),
        ('{"value": 1, "score": 2}', "unknown score; there are name"),
        ('{"valeu": 1}', r"unknown valeu; did you mean value\? there are name"),
        ('{"value": 1, "author": ""}', "author is required"),
        ('{"value": "high"}', "value is a number"),
        ('{"value": 1, "call": true}', "call is the id of a call"),
        ('{"token_values": ["1"]}', "token_values is a list of numbers"),
        ('{"details": []}', "details is an object"),
        ('{"value": 1, "chain_sha256": "x"}', "chain_sha256 is hexadecimal"),
    ],
)
def test_an_invalid_line_ends_the_command_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    file = tmp_path / "f"
    file.write_text(line)
    with pytest.raises(SystemExit) as ended:
        list(read_lines(file, "helpful", "judge"))
    assert ended.value.code == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


@pytest.mark.requirement("R135")
def test_a_line_without_name_and_author_has_those_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text('{"value": 1, "call": 2}\n\n{"name": "n", "author": "a", "call": "c0", "token_values": [1]}\n')
    first, second = read_lines(file, "helpful", "judge")
    assert (first.annotation.name, first.annotation.author, first.call) == ("helpful", "judge", 2)
    assert (second.annotation.name, second.annotation.author, second.annotation.call_id) == ("n", "a", "c0")
    assert second.annotation.token_values is not None and second.annotation.token_values.tolist() == [1.0]
