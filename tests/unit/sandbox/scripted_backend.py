"""A backend whose provider is a set of names: it does at once what is asked, or fails as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from penstock_chassis.journal import Journal
from penstock_sandbox.domain.backend import (
    Backend,
    FileReader,
    FileWriter,
    MountedToolbox,
    ProcessHandle,
    ProcessSink,
    SandboxHandle,
    SealedLayer,
)
from penstock_sandbox.domain.diffs import DEFAULT_BYTES
from penstock_sandbox.domain.model import (
    Capabilities,
    FileInfo,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    PtySize,
    SandboxSpec,
    Stats,
)


@dataclass
class World:
    """What is there at the provider, whoever asks."""

    sandboxes: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    ends: dict[str, float] = field(default_factory=dict)
    """Ends of leases as the provider was told."""
    paused: set[str] = field(default_factory=set)
    fails: bool = False
    """Whether it refuses whatever would end or change something."""
    layer_size: int = 1

    def check(self) -> None:
        if self.fails:
            raise OSError("the provider fails")


class ScriptedHandle(SandboxHandle):
    """A sandbox of the world."""

    home = workdir = "/"
    user = "agent"
    default_env: Mapping[str, str] = {}

    def __init__(self, world: World, sandbox_id: str, on_lost: Callable[[str], None]) -> None:
        self.world = world
        self.id = sandbox_id
        self.on_lost = on_lost

    async def destroy(self) -> None:
        self.world.check()
        self.world.sandboxes.discard(self.id)

    async def pause(self) -> None:
        self.world.check()
        self.world.paused.add(self.id)

    async def resume(self) -> None:
        self.world.check()
        self.world.paused.discard(self.id)

    async def renewed(self, until: float) -> None:
        self.world.check()
        self.world.ends[self.id] = until

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        sink: ProcessSink,
        *,
        stdin: bool,
        pty: PtySize | None,
        to_end: bool = False,
    ) -> ProcessHandle:
        raise NotImplementedError

    def open_read(self, path: str, *, follow_symlink: bool) -> AbstractAsyncContextManager[tuple[FileInfo, FileReader]]:
        raise NotImplementedError

    def open_write(self, path: str, mode: int) -> AbstractAsyncContextManager[FileWriter]:
        raise NotImplementedError

    def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError

    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        raise NotImplementedError

    async def stat(self, path: str) -> FileInfo:
        raise NotImplementedError

    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        raise NotImplementedError

    async def make_directory(self, path: str, mode: int) -> None:
        raise NotImplementedError

    async def remove(self, path: str, *, recursive: bool) -> None:
        raise NotImplementedError

    async def set_network(self, policy: NetworkPolicy) -> None:
        raise NotImplementedError

    async def stats(self) -> Stats:
        raise NotImplementedError

    def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        raise NotImplementedError


class ScriptedBackend(Backend):
    """Makes sandboxes in a world. Without ``gate`` set, creating waits; without ``cleared``, giving that up does."""

    name = "scripted"
    unavailable_reason = ""
    layers_outlive = True

    def __init__(self, world: World, journal: Journal) -> None:
        self.world = world
        self.gate = asyncio.Event()
        self.gate.set()
        self.cleared = asyncio.Event()
        self.cleared.set()
        self.cleaned_up = 0
        self.create_fails = False
        self.in_creation = 0
        self.most_in_creation = 0
        self.made: set[str] = set()
        self.sealed: set[str] = set()
        self._journal = journal
        self.capabilities = Capabilities(
            networks=frozenset({NetworkKind.NONE}), fork=ForkKind.FILESYSTEM, pause=True, live_fork=True
        )

    async def open(self) -> None:
        return

    async def aclose(self) -> None:
        return

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        toolboxes: Sequence[MountedToolbox],
        on_lost: Callable[[str], None],
    ) -> SandboxHandle:
        assert await self._journal.query("SELECT id FROM sandbox WHERE id = ?", (sandbox_id,)), "written ahead"
        assert not spec.snapshot_id or spec.snapshot_id in self.world.layers, "what it stands on is there"
        # From here on something may be left.
        self.world.sandboxes.add(sandbox_id)
        self.made.add(sandbox_id)
        self.in_creation += 1
        self.most_in_creation = max(self.most_in_creation, self.in_creation)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await self.cleared.wait()
            self.cleaned_up += 1
            raise
        finally:
            self.in_creation -= 1
        if self.create_fails:
            raise OSError("the provider makes nothing")
        return ScriptedHandle(self.world, sandbox_id, on_lost)

    async def discard(self, sandbox_id: str) -> None:
        self.world.check()
        self.world.sandboxes.discard(sandbox_id)

    async def reconcile(self, known: Sequence[str]) -> None:
        self.world.check()
        self.world.sandboxes &= self.made

    async def seal(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        await handle.destroy()
        return await self.seal_live(handle, layer_id)

    async def seal_live(self, handle: SandboxHandle, layer_id: str) -> SealedLayer:
        self.world.layers.add(layer_id)
        self.sealed.add(layer_id)
        return SealedLayer(layer_id, self.world.layer_size)

    async def adopt_layers(self, known: Sequence[str]) -> frozenset[str]:
        self.world.check()
        self.world.layers &= self.sealed | set(known)
        return frozenset(known) & self.world.layers

    async def has_layer(self, layer_id: str) -> bool:
        return layer_id in self.world.layers

    async def remove_layer(self, layer_id: str) -> None:
        self.world.check()
        self.world.layers.discard(layer_id)
