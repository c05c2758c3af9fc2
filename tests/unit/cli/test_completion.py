"""What a shell is offered: a shell evaluates it, and names are anybody's."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.support.terminal.commands import invoke

from penstock.cli.connections import completion
from penstock.client import Penstock, Unavailable

HOSTILE = [
    r"runs\$(touch pwned)", "runs$(id)", "runs`id`", 'runs"x', "runs'x", "runs;x", "runs|x", "runs&x", "runs>x",
    "runs x", "runs*", "runs\nx", "runs\x1b[2J", "runs~", "runs!x", "runs{a,b}", "runs#x", "runs(x)", "runs\u00e9",
]  # fmt: skip
NOWHERE = {"PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1"}


@pytest.mark.parametrize("shell", ["zsh", "bash", "fish"])
def test_file_name_is_never_code_for_the_completing_shell(shell: str, tmp_path: Path) -> None:
    """zsh evaluates the line that it is given: a file is offered only where its name is harmless."""
    for name in (*HOSTILE, "runs.jsonl"):
        (tmp_path / name).write_text("")
    asked = {
        **NOWHERE,
        "_PENSTOCK_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "penstock replay r",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "penstock replay r",
        "COMP_CWORD": "2",
    }
    code, out, err = invoke(environment=asked, cwd=tmp_path)
    offered = "_arguments '*: :((\"runs.jsonl\"))'" if shell == "zsh" else "runs.jsonl"
    assert (code, out.strip()) == (0, offered), err


@pytest.mark.parametrize("error", [TimeoutError(), Unavailable("the driver is away")])
def test_what_was_found_before_an_error_is_offered(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service with many rollouts may need more time than a completion has; the newest come first."""

    async def names(_: Penstock) -> AsyncGenerator[str, None]:
        yield "runs-b"
        yield "other"
        yield "runs-a"
        raise error

    monkeypatch.setenv("PENSTOCK_DRIVER_ADDRESS", NOWHERE["PENSTOCK_DRIVER_ADDRESS"])
    monkeypatch.setattr(completion, "_rollouts", names)
    assert completion.rollout_ids("runs") == ["runs-b", "runs-a"]


def test_service_name_is_never_code_for_the_completing_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may create a rollout or an agent chooses its name."""

    async def names(_: Penstock) -> AsyncGenerator[str, None]:
        for name in (*HOSTILE, "runs-a/b@1"):
            yield name

    monkeypatch.setenv("PENSTOCK_DRIVER_ADDRESS", NOWHERE["PENSTOCK_DRIVER_ADDRESS"])
    for source in ("_agents", "_rollouts", "_groups"):
        monkeypatch.setattr(completion, source, names)
    for ask in (completion.agent_names, completion.rollout_ids, completion.group_ids):
        assert ask("runs") == ["runs-a/b@1"]
