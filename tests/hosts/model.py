"""A policy whose answer depends on the prompt alone, and the task that it solves.

So the outcome of a rollout is known, whatever attempt, gate or engine it ended on: the scripted engine keeps no turn
of a session, and every entry of the script may be used any number of times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml
from tests.support.policy import FILES, bash

from penstock.client import Command, SeedFile, Task, Verifier

_WORK_FILE: Final = "work.sh"
_SCRIPT: Final[dict[str, Any]] = {
    "strict": False,
    "turns": [
        {"when": {"has_tool_result": False}, "repeat": True, "reply": bash(f"bash {_WORK_FILE}")},
        {"repeat": True, "reply": "The number is copied."},
    ],
}


def write(folder: Path) -> None:
    """Write the model's directory `model` and its script `script.yaml` into `folder`."""
    FILES.write(folder / "model")
    (folder / "script.yaml").write_text(yaml.safe_dump(_SCRIPT, sort_keys=False))


def task(number: int, work_s: float) -> Task:
    """A task that earns 1, after half of `work_s` seconds, all of it, or half more, so that ends are spread."""
    work_s *= 0.5 + number % 3 / 2
    return Task(
        task_id=f"number-{number}",
        instruction=f"Run bash {_WORK_FILE}, please.",
        files=[SeedFile(_WORK_FILE, f"sleep {work_s}; cp number.txt out.txt\n".encode())],
        setup=[Command(shell="echo kiwi > number.txt")],
        verifier=Verifier(commands=[Command(shell="cmp number.txt out.txt")]),
    )
