"""The sandbox service's domain over a scripted provider, with a clock and delays that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.sandbox.scripted_backend import ScriptedBackend, ScriptedHandle, World

from penstock_chassis.aio.retry import Pause
from penstock_chassis.errors import PenstockError
from penstock_chassis.journal import Journal
from penstock_sandbox.domain.backend import MountedToolbox
from penstock_sandbox.domain.model import Resources, Sandbox, SandboxSpec, State
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.sandboxes.policy import Limits
from penstock_sandbox.store.records import MIGRATIONS


class NoToolboxes:
    """There are none."""

    def mounted(self, toolbox_id: str, namespace: str, *, host_programs: bool) -> MountedToolbox:
        raise AssertionError(toolbox_id)

    def hold(self, toolbox_ids: Sequence[str], namespace: str) -> None:
        assert not toolbox_ids

    def release(self, toolbox_ids: Sequence[str], namespace: str) -> None:
        assert not toolbox_ids


@dataclass
class Domain:
    """An opened domain."""

    sandboxes: Sandboxes
    backend: ScriptedBackend
    journal: Journal
    now: float
    again: asyncio.Event = None  # type: ignore[assignment]
    pause: Pause = None  # type: ignore[assignment]
    begun: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def world(self) -> World:
        return self.backend.world

    async def create(
        self, owner: str = "", *, snapshot: str = "", wait_s: float | None = None, request: str = ""
    ) -> Sandbox:
        spec = SandboxSpec(labels={"owner": owner} if owner else {}, snapshot_id=snapshot)
        return await self.sandboxes.create(request, spec, wait_s=wait_s)

    def begin(self, owner: str = "", **options: Any) -> asyncio.Task[Sandbox]:
        """A create that may have to wait; its end is awaited with the domain's."""
        self.begun.append(asyncio.create_task(self.create(owner, **options)))
        return self.begun[-1]

    def begin_delete(self, sandbox_id: str) -> None:
        """A delete whose end is awaited with the domain's."""
        self.begun.append(asyncio.create_task(self.sandboxes.delete(sandbox_id)))

    def lose(self, sandbox_id: str) -> None:
        """The provider tells that it ended by itself."""
        handle = self.sandboxes.table.get(sandbox_id).handle
        assert isinstance(handle, ScriptedHandle)
        handle.on_lost("GONE")

    async def rows(self) -> set[str]:
        return {row["id"] for row in await self.journal.query("SELECT id FROM sandbox")}

    async def settle(self) -> None:
        """Until every removal has ended or waits for its next attempt."""
        await pass_turns()
        for live in self.sandboxes.table:
            if live.destruction is not None:
                with suppress(PenstockError):
                    await live.destruction.outcome()
                    if live.removal is not None:
                        await asyncio.shield(live.removal)
        await pass_turns()

    async def try_again(self) -> None:
        """The delays of all failed removals are over."""
        again, self.again = self.again, asyncio.Event()
        again.set()
        await self.settle()

    async def kill(self) -> None:
        """End without ceremony, as a kill -9 does: what the provider has stays."""
        self.world.fails, failed = True, self.world.fails
        await self.sandboxes.aclose()
        await asyncio.gather(*self.begun, return_exceptions=True)
        self.world.fails = failed


async def pass_turns(count: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(
    folder: Path,
    world: World | None = None,
    *,
    most: int = 100,
    per_owner: int | None = None,
    queued: int = 100,
    queue_timeout_s: float = 60.0,
    max_lifetime_s: float | None = None,
    now: float = 1000.0,
    egress_hosts: tuple[str, ...] = (),
    min_free_bytes: int = 0,
) -> AsyncIterator[Domain]:
    """A domain on the state in ``folder``; it is killed at the end."""
    async with await Journal.open(folder / "journal.sqlite", MIGRATIONS) as journal:
        backend = ScriptedBackend(world or World(), journal)
        domain: Domain
        domain = Domain(None, backend, journal, now)  # type: ignore[arg-type]
        domain.again = asyncio.Event()

        async def pause(_: float) -> None:
            await domain.again.wait()

        domain.pause = pause
        domain.sandboxes = Sandboxes(
            {backend.name: backend},
            backend.name,
            NoToolboxes(),
            journal,
            folder,
            Limits(
                max_sandboxes=most,
                default_lease_s=100.0,
                max_lease_s=1000.0,
                default_resources=Resources(),
                allowed_upstreams=("h:1",),
                max_lifetime_s=max_lifetime_s,
                max_sandboxes_per_owner=per_owner,
                max_queued=queued,
                queue_timeout_s=queue_timeout_s,
                egress_hosts=egress_hosts,
                min_free_bytes=min_free_bytes,
            ),
            clock=lambda: domain.now,
            pause=pause,
        )
        await domain.sandboxes.open()
        await domain.settle()
        try:
            yield domain
        finally:
            await domain.kill()


def ready(views: Sequence[Sandbox]) -> list[str]:
    """Ids of those that can be used."""
    return [view.id for view in views if view.state is State.READY]
