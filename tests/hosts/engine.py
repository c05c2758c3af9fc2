"""The scripted engine, which also logs the token ids of each answer: what trajectories are compared with.

It is registered for the engines of a fleet alone, by metadata of a package that `register` writes beside their state.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock_inference.engines.base import Done, EngineOptions, GenerateEvent, GenerateRequest
from penstock_inference.engines.scripted import ScriptedEngine

NAME: Final = "logged"
OPTION: Final = "answers"
PLUGINS: Final = "plugins"
"""The directory for `register`, below that of a run."""


class LoggedEngine(ScriptedEngine):
    """Appends a line to `answers` for each answer, before the answer leaves."""

    answers: Path

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See ScriptedEngine."""
        async for event in super().generate(request):
            if isinstance(event, Done):
                # CALL.LEASE, and the number of a repetition at another engine.
                call_id, *numbers = request.request_id.split(".")
                if numbers and numbers[0].isdigit():  # not the gate's question whether the engine answers at all
                    log(self.answers, call_id, request.session_id, event.token_ids.tolist())
            yield event


async def open_engine(options: EngineOptions) -> ScriptedEngine:
    """The entry point. The option `answers` names the file of the log; in it {host} stands for the machine's name."""
    others = {name: value for name, value in options.extra.items() if name != OPTION}
    engine = await LoggedEngine.open(replace(options, extra=others))
    assert isinstance(engine, LoggedEngine)
    engine.answers = Path(options.extra[OPTION].replace("{host}", os.uname().nodename))
    return engine


def register(folder: Path) -> None:
    """Write the metadata by which an engine's process finds this engine if `folder` is on its path."""
    metadata = folder / "penstock_hosts_engine-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-hosts-engine\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[penstock.inference.engines]\n{NAME} = tests.hosts.engine:open_engine\n"
    )


def log(answers: Path, call_id: str, session_id: str, token_ids: list[int]) -> None:
    """Add one answer to a log. A gate opens the session of a rollout's attempt under an id that begins with its id."""
    line = json.dumps({"call_id": call_id, "session_id": session_id, "token_ids": token_ids})
    with answers.open("a") as file:
        file.write(line + "\n")


def read(logs: list[Path]) -> dict[str, list[list[int]]]:
    """The answers to each call, by its id. The gate asks for a call again where an answer did not arrive."""
    answers: dict[str, list[list[int]]] = {}
    for answer in _lines(logs):
        answers.setdefault(answer["call_id"], []).append(answer["token_ids"])
    return answers


def sessions(logs: list[Path]) -> dict[str, list[str]]:
    """The ids of the calls that were answered in each session, one for each answer."""
    found: dict[str, list[str]] = {}
    for answer in _lines(logs):
        found.setdefault(answer["session_id"], []).append(answer["call_id"])
    return found


def _lines(logs: list[Path]) -> Iterator[dict[str, Any]]:
    """Whole ones: an engine that was killed may have left a part of one."""
    for log in logs:
        for line in log.read_text().splitlines() if log.exists() else []:
            if line.endswith("}"):
                yield json.loads(line)
