"""The scripted engine: answers from a file, for tests of trainers and agents without a model."""

from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.scripted.engine import ScriptedEngine

__all__ = ["EngineOptions", "ScriptedEngine", "open_engine"]


async def open_engine(options: EngineOptions) -> ScriptedEngine:
    """The entry point `scripted` of the group `penstock.inference.engines`."""
    return await ScriptedEngine.open(options)
