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
_DONE: Final = "All of it is done."
END: Final = "The number is copied."
PARTS: Final = 4
"""The most parts of a task's work, each of which is a call."""


def next_part(part: int) -> str:
    """What the work says at the end of the part before."""
    return f"now run part {part}."


_SCRIPT: Final[dict[str, Any]] = {
    "strict": False,
    "turns": [
        {"when": {"prompt_contains": _DONE}, "repeat": True, "reply": END},
        *[
            {"when": {"prompt_contains": next_part(part)}, "repeat": True, "reply": bash(f"bash {_WORK_FILE} {part}")}
            for part in reversed(range(2, PARTS + 1))
        ],
        {"when": {"has_tool_result": False}, "repeat": True, "reply": bash(f"bash {_WORK_FILE}")},
        {"repeat": True, "reply": END},
    ],
}


def write(folder: Path) -> None:
    """Write the model's directory `model` and its script `script.yaml` into `folder`."""
    FILES.write(folder / "model")
    (folder / "script.yaml").write_text(yaml.safe_dump(_SCRIPT, sort_keys=False))


def reply(prompt: str) -> str:
    """What the script's policy answers, for a trainer that is one."""
    if _DONE in prompt:
        return END
    for part in reversed(range(2, PARTS + 1)):
        if next_part(part) in prompt:
            return bash(f"bash {_WORK_FILE} {part}")
    return END if "</tool_response>" in prompt else bash(f"bash {_WORK_FILE}")


def task(number: int, work_s: float, environments: int = 1, parts: int = 1) -> Task:
    """A task that earns 1, after half of `work_s` seconds, all of it, or half more, so that ends are spread.

    There are so many `environments`, whose rollouts drivers keep together where there is room. Each of the `parts`, of
    at most PARTS, is a call of the agent's and takes its share of the time; the last one does what is rewarded.
    """
    work_s *= (0.5 + number % 3 / 2) / parts
    nexts = "".join(f"{part - 1}) echo {next_part(part)} ;;\n" for part in range(2, parts + 1))
    last = f"*) cp number.txt out.txt{f'; echo {_DONE}' * (parts > 1)} ;;\n"
    return Task(
        task_id=f"number-{number}",
        instruction=f"Run bash {_WORK_FILE}, please.",
        files=[SeedFile(_WORK_FILE, f"sleep {work_s}\ncase ${{1:-1}} in\n{nexts}{last}esac\n".encode())],
        setup=[Command(shell=f"echo kiwi > number.txt; echo {number % environments} > environment.txt")],
        verifier=Verifier(commands=[Command(shell="cmp number.txt out.txt")]),
    )
