"""Engines of one pool hand pushed weights on to those that come later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save
from tests.support.services import engines
from tests.support.services.engines import RunningEngine
from tests.support.waiting import GUARD_S, eventually, eventually_async

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.auth import Role, acting_in
from penstock_chassis.membership import peers
from penstock_inference.clients import weight_handover
from penstock_inference.engines.base import EngineInfo, EngineOptions, PauseMode, UpdateFormat
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.testing import random_config, random_tensors, write_model
from penstock_inference.weights.kept import KeptPush, KeptPushes

CONFIG = random_config()
OPERATOR = "operator-token-1"
PROMPT = np.array([5, 6, 7], "<i4")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts seconds lasts moments."""
    monkeypatch.setattr(peers, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(weight_handover, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(weight_handover, "BEHIND_S", 0.1)


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts numpy engines of one pool, all with the weights of their model directory."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    file = tmp_path / "engines.json"
    file.write_text("{}")
    known: dict[str, str] = {}
    async with engines.launching(tmp_path, model, {Role.OPERATOR: OPERATOR}) as started:

        async def launched(name: str, **settings: Any) -> RunningEngine:
            given = {"engine": "numpy", "engine_options": {}, "pool_members": f"file:{file}", "pool_token": OPERATOR}
            engine: RunningEngine = await started(name, **{**given, **settings})
            known[name] = engine.address
            file.with_suffix(".new").write_text(json.dumps(known))
            file.with_suffix(".new").replace(file)
            return engine

        yield launched


async def push(
    engine: RunningEngine, version: int, tensors: Mapping[str, NDArray[np.float32]], *, partial: bool = False
) -> None:
    """As a trainer does it."""
    data = save(dict(tensors))
    kind = pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL if partial else pb.WEIGHT_FORMAT_SAFETENSORS
    frame = pb.UpdateWeightsRequest

    async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield frame(begin=frame.UpdateBegin(policy_version=version, format=kind))
        for start in range(0, len(data), 1 << 20):
            yield frame(chunk=data[start : start + (1 << 20)])
        yield frame(commit=frame.UpdateCommit(sha256=sha256(data).digest()))

    await engine.stub.UpdateWeights(frames())


async def version(engine: RunningEngine) -> int:
    info: pb.GetInfoResponse = await engine.stub.GetInfo(pb.GetInfoRequest())
    return info.policy_version


async def scores(engine: RunningEngine) -> bytes:
    """Tells one set of weights from another."""
    answer: pb.ScoreResponse = await engine.stub.Score(pb.ScoreRequest(token_ids=PROMPT.tobytes(), start=1))
    return answer.logprobs


@pytest.mark.requirement("R117")
async def test_a_newcomer_gets_the_weights_in_force_from_another_engine(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors, and then the ones that were pushed after: it computes the same as the others."""
    monkeypatch.setattr(weight_handover, "BEHIND_S", GUARD_S)  # the trainer pushes first
    e0, e1 = await launch("e0"), await launch("e1")
    new = random_tensors(CONFIG, seed=1)
    some = {name: value * 2 for name, value in new.items() if "norm" in name}
    for engine in (e0, e1):
        await push(engine, 1, new)
        await push(engine, 2, some, partial=True)
    before = await scores(e0)
    monkeypatch.setattr(weight_handover, "BEHIND_S", 0.1)
    await e0.stop()
    e2 = await launch("e2")

    async def has_caught_up() -> bool:
        return await version(e2) == 2

    await eventually_async(has_caught_up, "the newcomer has version 2")
    assert await scores(e2) == before == await scores(e1)


@pytest.mark.requirement("R117")
async def test_an_engine_that_missed_a_push_gets_it(launch: Any) -> None:
    """The weights of one push reach the engines that a trainer did not."""
    e0, e1 = await launch("e0"), await launch("e1")
    await push(e1, 1, random_tensors(CONFIG, seed=1))

    async def has_it() -> bool:
        return await version(e0) == 1

    await eventually_async(has_it, "e0 has version 1")
    assert await scores(e0) == await scores(e1)
    await push(e1, 1, random_tensors(CONFIG, seed=1))


async def test_pushes_are_kept_from_the_last_full_one_within_a_limit(tmp_path: Path) -> None:
    """What cannot lead an engine to the weights in force is not handed to it."""
    kept = KeptPushes(tmp_path, 10)

    async def add(version: int, base: int, kind: UpdateFormat, data: bytes) -> None:
        await kept.add(KeptPush(version, base, kind, b"", await kept.stage(data)))

    def since(version: int) -> list[int]:
        return [push.version for push in kept.since(version)]

    await add(3, 2, UpdateFormat.DELTA, b"aa")
    assert (since(2), since(1), since(3), kept.newest) == ([3], [], [], 3)
    await add(4, 3, UpdateFormat.DELTA, b"bb")
    assert (since(2), since(3)) == ([3, 4], [4])
    await add(5, 4, UpdateFormat.FULL, b"cccc")
    await add(6, 5, UpdateFormat.DELTA, b"dd")
    assert (since(0), since(5)) == ([5, 6], [6])
    assert len(list(tmp_path.iterdir())) == 2
    await add(9, 8, UpdateFormat.DELTA, b"e")
    assert (since(0), kept.newest, list(tmp_path.iterdir())) == ([], None, [])
    await add(10, 9, UpdateFormat.FULL, b"more than ten")
    assert (since(0), kept.newest, list(tmp_path.iterdir())) == ([], None, [])


class AdapterEngine(NumpyEngine):
    """numpy has no adapters: this one keeps their files' content, and refuses what is not newer."""

    loaded: dict[str, tuple[int, str, bytes]]

    def info(self) -> EngineInfo:
        info = super().info()
        return replace(info, capabilities=replace(info.capabilities, adapters=True))

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        assert source.policy_version > self.loaded.get(source.name, (-1,))[0]
        config = (source.directory / "adapter_config.json").read_text()
        content = (source.directory / "adapter_model.safetensors").read_bytes()
        self.loaded[source.name] = (source.policy_version, config, content)
        return AdapterInfo(source.name, source.policy_version, 1)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(AdapterInfo(name, found[0], 1) for name, found in sorted(self.loaded.items()))


@pytest.fixture
def with_adapters(monkeypatch: pytest.MonkeyPatch) -> list[AdapterEngine]:
    """Engines that have adapters, in the order of their starts."""
    opened: list[AdapterEngine] = []

    async def open_engine(_name: str, options: EngineOptions) -> NumpyEngine:
        engine = await AdapterEngine.open(options)
        assert isinstance(engine, AdapterEngine)
        engine.loaded = {}
        opened.append(engine)
        return engine

    monkeypatch.setattr("penstock_inference.app.open_engine", open_engine)
    return opened


async def load(engine: RunningEngine, name: str, version: int, *, path: str = "", namespace: str | None = None) -> None:
    """As a trainer does it; the content of the file is its name and version."""
    data = f"{name} {version}".encode()
    frame = pb.LoadAdapterRequest

    async def frames() -> AsyncIterator[pb.LoadAdapterRequest]:
        config = "" if path else '{"r": 1}'
        yield frame(begin=frame.AdapterBegin(name=name, policy_version=version, adapter_config_json=config, path=path))
        if not path:
            yield frame(chunk=data)
        yield frame(commit=frame.AdapterCommit(sha256=b"" if path else sha256(data).digest()))

    with acting_in(namespace):
        await engine.stub.LoadAdapter(frames())


@pytest.mark.requirement("R117")
async def test_a_newcomer_gets_the_adapters_in_force_with_their_weights(
    launch: Any, with_adapters: list[AdapterEngine], tmp_path: Path
) -> None:
    """Of all namespaces, as files and by path, in their newest versions, for the same weights."""
    named = tmp_path / "adapters" / "on-disk"
    named.mkdir(parents=True)
    (named / "adapter_config.json").write_text("{}")
    (named / "adapter_model.safetensors").write_bytes(b"on disk")
    e0 = await launch("e0", adapters_dir=named.parent)
    await push(e0, 1, random_tensors(CONFIG, seed=1))
    await load(e0, "one", 1)
    await load(e0, "one", 2)
    await load(e0, "two", 5, namespace="team-a")
    await load(e0, "three", 3, path="on-disk")
    e1 = await launch("e1", adapters_dir=named.parent)
    wanted = {
        "one": (2, '{"r": 1}', b"one 2"),
        "team-a/two": (5, '{"r": 1}', b"two 5"),
        "three": (3, "{}", b"on disk"),
    }
    await eventually(lambda: with_adapters[1].loaded == wanted, "the newcomer has all adapters")
    assert await version(e1) == 1
    await load(e1, "one", 3)
    await eventually(lambda: with_adapters[0].loaded["one"][0] == 3, "a newer version goes to the engine without it")


@pytest.mark.requirement("R117")
async def test_an_adapter_that_was_unloaded_is_not_brought_back(
    launch: Any, with_adapters: list[AdapterEngine]
) -> None:
    """Not by an engine that still has it because nobody told it; one that is loaded again is handed on."""
    e0, e1 = await launch("e0"), await launch("e1")
    await load(e0, "gone", 1)
    await load(e0, "kept", 1)
    await eventually(lambda: len(with_adapters[1].loaded) == 2, "e1 has both")
    await e1.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="gone"))
    (unloaded,) = (await e1.stub.ListAdapters(pb.ListAdaptersRequest())).unloaded
    assert (unloaded.name, unloaded.policy_version) == ("gone", 1)
    await launch("e2")
    await eventually(lambda: set(with_adapters[2].loaded) == {"kept"}, "e2 has what no engine unloaded")
    assert set(with_adapters[1].loaded) == {"kept"}
    await load(e0, "gone", 2)
    everywhere = lambda: all(one.loaded.get("gone", (0,))[0] == 2 for one in with_adapters)  # noqa: E731
    await eventually(everywhere, "a newer version is handed on again")
    assert not (await e1.stub.ListAdapters(pb.ListAdaptersRequest())).unloaded
