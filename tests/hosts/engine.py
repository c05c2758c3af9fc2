"""The scripted engine, which also logs the token ids of each answer: what trajectories are compared with.

It is registered for the engines of a fleet alone, by metadata of a package that `register` writes beside their state.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock_inference.engines.base import Done, EngineOptions, GenerateEvent, GenerateRequest
from penstock_inference.engines.scripted import ScriptedEngine

NAME: Final = "logged"
_OPTION: Final = "answers"


class LoggedEngine(ScriptedEngine):
    """Appends a line to `answers` for each answer, before the answer leaves."""

    answers: Path

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See ScriptedEngine."""
        async for event in super().generate(request):
            if isinstance(event, Done):
                line = json.dumps({"request_id": request.request_id, "token_ids": event.token_ids.tolist()})
                with self.answers.open("a") as file:
                    file.write(line + "\n")
            yield event


async def open_engine(options: EngineOptions) -> ScriptedEngine:
    """The entry point. The option `answers` names the file of the log."""
    others = {name: value for name, value in options.extra.items() if name != _OPTION}
    engine = await LoggedEngine.open(replace(options, extra=others))
    assert isinstance(engine, LoggedEngine)
    engine.answers = Path(options.extra[_OPTION])
    return engine


def register(folder: Path) -> None:
    """Write the metadata by which an engine's process finds this engine if `folder` is on its path."""
    metadata = folder / "penstock_hosts_engine-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-hosts-engine\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[penstock.inference.engines]\n{NAME} = tests.hosts.engine:open_engine\n"
    )


def read(logs: list[Path]) -> dict[str, list[list[int]]]:
    """The answers to each call, by its id. The gate asks for a call again where an answer did not arrive."""
    answers: dict[str, list[list[int]]] = {}
    for log in logs:
        for line in log.read_text().splitlines() if log.exists() else []:
            answer = json.loads(line)
            call_id, _, lease = answer["request_id"].rpartition(".")
            if lease.isdigit():  # not the gate's question whether the engine answers at all
                answers.setdefault(call_id, []).append(answer["token_ids"])
    return answers
