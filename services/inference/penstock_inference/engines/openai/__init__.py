"""The upstream engine: an OpenAI-compatible endpoint on a foreign server, with token ids if it supports them.

`probe` finds out what the endpoint returns when it is first reached, and the engine declares it: token ids with
logprobs, token ids alone, or text alone. Missing data is never made up.
"""

from __future__ import annotations

from penstock_inference.engines.base import Engine, EngineOptions


async def open_engine(options: EngineOptions) -> Engine:
    """The entry point `openai` of the group `penstock.inference.engines`."""
    from penstock_inference.engines.openai.engine import OpenAiEngine

    return await OpenAiEngine.open(options)
