"""The SGLang engine: token ids over an SGLang server's own HTTP API, with its weights, adapters and pauses."""

from __future__ import annotations

from penstock_inference.engines.base import Engine, EngineOptions


async def open_engine(options: EngineOptions) -> Engine:
    """The entry point `sglang` of the group `penstock.inference.engines`."""
    from penstock_inference.engines.sglang.engine import SglangEngine

    return await SglangEngine.open(options)
