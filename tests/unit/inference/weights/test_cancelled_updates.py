"""A caller that leaves, or an engine that is lost, in an update: what was begun ends, and the same again succeeds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import save
from tests.support.waiting import GUARD_S

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_inference.engines.base import EngineInfo, EngineOptions, PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.testing import random_config, random_tensors, write_model
from penstock_inference.weights.adapters import AdapterBegin, AdapterFrame, AdapterUploads
from penstock_inference.weights.kept import KeptPushes
from penstock_inference.weights.manager import UpdateBegin, UpdateFrame, WeightUpdates
from penstock_inference.weights.uploads import Commit, Uploads

CONFIG = random_config("qwen3", max_position_embeddings=64, eos_token_id=None)


class SlowLoader(NumpyEngine):
    """The numpy engine, with adapters that take as long to load as the test wants."""

    loading: asyncio.Event
    go_on: asyncio.Event
    in_force: dict[str, AdapterSource]
    task: asyncio.Task[AdapterInfo]
    quick: frozenset[str] = frozenset()
    """Adapters that load at once."""

    def info(self) -> EngineInfo:
        """With one capability more."""
        info = super().info()
        return replace(info, capabilities=replace(info.capabilities, adapters=True))

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Goes on to its end whoever waits, as replicas do, which is late."""
        self.task = asyncio.create_task(self._load(source))
        return await asyncio.shield(self.task)

    async def _load(self, source: AdapterSource) -> AdapterInfo:
        before = self.in_force.get(source.name)
        if before is not None and source.policy_version <= before.policy_version:
            raise FailedPrecondition("not newer", reason="POLICY_VERSION_NOT_NEWER")
        assert (source.directory / "adapter_model.safetensors").read_bytes() == b"weights"
        if source.name not in self.quick:
            self.loading.set()
            await self.go_on.wait()
        self.in_force[source.name] = source
        return AdapterInfo(source.name, source.policy_version, 1)

    async def unload_adapter(self, name: str) -> None:
        """Forget it."""
        self.in_force.pop(name, None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those in force."""
        return tuple(AdapterInfo(each.name, each.policy_version, 1) for each in self.in_force.values())


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SlowLoader]:
    """One that loads nothing yet."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    slow = await SlowLoader.open(EngineOptions(model, "tiny"))
    assert isinstance(slow, SlowLoader)
    slow.loading, slow.go_on, slow.in_force = asyncio.Event(), asyncio.Event(), {}
    yield slow
    await slow.aclose()


@pytest.mark.requirement("R29", "R43")
@pytest.mark.parametrize("by_path", [False, True])
async def test_an_adapter_whose_caller_leaves_is_loaded_and_its_files_stay(
    tmp_path: Path, engine: SlowLoader, by_path: bool
) -> None:
    """The same load again is a success, and only an unload takes the files away."""
    spool, theirs = tmp_path / "spool", tmp_path / "adapters"
    spool.mkdir()
    (theirs / "one").mkdir(parents=True)
    (theirs / "one" / "adapter_model.safetensors").write_bytes(b"weights")
    uploads = AdapterUploads(engine, Uploads(1000), theirs, spool)

    async def frames() -> AsyncIterator[AdapterFrame]:
        if by_path:
            yield AdapterBegin("a", 1, path="one")
            yield Commit(b"")
            return
        yield AdapterBegin("a", 1, config_json="{}")
        yield b"weights"
        yield Commit(hashlib.sha256(b"weights").digest())

    call = asyncio.create_task(uploads.load(frames()))
    await engine.loading.wait()
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    engine.go_on.set()
    assert await uploads.load(frames()) == AdapterInfo("a", 1, 1)
    assert (engine.in_force["a"].directory / "adapter_model.safetensors").is_file()
    assert engine.in_force["a"].temporary is not by_path
    assert len([*spool.iterdir()]) == (0 if by_path else 1)
    await uploads.unload("a")
    assert not [*spool.iterdir()]
    await uploads.aclose()


@pytest.mark.requirement("R43")
async def test_a_service_that_ends_waits_for_an_adapter_that_is_being_loaded(
    tmp_path: Path, engine: SlowLoader
) -> None:
    """And leaves no file."""
    spool = tmp_path / "spool"
    spool.mkdir()
    uploads = AdapterUploads(engine, Uploads(1000), None, spool)

    async def frames() -> AsyncIterator[AdapterFrame]:
        yield AdapterBegin("a", 1, config_json="{}")
        yield b"weights"
        yield Commit(hashlib.sha256(b"weights").digest())

    call = asyncio.create_task(uploads.load(frames()))
    await engine.loading.wait()
    call.cancel()
    closing = asyncio.create_task(uploads.aclose())
    engine.go_on.set()
    await closing
    assert engine.in_force["a"].policy_version == 1 and not [*spool.iterdir()]


@pytest.mark.requirement("R43", "R87")
async def test_an_adapter_that_takes_long_holds_up_no_other_one(tmp_path: Path, engine: SlowLoader) -> None:
    """Its load may wait for completions, of one namespace. A change of the same adapter waits for it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"weights")
    uploads = AdapterUploads(engine, Uploads(1000), tmp_path, None)

    async def frames(name: str) -> AsyncIterator[AdapterFrame]:
        yield AdapterBegin(name, 1, path=name)
        yield Commit(b"")

    engine.quick = frozenset({"b"})
    slow = asyncio.create_task(uploads.load(frames("a")))
    async with asyncio.timeout(GUARD_S):
        await engine.loading.wait()
        unloading = asyncio.create_task(uploads.unload("a"))
        await uploads.load(frames("b"))
        await uploads.unload("b")
    assert not slow.done() and not unloading.done()
    engine.go_on.set()
    await slow
    await unloading
    assert not engine.in_force and not uploads._changing
    await uploads.aclose()


class SlowSwitch(NumpyEngine):
    """The numpy engine, which tells when it commits and waits for the test."""

    committing: asyncio.Event
    go_on: asyncio.Event

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Not at once."""
        self.committing.set()
        await self.go_on.wait()
        return await super().commit_update(mode)


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("when", ["during", "after"])
async def test_push_cancelled_while_it_is_applied_may_be_repeated(tmp_path: Path, announced: bool, when: str) -> None:
    """Also while it is not yet in force."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    engine = await SlowSwitch.open(EngineOptions(model, "tiny"))
    assert isinstance(engine, SlowSwitch)
    engine.committing, engine.go_on = asyncio.Event(), asyncio.Event()
    data = save(random_tensors(CONFIG, 5))
    digest = hashlib.sha256(data).digest()
    updates = WeightUpdates(engine, Uploads(len(data)))

    async def frames() -> AsyncIterator[UpdateFrame]:
        yield UpdateBegin(1, UpdateFormat.FULL, sha256=digest if announced else None)
        for start in range(0, len(data), 1 << 19):
            yield data[start : start + (1 << 19)]
        yield Commit(digest)

    try:
        call = asyncio.create_task(updates.receive(frames()))
        await engine.committing.wait()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        if when == "after":
            engine.go_on.set()
            await updates.aclose()
            assert engine.info().policy_version == 1
            assert (await updates.receive(frames())).policy_version == 1
        else:
            again = asyncio.create_task(updates.receive(frames()))
            engine.go_on.set()
            assert (await again).policy_version == 1
    finally:
        await engine.aclose()


@pytest.mark.requirement("R29")
@pytest.mark.parametrize("announced", [False, True])
async def test_a_repeated_push_is_refused_once_other_weights_are_in_force(tmp_path: Path, announced: bool) -> None:
    """Those of a transfer, which is no push: the repetition was a success, and the newer weights sampled."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    engine = await NumpyEngine.open(EngineOptions(model, "tiny"))
    data = save(random_tensors(CONFIG, 5))
    digest = hashlib.sha256(data).digest()
    updates = WeightUpdates(engine, Uploads(len(data)))

    async def frames() -> AsyncIterator[UpdateFrame]:
        yield UpdateBegin(1, UpdateFormat.FULL, sha256=digest if announced else None)
        yield data
        yield Commit(digest)

    try:
        for _ in range(2):
            assert (await updates.receive(frames())).policy_version == 1
        await engine.begin_update(2, "", UpdateFormat.FULL)
        await engine.push_tensors(random_tensors(CONFIG, 6))
        await engine.commit_update()
        with pytest.raises(FailedPrecondition) as caught:
            await updates.receive(frames())
        assert caught.value.reason == "POLICY_VERSION_NOT_NEWER" and engine.info().policy_version == 2
    finally:
        await engine.aclose()


class Losing(NumpyEngine):
    """The numpy engine, which a push loses as SGLang's server may be lost: it has no info until it is found."""

    lost = False
    loses = True

    def info(self) -> EngineInfo:
        """Unless it is lost."""
        if self.lost:
            raise Unavailable("lost", reason="UPSTREAM_UNREACHABLE", retry_after_s=1.0)
        return super().info()

    async def push_tensors(self, tensors: Tensors) -> None:
        """The last step before the commit."""
        await super().push_tensors(tensors)
        self.lost = self.loses


@pytest.mark.requirement("R27", "R29")
async def test_a_push_in_which_the_engine_is_lost_may_be_repeated_when_it_is_found(tmp_path: Path) -> None:
    """The repetition waited for ever, other pushes were refused until a restart, and a file stayed on the disk."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    engine = await Losing.open(EngineOptions(model, "tiny"))
    assert isinstance(engine, Losing)
    data = save(random_tensors(CONFIG, 5))
    digest = hashlib.sha256(data).digest()
    kept = tmp_path / "kept"
    kept.mkdir()
    updates = WeightUpdates(engine, Uploads(len(data)), kept=KeptPushes(kept, 2 * len(data)))

    async def frames() -> AsyncIterator[UpdateFrame]:
        yield UpdateBegin(1, UpdateFormat.FULL)
        yield data
        yield Commit(digest)

    try:
        with pytest.raises(Unavailable):
            await updates.receive(frames())
        assert not [*kept.iterdir()]
        engine.lost = engine.loses = False
        async with asyncio.timeout(GUARD_S):
            assert (await updates.receive(frames())).policy_version == 1
        assert len([*kept.iterdir()]) == 1
    finally:
        await engine.aclose()
