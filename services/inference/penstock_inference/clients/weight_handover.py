"""Hands weights and adapters in force on to engines of the same pool that came with older ones or with none.

It is done by their own UpdateWeights and LoadAdapter. Of those that have the newest, the first by name does it. A
trainer's own push to such an engine comes first: an engine takes one push at a time, and has a few seconds to get the
trainer's. Adapters go to engines with the same weights only, and not if an engine has unloaded them since: one that was
cut off meanwhile would bring them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc
from penstock_chassis.auth import acting_in
from penstock_chassis.channel import error_from_rpc, send
from penstock_chassis.errors import PenstockError
from penstock_chassis.membership.peers import Peer, Peers, State
from penstock_inference.domain.namespaces import parted
from penstock_inference.domain.weights import UpdateFormat
from penstock_inference.engines.base import Engine
from penstock_inference.weights.adapters import AdapterUploads, KeptAdapter
from penstock_inference.weights.kept import KeptPush, KeptPushes
from penstock_inference.weights.uploads import CHUNK_BYTES

LOOK_EVERY_S: Final = 2.0
BEHIND_S: Final = 5.0
"""How long an engine must have had older weights."""
_ASK_S: Final = 1.5
_PUSH_S: Final = 3600.0
_FORMATS: Final = {
    UpdateFormat.FULL: pb.WEIGHT_FORMAT_SAFETENSORS,
    UpdateFormat.DELTA: pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL,
}
_PAGE: Final = 1000
_log = structlog.get_logger("penstock.inference")

_Name = tuple[str, str]
"""An adapter's namespace and name."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """Versions of another engine's adapters."""

    loaded: Mapping[_Name, int]
    unloaded: Mapping[_Name, int]


class WeightHandover:
    """Looks after the other engines of a pool.

    Args:
        own_name: this engine's.
        peers: the engines of the pool, this one included.
        engine: whose weights they should have.
        kept: the pushes that made them.
        adapters: the adapters that they should have.
    """

    def __init__(self, own_name: str, peers: Peers, engine: Engine, kept: KeptPushes, adapters: AdapterUploads) -> None:
        self._own_name = own_name
        self._peers = peers
        self._engine = engine
        self._kept = kept
        self._adapters = adapters
        self._behind_since: dict[Peer, float] = {}
        self._lacking_since: dict[tuple[Peer, _Name], float] = {}

    async def follow(self) -> None:
        """Never returns; cancel it. Raises what breaks the probes."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._peers.until_broken())
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            number = self._peers.changed.number
            await self._look()
            await self._peers.changed.wait(number, LOOK_EVERY_S)

    async def _look(self) -> None:
        try:
            version = self._engine.info().policy_version
        except PenstockError:
            return  # it is lost, and has nothing to hand on until it is found
        # Else other weights are in force than those of a push, or none were kept.
        has_weights = self._kept.newest == version
        adapters = {parted(one.name): one for one in self._adapters.kept()}
        if not (has_weights or adapters):
            return
        others = [peer for peer in self._peers.all() if peer.state is State.SERVING and peer.own_name != self._own_name]
        versions = dict(zip(others, await asyncio.gather(*map(_version_of, others)), strict=True))
        if has_weights:
            await self._look_at_weights(version, versions)
        if adapters:
            await self._look_at_adapters(adapters, [peer for peer, has in versions.items() if has == version])

    async def _look_at_weights(self, version: int, versions: Mapping[Peer, int | None]) -> None:
        now = asyncio.get_running_loop().time()
        behind = {peer: has for peer, has in versions.items() if has is not None and has < version}
        self._behind_since = {peer: self._behind_since.get(peer, now) for peer in behind}
        equals = [peer.own_name for peer, has in versions.items() if has is not None and has >= version]
        if any(name < self._own_name for name in equals):
            return
        await asyncio.gather(
            *(self._give(peer, has) for peer, has in behind.items() if now >= self._behind_since[peer] + BEHIND_S)
        )

    async def _look_at_adapters(self, adapters: Mapping[_Name, KeptAdapter], peers: list[Peer]) -> None:
        lists = dict(zip(peers, await asyncio.gather(*map(_adapters_of, peers)), strict=True))
        listed = {peer: found for peer, found in lists.items() if found is not None}
        lacking: dict[Peer, list[_Name]] = {}
        for name, kept in adapters.items():
            has = {peer: found.loaded.get(name, -1) for peer, found in listed.items()}
            is_unloaded = any(found.unloaded.get(name, -1) >= kept.version for found in listed.values())
            if is_unloaded or any(v >= kept.version and peer.own_name < self._own_name for peer, v in has.items()):
                continue
            for peer in (peer for peer, v in has.items() if v < kept.version):
                lacking.setdefault(peer, []).append(name)
        now = asyncio.get_running_loop().time()
        since = {(peer, name): now for peer, names in lacking.items() for name in names}
        self._lacking_since = {key: self._lacking_since.get(key, now) for key in since}
        due = {key for key, first in self._lacking_since.items() if now >= first + BEHIND_S}
        await asyncio.gather(
            *(
                self._give_adapters(peer, {name: adapters[name] for name in names if (peer, name) in due})
                for peer, names in lacking.items()
            )
        )

    async def _give(self, peer: Peer, has: int) -> None:
        stub: Any = pb_grpc.InferenceServiceStub(peer.channel)
        for push in self._kept.since(has):
            try:
                await send(stub.UpdateWeights, _frames(push), timeout=_PUSH_S)
            except grpc.aio.AioRpcError as error:
                reason = error_from_rpc(error).reason
                _log.warning("weights were not handed on", name=peer.name, policy_version=push.version, reason=reason)
                return
            except FileNotFoundError:  # a newer push has replaced it
                return
            except OSError as error:
                reason = type(error).__name__
                _log.warning("weights were not handed on", name=peer.name, policy_version=push.version, reason=reason)
                return
            _log.info("weights were handed on", name=peer.name, policy_version=push.version)

    async def _give_adapters(self, peer: Peer, adapters: Mapping[_Name, KeptAdapter]) -> None:
        stub: Any = pb_grpc.InferenceServiceStub(peer.channel)
        for (namespace, name), kept in adapters.items():
            about = {"name": peer.name, "adapter": name, "namespace": namespace, "policy_version": kept.version}
            try:
                with acting_in(namespace):
                    await send(stub.LoadAdapter, _adapter_frames(name, kept), timeout=_PUSH_S)
            except grpc.aio.AioRpcError as error:
                _log.warning("an adapter was not handed on", reason=error_from_rpc(error).reason, **about)
            except FileNotFoundError:  # it was replaced or unloaded
                continue
            except OSError as error:
                _log.warning("an adapter was not handed on", reason=type(error).__name__, **about)
            else:
                _log.info("an adapter was handed on", **about)


async def _adapters_of(peer: Peer) -> _Listed | None:
    """None = it does not answer, or has no adapters at all."""
    stub: Any = pb_grpc.InferenceServiceStub(peer.channel)
    loaded: dict[_Name, int] = {}
    unloaded: dict[_Name, int] = {}
    request = pb.ListAdaptersRequest(page_size=_PAGE, all_namespaces=True)
    while True:
        try:
            answer: pb.ListAdaptersResponse = await stub.ListAdapters(request, timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None
        loaded |= {(one.namespace, one.name): one.policy_version for one in answer.adapters}
        unloaded |= {(one.namespace, one.name): one.policy_version for one in answer.unloaded}
        if not answer.next_page_token:
            return _Listed(loaded, unloaded)
        request.page_token = answer.next_page_token


async def _version_of(peer: Peer) -> int | None:
    stub: Any = pb_grpc.InferenceServiceStub(peer.channel)
    try:
        answer: pb.GetInfoResponse = await stub.GetInfo(pb.GetInfoRequest(), timeout=_ASK_S)
    except grpc.aio.AioRpcError:
        return None
    return answer.policy_version


async def _frames(push: KeptPush) -> AsyncIterator[pb.UpdateWeightsRequest]:
    frame = pb.UpdateWeightsRequest
    begin = frame.UpdateBegin(policy_version=push.version, format=_FORMATS[push.update_format], path=push.path)
    if push.file is not None:
        begin.size_bytes, begin.sha256 = push.size, push.digest
    yield frame(begin=begin)
    if push.file is not None:
        async for chunk in _chunks(push.file):
            yield frame(chunk=chunk)
    yield frame(commit=frame.UpdateCommit(sha256=push.digest))


async def _adapter_frames(name: str, kept: KeptAdapter) -> AsyncIterator[pb.LoadAdapterRequest]:
    frame = pb.LoadAdapterRequest
    begin = frame.AdapterBegin(name=name, policy_version=kept.version, path=kept.path)
    if not kept.path:
        config = kept.directory / "adapter_config.json"
        begin.adapter_config_json = await asyncio.to_thread(config.read_text, "utf-8")
    yield frame(begin=begin)
    if not kept.path:
        async for chunk in _chunks(kept.directory / "adapter_model.safetensors"):
            yield frame(chunk=chunk)
    yield frame(commit=frame.AdapterCommit(sha256=kept.digest))


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    source = await asyncio.to_thread(file.open, "rb")
    try:
        while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield chunk
    finally:
        await asyncio.to_thread(source.close)
