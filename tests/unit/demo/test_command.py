"""The demo's command line: what it refuses, what its help shows, and what it says to do next."""

from __future__ import annotations

import pytest

from penstock_demo import command


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--agent mini-swe", "there is no agent 'mini-swe'; did you mean mini-swe-agent? there are shell,"),
        ("--agent opencode", "there is no agent 'opencode'; there are shell, mini-swe-agent"),
        ("--credit trun", "there is no credit 'trun'; did you mean turn? there are rollout, turn"),
        ("--agentt x", "unrecognized arguments: --agentt x; did you mean --agent?"),
        ("--xyz", "unrecognized arguments: --xyz\n"),
        ("--agent mini-swe-agent --credit turn", "--credit turn is for --agent shell"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_similar_name(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run's directory is made."""
    with pytest.raises(SystemExit, match="2"):
        command.parse(line.split())
    assert said in capsys.readouterr().err
