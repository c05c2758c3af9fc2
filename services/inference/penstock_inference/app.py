"""Wiring: one engine, what receives its weights, and the servicer that speaks for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from penstock_chassis.server import Service
from penstock_inference.adapters import AdapterUploads
from penstock_inference.engines.base import Engine, EngineOptions
from penstock_inference.engines.registry import open_engine
from penstock_inference.model_files import TokenizerDirectory
from penstock_inference.replicas.open import open_replicas
from penstock_inference.service import REGISTER, ROLES, InferenceServicer
from penstock_inference.settings import InferenceSettings
from penstock_inference.text import load_codec
from penstock_inference.transfers import Transfers
from penstock_inference.uploads import Uploads
from penstock_inference.weights import WeightUpdates
from penstock_inference.workspace import workspace


@asynccontextmanager
async def build(settings: InferenceSettings) -> AsyncIterator[Service]:
    """Open what the settings name and yield what to serve."""
    files = await asyncio.to_thread(TokenizerDirectory.read, settings.model_dir)
    codec = await asyncio.to_thread(load_codec, settings.model_dir, settings.tool_call_parser)
    async with AsyncExitStack() as stack:
        work_dir = stack.enter_context(workspace(settings.state_dir))
        engine = await _engine(settings, settings.engine_settings(work_dir))
        stack.push_async_callback(engine.aclose)
        uploads = Uploads(settings.max_update_bytes, settings.update_idle_s)
        updates = WeightUpdates(engine, uploads, settings.weights_dir, work_dir)
        stack.push_async_callback(updates.aclose)
        adapters = AdapterUploads(engine, uploads, settings.adapters_dir, work_dir)
        stack.push_async_callback(adapters.aclose)
        transfers = Transfers(engine)
        stack.push_async_callback(transfers.aclose)
        servicer = InferenceServicer(engine, files, codec, updates, adapters, transfers)
        stack.enter_context(servicer.oversight.told())
        yield Service(registrations=[(servicer, REGISTER)], roles=ROLES, troubles=servicer.oversight.troubles)


async def _engine(settings: InferenceSettings, options: EngineOptions) -> Engine:
    if settings.replicas == 1:
        return await open_engine(settings.engine, options)
    return await open_replicas(
        settings.engine,
        options,
        settings.replicas,
        settings.replica_devices,
        settings.log_level,
        settings.log_format,
        settings.replica_silence_s,
    )
