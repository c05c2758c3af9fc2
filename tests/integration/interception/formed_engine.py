"""A scripted engine that declares structured output, as another package would add it: what reaches an engine shows.

It samples nothing, so nothing is held to a form; what it was asked for comes back as `sampling_used`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from penstock_inference.engines.base import EngineInfo, EngineOptions, GenerateEvent, GenerateRequest
from penstock_inference.testing import ScriptedEngine


class FormedEngine(ScriptedEngine):
    """Scripted, with one capability more."""

    def info(self) -> EngineInfo:
        """What it says that it can do."""
        info = super().info()
        return replace(info, engine="formed", capabilities=replace(info.capabilities, structured_output=True))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Fails inside on a schema that says so, as engines did on some schemas."""
        if "fails inside" in str(request.sampling.response_format):
            raise RuntimeError("the schema's compiler failed")
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


async def open_engine(options: EngineOptions) -> ScriptedEngine:
    """The entry point."""
    return await FormedEngine.open(options)


def install(directory: Path) -> None:
    """A distribution that names this module; put the directory on the path."""
    info = directory / "penstock_test_formed-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-test-formed\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[penstock.inference.engines]\nformed = {__name__}:open_engine\n")
