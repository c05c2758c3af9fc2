"""Assembles the service: one engine, the receivers of its weights, and their servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import structlog

from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.health import Draining
from penstock_chassis.membership import members
from penstock_chassis.membership.peers import Peers, following
from penstock_chassis.server import Service
from penstock_chassis.tls import ClientTls
from penstock_codec.codec import Codec
from penstock_codec.errors import CodecError
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.clients.weight_handover import WeightHandover
from penstock_inference.engines.base import Engine, EngineOptions
from penstock_inference.engines.registry import open_engine
from penstock_inference.replicas.devices import open_replicas
from penstock_inference.rpc.inference_service import FEATURES, REGISTER, SERVICE, InferenceServicer
from penstock_inference.settings import InferenceSettings
from penstock_inference.weights.adapters import AdapterUploads
from penstock_inference.weights.kept import KeptPushes
from penstock_inference.weights.manager import WeightUpdates
from penstock_inference.weights.model_files import TokenizerDirectory
from penstock_inference.weights.transfers import Transfers
from penstock_inference.weights.uploads import Uploads, workspace

_ANYONE = (Role.TRAINER, Role.OBSERVER)
ROLES = {
    # Trainers drive the engine; observers read its state.
    SERVICE: (Role.TRAINER,),
    f"{SERVICE}/GetInfo": _ANYONE,
    f"{SERVICE}/GetTokenizer": _ANYONE,
    f"{SERVICE}/ListAdapters": _ANYONE,
    f"{SERVICE}/WatchStats": _ANYONE,
}

_log = structlog.get_logger("penstock.inference")


@asynccontextmanager
async def build(settings: InferenceSettings) -> AsyncIterator[Service]:
    """Open everything that the settings name, and yield the server's parts."""
    files = await asyncio.to_thread(TokenizerDirectory.read, settings.model_dir)
    codec = await asyncio.to_thread(_load_codec, settings.model_dir, settings.tool_call_parser)
    async with AsyncExitStack() as stack:
        work_dir = stack.enter_context(workspace(settings.state_dir))
        engine = await _engine(settings, settings.engine_settings(work_dir))
        stack.push_async_callback(engine.aclose)
        uploads = Uploads(settings.max_update_bytes, settings.update_idle_s)
        kept = await asyncio.to_thread(_kept, settings, work_dir) if settings.pool_members else None
        updates = WeightUpdates(engine, uploads, settings.weights_dir, work_dir, kept)
        stack.push_async_callback(updates.aclose)
        adapters = AdapterUploads(engine, uploads, settings.adapters_dir, work_dir)
        stack.push_async_callback(adapters.aclose)
        transfers = Transfers(engine)
        stack.push_async_callback(transfers.aclose)
        servicer = InferenceServicer(
            engine, files, codec, updates, adapters, transfers, settings.weights_namespace, settings.quotas()
        )
        stack.enter_context(servicer.health.reported())
        home = settings.home()
        if kept is not None:
            peers = await stack.enter_async_context(_pool(settings))
            await stack.enter_async_context(_running(WeightHandover(home.name, peers, engine, kept, adapters)))
        yield Service(
            registrations=[(servicer, REGISTER)],
            roles=ROLES,
            features=FEATURES,
            draining=Draining(servicer.served.take, servicer.served.count),
            troubles=servicer.health.troubles,
            home=home,
        )


@asynccontextmanager
async def _running(handover: WeightHandover) -> AsyncIterator[None]:
    """A service that cannot see the other engines any more ends: the next process can."""
    async with asyncio.TaskGroup() as whole:
        work = whole.create_task(handover.follow(), name="weight handover")
        yield
        work.cancel()


def _kept(settings: InferenceSettings, work_dir: Path) -> KeptPushes:
    directory = work_dir / "kept"
    directory.mkdir()
    return KeptPushes(directory, 2 * settings.max_update_bytes)


def _pool(settings: InferenceSettings) -> AbstractAsyncContextManager[Peers]:
    secret = settings.pool_token or settings.operator_token
    tls = None if settings.pool_ca is None else ClientTls(settings.pool_ca)

    def dial(member: members.Member) -> grpc.aio.Channel:
        token = None if secret is None else secret.get_secret_value()
        return connect(member.address, token, tls, certified=member.certified)

    return following("inference", members.parse(settings.pool_members), dial)


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


def _load_codec(directory: Path, parser: str | None) -> Codec | None:
    """Load the codec of a model directory; None, with the reason logged, if that fails: token ids can be served still.

    Raises FailedPrecondition when a parser was requested and none is possible.
    """
    try:
        return Codec.load(TokenizerFiles.from_directory(directory), parser=parser)
    except CodecError as error:
        if parser is not None:
            raise FailedPrecondition(f"tool_call_parser {parser!r}: {error}", reason=error.reason) from error
        _log.info("no codec: Render, Parse and chat prompts are off", reason=error.reason, detail=str(error))
        return None
