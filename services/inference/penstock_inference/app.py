"""Wiring: one engine, what receives its weights, and the servicer that speaks for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock_chassis.server import Service
from penstock_inference.engines.registry import open_engine
from penstock_inference.model_files import TokenizerDirectory
from penstock_inference.service import REGISTER, ROLES, InferenceServicer
from penstock_inference.settings import InferenceSettings
from penstock_inference.text import load_codec
from penstock_inference.weights import WeightUpdates


@asynccontextmanager
async def build(settings: InferenceSettings) -> AsyncIterator[Service]:
    """Open what the settings name and yield what to serve."""
    files = await asyncio.to_thread(TokenizerDirectory.read, settings.model_dir)
    codec = await asyncio.to_thread(load_codec, settings.model_dir, settings.tool_call_parser)
    engine = await open_engine(settings.engine, settings.engine_settings())
    try:
        updates = WeightUpdates(engine, settings.max_update_bytes, settings.update_idle_s)
        servicer = InferenceServicer(engine, files, codec, updates)
        yield Service(registrations=[(servicer, REGISTER)], roles=ROLES)
    finally:
        await engine.aclose()
