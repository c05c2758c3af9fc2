"""Layers of local sandboxes that end, or are written to, while their files are kept; and creates that are refused."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.support.waiting import GUARD_S
from tests.unit.sandbox.scripted_domain import pass_turns
from tests.unit.sandbox.scripted_helper import ScriptedHelper

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_sandbox.backends.host import copying
from penstock_sandbox.backends.host.cgroups import Cgroups, Group
from penstock_sandbox.backends.local import sealed_layers
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.disk import usage
from penstock_sandbox.backends.local.disk.quotas import Quotas
from penstock_sandbox.backends.local.disk.usage import Limit, Use
from penstock_sandbox.backends.local.freezing import Freezing
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy, Resources, SandboxSpec


class Freezer:
    """A control group that only notes whether it is frozen."""

    can_freeze = True

    def __init__(self) -> None:
        self.is_frozen = False

    def freeze(self) -> None:
        self.is_frozen = True

    def frozen(self) -> bool:
        return self.is_frozen

    def thaw(self) -> None:
        self.is_frozen = False

    kill_and_thaw = thaw


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    """A backend without a spawner, and with the directories that sandboxes need."""
    for name in ("sandboxes", "layers", "trash", "base"):
        (tmp_path / name).mkdir()
    return LocalBackend(LocalOptions(tmp_path))


async def made(backend: LocalBackend, helper: ScriptedHelper, freezer: Freezer) -> LocalSandbox:
    """A sandbox of it, with one file."""
    sandbox = backend._allot("one", SandboxSpec(), None, (), lambda _: None)
    backend._live["one"] = sandbox
    sandbox.freezing = Freezing(cast(Group, freezer), lambda: sandbox._ended)
    spawner, network = cast("SpawnerProcess", helper), NetworkPolicy(NetworkKind.NONE)
    await sandbox.open(spawner, (), network, read_only=(), first=(), tmp_inodes=0, fixed_clocks=False)
    (sandbox.upper / "file").write_bytes(b"content")
    return sandbox


async def nothing_left(backend: LocalBackend, root: Path) -> None:
    await backend._removals_end()
    left = {name: [child.name for child in (root / name).iterdir()] for name in ("sandboxes", "layers", "trash")}
    assert left == {"sandboxes": [], "layers": [], "trash": []}
    assert not any(backend._users._holders.values())


@pytest.mark.requirement("R49", "R52")
async def test_a_sandbox_that_ends_while_it_is_copied_is_removed_after_the_copy_has_stopped(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk guard ends it, whatever else is done with it."""
    begun, go_on = threading.Event(), threading.Event()

    def copy(source: Path, target: Path, stopped: Callable[[], bool], left_out: object = ()) -> int:
        target.mkdir()
        begun.set()
        assert go_on.wait(GUARD_S)
        if stopped():
            raise OSError(errno.ECANCELED, "stopped")
        return 0

    monkeypatch.setattr(copying, "copy", copy)
    sandbox = await made(backend, ScriptedHelper(), freezer := Freezer())
    sealing = asyncio.create_task(backend.seal_live(sandbox, "layer"))
    assert await asyncio.to_thread(begun.wait, GUARD_S)
    sandbox.lose("DISK_LOW")
    ending = asyncio.create_task(sandbox.destroy())
    await pass_turns()
    # Its processes are dead; its files are still being read.
    assert not freezer.is_frozen and (sandbox.upper / "file").exists()
    go_on.set()
    with pytest.raises(FailedPrecondition) as caught:
        await sealing
    assert (caught.value.reason, caught.value.metadata["lost_reason"]) == ("SANDBOX_LOST", "DISK_LOW")
    await ending
    assert not await backend.has_layer("layer")
    await nothing_left(backend, tmp_path)


@pytest.mark.requirement("R49", "R52")
async def test_a_sandbox_that_ends_while_its_copy_is_measured_leaves_no_layer(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may be another's by then."""
    sandbox = await made(backend, ScriptedHelper(), Freezer())
    loop = asyncio.get_running_loop()

    def measure(*_: object) -> Use:
        loop.call_soon_threadsafe(sandbox.lose, "DISK_EXHAUSTED")
        return Use()

    monkeypatch.setattr(usage, "measure", measure)
    with pytest.raises(FailedPrecondition) as caught:
        await backend.seal_live(sandbox, "layer")
    assert (caught.value.reason, caught.value.metadata["lost_reason"]) == ("SANDBOX_LOST", "DISK_EXHAUSTED")
    await sandbox.destroy()
    assert not await backend.has_layer("layer")
    await nothing_left(backend, tmp_path)


@pytest.mark.requirement("R49", "R52")
async def test_a_sandbox_whose_files_are_gone_is_no_snapshot_without_files(
    backend: LocalBackend, tmp_path: Path
) -> None:
    sandbox = await made(backend, ScriptedHelper(), Freezer())
    sandbox.lose("DISK_LOW")
    await sandbox.destroy()
    with pytest.raises(FailedPrecondition) as caught:
        await backend.seal(sandbox, "layer")
    assert (caught.value.reason, caught.value.metadata["lost_reason"]) == ("SANDBOX_LOST", "DISK_LOW")
    assert not await backend.has_layer("layer")
    await nothing_left(backend, tmp_path)


@pytest.mark.requirement("R44", "R52")
async def test_a_live_forks_files_have_no_upload_that_is_under_way(backend: LocalBackend, tmp_path: Path) -> None:
    """Nobody would ever finish or remove it there. An upload that begins is waited for, to know its name."""
    helper = ScriptedHelper()
    sandbox = await made(backend, helper, freezer := Freezer())
    go_on = asyncio.Event()

    async def upload() -> None:
        async with sandbox.open_write("/work/new", 0o644) as writer:
            await go_on.wait()
            await writer.commit()

    uploading = asyncio.create_task(upload())
    opening = await helper.asked()
    sealing = asyncio.create_task(backend.seal_live(sandbox, "layer"))
    await pass_turns()
    assert not freezer.is_frozen
    for name in ("work", "elsewhere"):
        (sandbox.upper / name).mkdir()
    partial = sandbox.upper / "work/.new.00.partial"
    (sandbox.upper / "elsewhere/.old.00.partial").touch()
    descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY)
    helper.send({"seq": opening["seq"], "partial": partial.name, "name": "new"}, [descriptor, descriptor])
    os.close(descriptor)
    await sealing
    layer = tmp_path / "layers/layer"
    assert sorted(path.name for path in layer.rglob("*.partial")) == [".old.00.partial"]
    assert (layer / "file").read_bytes() == b"content" and partial.exists() and not freezer.is_frozen
    go_on.set()
    commit = await helper.asked()
    helper.send({"seq": commit["seq"]})
    await uploading
    assert sandbox.unfinished == set()
    await sandbox.destroy()
    await backend.remove_layer("layer")
    await nothing_left(backend, tmp_path)


class Given:
    """Quotas that note which projects they gave and got back."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def give(self, folder: Path, limit: Limit) -> int:
        self.held.append(7)
        return 7

    def release(self, project: int) -> None:
        self.held.remove(project)


class NoGroups:
    """Control groups of which none can be made."""

    controllers = frozenset({"pids"})

    def create(self, *_: object) -> Group:
        raise OSError(errno.ENOSPC, "no control group")


@pytest.mark.requirement("R50")
async def test_a_create_that_fails_halfway_leaves_neither_files_nor_a_quota(
    backend: LocalBackend, tmp_path: Path
) -> None:
    """The next start is not what removes them."""
    backend._disk._quotas = cast(Quotas, quotas := Given())
    backend._cgroups = cast(Cgroups, NoGroups())
    with pytest.raises(OSError, match="no control group"):
        backend._allot("one", SandboxSpec(), None, (), lambda _: None)
    assert quotas.held == [7]
    await nothing_left(backend, tmp_path)
    assert quotas.held == []


@pytest.mark.requirement("R50")
async def test_a_create_that_asks_for_too_little_disk_leaves_no_files(backend: LocalBackend, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        backend._allot("one", SandboxSpec(resources=Resources(disk_bytes=1)), None, (), lambda _: None)
    await nothing_left(backend, tmp_path)


@pytest.mark.requirement("R49", "R52")
async def test_no_sandbox_is_made_or_kept_whose_layers_the_kernel_would_cut(
    backend: LocalBackend, tmp_path: Path
) -> None:
    """The kernel leaves out the lowest without an error, or refuses after the source was frozen and copied."""
    stack = tuple(f"lf-{number:032x}" for number in range(100))
    sandbox = backend._allot("one", SandboxSpec(), None, (), lambda _: None)
    sandbox.layer_ids = stack
    for seal in (backend.seal, backend.seal_live):
        with pytest.raises(FailedPrecondition) as caught:
            await seal(sandbox, "layer")
        assert (caught.value.reason, caught.value.metadata) == ("TOO_MANY_LAYERS", {"layers": "102"})
    assert sandbox._destroyed is None and not list((tmp_path / "trash").iterdir())
    backend._sealed_layers._layers["top"] = sealed_layers._Layer(None, stack, Use(), None)
    with pytest.raises(FailedPrecondition) as caught:
        backend._allot("two", SandboxSpec(snapshot_id="top"), None, (), lambda _: None)
    assert caught.value.reason == "TOO_MANY_LAYERS"
    assert [child.name for child in (tmp_path / "sandboxes").iterdir()] == ["one"]
