"""Each operation on the inference service's files is refused once, by a full disk and by a broken one (R44, R50, R146).

The scenario has whatever the service writes: its workspace, weights that are pushed, in whole and in part, adapters
that are sent, replaced and unloaded. Trainers do what their SDK does about a refusal: they push again. The engine
keeps its weights as files, as vLLM and replicas do; it computes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from safetensors.numpy import load_file, save
from tests.support.disks.failing_files import Files, failing
from tests.support.disks.refused_writes import sweep

from penstock_chassis.errors import Unavailable
from penstock_inference.engines.base import EngineInfo, EngineOptions, PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.checkpoint import Checkpoint, Spool
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.optional_features import AdapterInfo, AdapterSource
from penstock_inference.engines.weight_updates import FileUpdates
from penstock_inference.testing import random_config, random_tensors, write_model
from penstock_inference.weights import uploads as uploads_module
from penstock_inference.weights.adapters import AdapterBegin, AdapterFrame, AdapterUploads
from penstock_inference.weights.manager import UpdateBegin, UpdateFrame, WeightUpdates
from penstock_inference.weights.uploads import Commit, Uploads, workspace

T = TypeVar("T")
CONFIG = random_config("llama", num_hidden_layers=1, hidden_size=8, intermediate_size=8, head_dim=4)
NAME = "model.norm.weight"
_OTHERS = pytest.mark.on_demand("each error and each way of a write to fail are in one of the two pairs that run")
DISKS = pytest.mark.parametrize(
    ("code", "torn"),
    [
        pytest.param(errno.ENOSPC, False, id="full-whole"),
        pytest.param(errno.EIO, True, id="io error-torn"),
        pytest.param(errno.ENOSPC, True, id="full-torn", marks=_OTHERS),
        pytest.param(errno.EIO, False, id="io error-whole", marks=_OTHERS),
    ],
)
"""What the disk answers, and whether a part is written all the same."""


class _Updates(FileUpdates):
    """Puts in force what is in files."""

    def __init__(self, spool: Spool, checkpoint: Checkpoint) -> None:
        super().__init__(spool)
        self.checkpoint = checkpoint
        self.in_force = 0

    @property
    def version(self) -> int:
        return self.in_force

    def files_in_force(self) -> Iterable[Path]:
        return self.checkpoint.sources.values()

    async def commit(self) -> UpdatePhases:
        update = self._open()

        async def swap() -> None:
            try:
                self.checkpoint = self.checkpoint.updated(update.files, update.update_format)
                self.in_force = update.version
            finally:
                await self._clean()

        await self._to_its_end(swap())
        return UpdatePhases(0.0, 0.0)


class FilesEngine(NumpyEngine):
    """Weights as files, and adapters."""

    updates: _Updates
    loaded: dict[str, AdapterSource]

    def info(self) -> EngineInfo:
        info = super().info()
        return replace(
            info, policy_version=self.updates.version, capabilities=replace(info.capabilities, adapters=True)
        )

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        await self.updates.begin(version, label, update_format)

    async def push_tensors(self, tensors: Tensors) -> None:
        await self.updates.push_tensors(tensors)

    async def push_file(self, path: Path) -> None:
        await self.updates.push_file(path)

    async def push_path(self, path: Path) -> None:
        await self.updates.push_path(path)

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        return await self.updates.commit()

    async def abort_update(self) -> None:
        await self.updates.abort()

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        assert (source.directory / "adapter_model.safetensors").read_bytes() == bytes([source.policy_version]) * 100
        assert (source.directory / "adapter_config.json").read_text() == "{}"
        self.loaded[source.name] = source
        return AdapterInfo(source.name, source.policy_version, 1)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(AdapterInfo(each.name, each.policy_version, 1) for each in self.loaded.values())


async def insisting(work: Callable[[], Awaitable[T]]) -> T:
    """As a client does: what the disk refused is asked for again, once."""
    try:
        return await work()
    except Unavailable as error:
        assert error.reason == "DISK_REFUSED" and error.retry_after_s, error
    except OSError as error:  # of a start, which `run` tells in words
        assert error.filename, error
    return await work()


class Scenario:
    """A service's life on one disk."""

    def __init__(self, state: Path, disk: Files, engine: FilesEngine) -> None:
        self.state, self.disk, self.engine = state, disk, engine
        self.work = state
        self.tensors = load_file(engine.updates.checkpoint.sources[NAME])

    async def live(self, stack: AsyncExitStack) -> None:
        """From its start to its end."""

        async def enter() -> Path:
            return stack.enter_context(workspace(self.state))

        self.work = await insisting(enter)
        assert len([*self.state.iterdir()]) == 1, "what a start that was refused made is gone"
        self.engine.updates._spool = Spool(self.work)
        limits = Uploads(1 << 20)
        self.weights = WeightUpdates(self.engine, limits, None, self.work)
        stack.push_async_callback(self.weights.aclose)
        self.adapters = AdapterUploads(self.engine, limits, None, self.work)
        stack.push_async_callback(self.adapters.aclose)
        for version in (1, 2):
            await self.push(version, UpdateFormat.FULL, self.tensors)
        await self.push(3, UpdateFormat.DELTA, {NAME: self.tensors[NAME] + 3})
        for version in (1, 1, 2):
            await self.load(version)
        await insisting(lambda: self.adapters.unload("a"))
        assert not self.engine.loaded
        await self.push(4, UpdateFormat.FULL, self.tensors)
        self.disk.armed = False
        await self.push(5, UpdateFormat.FULL, self.tensors)
        self.check(settled=True)

    async def push(self, version: int, update_format: UpdateFormat, tensors: Tensors) -> None:
        """A push of weights, which are in force then, and are not before."""
        data = save(dict(tensors))

        async def frames() -> AsyncIterator[UpdateFrame]:
            yield UpdateBegin(version, update_format)
            for at in range(0, len(data), 1000):
                yield data[at : at + 1000]
            yield Commit(hashlib.sha256(data).digest())

        async def once() -> None:
            before = self.engine.updates.version
            try:
                result = await self.weights.receive(frames())
            except Unavailable:
                assert self.engine.updates.version == before
                self.check()
                raise
            assert result.policy_version == self.engine.updates.version == version

        await insisting(once)
        self.check()
        sources = self.engine.updates.checkpoint.sources
        for name, tensor in tensors.items():
            assert (load_file(sources[name])[name] == tensor).all()

    async def load(self, version: int) -> None:
        """An adapter, which is in force then, and is not before."""
        data = bytes([version]) * 100

        async def frames() -> AsyncIterator[AdapterFrame]:
            yield AdapterBegin("a", version, "{}")
            yield data
            yield Commit(hashlib.sha256(data).digest())

        async def once() -> None:
            before = dict(self.engine.loaded)
            try:
                await self.adapters.load(frames())
            except Unavailable:
                assert self.engine.loaded == before
                self.check()
                raise

        await insisting(once)
        assert self.engine.loaded["a"].policy_version == version
        self.check()

    def check(self, *, settled: bool = False) -> None:
        """Nothing is there but what is in force; what could not be removed goes with the next push."""
        needed = {path for path in self.engine.updates.files_in_force() if path.is_relative_to(self.work)}
        for source in self.engine.loaded.values():
            needed |= {source.directory / "adapter_model.safetensors", source.directory / "adapter_config.json"}
        there = {path for path in self.work.rglob("*") if path.is_file() and path.name != "lock"}
        if settled or "unlink" not in self.disk.refused:
            assert there == needed
        assert there >= needed


@pytest.mark.requirement("R23", "R44", "R146")
@DISKS
async def test_refused_push_reports_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, torn: bool
) -> None:
    """What is in force stays so; the same push again succeeds; the next start finds nothing."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    monkeypatch.setattr(uploads_module, "_WRITE_AT_ONCE", 3000)

    async def play(directory: Path, disk: Files) -> None:
        state = directory / "state"
        directory.mkdir(parents=True)
        engine = await FilesEngine.open(EngineOptions(model, "tiny"))
        assert isinstance(engine, FilesEngine)
        engine.updates, engine.loaded = _Updates(Spool(state), Checkpoint.read(model)), {}
        try:
            with failing(disk):
                async with AsyncExitStack() as stack:
                    await Scenario(state, disk, engine).live(stack)
            assert not [*state.iterdir()]
        finally:
            await engine.aclose()

    swept = await sweep(play, tmp_path / "played", lambda at: Files(code, tmp_path / "played", at=at, torn=torn))
    assert {"mkdir", "open", "write", "rename", "unlink"} <= set(swept.refused)


@pytest.mark.requirement("R44", "R146")
async def test_tensors_refused_by_the_disk_leave_no_file_and_the_update_continues(tmp_path: Path) -> None:
    """Native code writes them; the next ones take the next file."""
    model = write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    updates = _Updates(Spool(tmp_path), Checkpoint.read(model))
    changed = {NAME: load_file(model / "model.safetensors")[NAME] + 1}
    await updates.begin(1, "", UpdateFormat.DELTA)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most[1]))  # the kernel refuses more, as a full disk does
    try:
        with pytest.raises(Unavailable) as caught:
            await updates.push_tensors(changed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert caught.value.reason == "DISK_REFUSED"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    await updates.push_tensors(changed)
    await updates.commit()
    assert updates.version == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["model", "push-2.safetensors"]
