"""docs/guides/own-repository.md from its first command to its last, as a reader goes through it: as processes.

tests/integration/docs runs the parts of the page one by one; here each has only what came before it on the page.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.integration.docs.blocks import ALL, Block, commands
from tests.support.policy import FILES
from tests.support.services.stack import disjoint_uids

PAGE: Final = "docs/guides/own-repository.md"
SAVED: Final = {"yaml task": "train.yaml", "yaml agent": "fixer.yaml", "python": "train.py"}
"""Where the page tells its reader to save a block; those of one file follow each other."""
UP: Final = "penstock up --engine none"


def page() -> list[Block]:
    """Its blocks in order."""
    return [block for block in ALL if block.page == PAGE]


def follow(blocks: list[Block], folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Saves and runs what the blocks have; returns what each command printed. One that fails fails the test."""
    printed: dict[str, str] = {}
    for block in blocks:
        if block.kind in SAVED:
            with (folder / SAVED[block.kind]).open("a", encoding="utf-8") as file:
                file.write(block.text)
        for command in commands(block) if block.kind == "sh" else ():
            done = subprocess.run(
                ["bash", "-c", command.line],
                cwd=folder,
                env=dict(environment),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command.line}:\n{done.stdout}\n{done.stderr}"
            printed[command.line] = done.stdout
    return printed


@contextmanager
def services(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """The page's first terminal: its command, on free ports, with the tokenizer that only wheels bring."""
    folder.mkdir()
    FILES.write(folder / "tokenizer")
    more = ["--model-dir", str(folder / "tokenizer"), "--free-ports", "--no-dashboard", "--json"]
    more += ["--set", f"sandbox.first_uid={disjoint_uids()}"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*shlex.split(UP), *more], env=dict(environment), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "errors").read_text()
        assert json.loads(line)["services"]["inference"]
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.requirement("R20", "R143")
@pytest.mark.timeout(300)  # a guard: half a minute on two cores that have nothing else to do
def test_a_reader_trains_an_agent_of_his_own_on_a_repository_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last step, where the run's rollouts are listed with the reward of the corrected repository."""
    tmp_path.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "XDG_"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    environment = {**kept, "PATH": path, "XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setenv("PATH", path)
    first, *rest = page()
    assert first.text.strip() == UP
    (reader := tmp_path / "reader").mkdir()
    with services(tmp_path / "services", environment):
        printed = follow(rest, reader, environment)
    assert list(printed)[-2:] == ["python train.py", "penstock watch --run fixer --once"]
    steps = printed["python train.py"].splitlines()
    assert steps[-1].startswith(f"step {len(steps) - 1}: mean reward 1.00 of ")
    listed = [line.split() for line in printed["penstock watch --run fixer --once"].splitlines()]
    rollouts = [words for words in listed if "completed" in words and "fixer" in words]
    assert len(rollouts) >= 8
    assert all("1" in words for words in rollouts[:8]), "the newest ones, whose mean the last step printed"
