"""Forks: n sandboxes from a snapshot, or from a live sandbox's files as they are at one moment.

Invariants
- The layer that children stand on is held from before the first is asked for until the call ends, and by each child.
- A live sandbox is copied once for a request id, however often it is asked; the copy goes with its last child, or with
  the call if it has none.
- A child has identifiers of its own, and its failure is its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, PenstockError
from penstock_sandbox.backends.base import SandboxHandle
from penstock_sandbox.model import Sandbox, SandboxSpec
from penstock_sandbox.sandboxes import Sandboxes
from penstock_sandbox.table import LiveSandbox

Child = tuple[int, Sandbox | PenstockError]


@dataclass(slots=True, eq=False)
class _Copy:
    """A live sandbox's files as a layer; ``made`` answers the layer's id."""

    source: str
    spec: SandboxSpec
    made: asyncio.Task[str]
    callers: int = 0
    held: bool = False


class Forks:
    """Makes children."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._bases = sandboxes.bases
        self._copies: dict[str, _Copy] = {}

    async def of_snapshot(
        self,
        request_id: str,
        snapshot_id: str,
        origin: SandboxSpec,
        count: int,
        asked: SandboxSpec,
        wait_s: float | None = None,
    ) -> AsyncGenerator[Child, None]:
        """Make ``count`` sandboxes, each answered as it is ready, or with its own failure.

        ``origin`` is the spec of the sandbox that was sealed; ``asked`` gives lease, labels, network and additional
        environment. ``wait_s`` is as in ``Sandboxes.create``.
        """
        self._bases.hold(snapshot_id)
        try:
            async with aclosing(self._children(request_id, snapshot_id, origin, count, asked, wait_s)) as children:
                async for child in children:
                    yield child
        finally:
            self._bases.release(snapshot_id)

    async def of_sandbox(
        self, request_id: str, sandbox_id: str, count: int, asked: SandboxSpec, wait_s: float | None = None
    ) -> AsyncGenerator[Child, None]:
        """As ``of_snapshot``, from a live sandbox, whose processes stand still while its files are copied.

        Raises NotFound (SANDBOX_UNKNOWN), FailedPrecondition (CAPABILITY_MISSING, SANDBOX_LOST, SANDBOX_NOT_READY),
        AlreadyExists (REQUEST_ID_REUSED), Unavailable (PAUSE_FAILED).
        """
        with self._copy(request_id, sandbox_id) as copy:
            layer_id = await asyncio.shield(copy.made)
            async with aclosing(self._children(request_id, layer_id, copy.spec, count, asked, wait_s)) as children:
                async for child in children:
                    yield child

    async def _children(
        self, request_id: str, layer_id: str, origin: SandboxSpec, count: int, asked: SandboxSpec, wait_s: float | None
    ) -> AsyncGenerator[Child, None]:
        spec = dataclasses.replace(
            origin,
            image="",
            snapshot_id=layer_id,
            network=asked.network,
            env={**origin.env, **asked.env},
            lease_s=asked.lease_s,
            labels=asked.labels,
        )
        self._sandboxes.applied(spec)  # what all of them would be refused for fails the call itself

        async def make(index: int) -> Child:
            child_id = f"{request_id}/{index}" if request_id else ""
            try:
                return index, await self._sandboxes.create(child_id, spec, wait_s=wait_s)
            except PenstockError as error:
                return index, error

        tasks = [asyncio.create_task(make(index)) for index in range(count)]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Copies of live sandboxes ------------------------------------------------------------------------------------

    @contextmanager
    def _copy(self, request_id: str, sandbox_id: str) -> Iterator[_Copy]:
        """The copy of a request, begun if there is none, and kept while somebody is in here."""
        copy = self._copies.get(request_id)
        if copy is not None and copy.source != sandbox_id:
            raise AlreadyExists("the request id belongs to another request", reason="REQUEST_ID_REUSED")
        if copy is None or not self._revived(copy):
            copy = self._begin(request_id, sandbox_id)
        copy.callers += 1
        try:
            yield copy
        finally:
            copy.callers -= 1
            # Copying cannot be stopped half way: a copy that nobody waits for goes when it is made.
            copy.made.add_done_callback(lambda _: self._let_go(request_id, copy))

    def _begin(self, request_id: str, sandbox_id: str) -> _Copy:
        live, handle, _ = self._sandboxes.table.there(sandbox_id)
        if not live.backend.capabilities.live_fork:
            raise FailedPrecondition(
                f"the {live.backend.name} backend cannot fork a live sandbox here: prepare a snapshot instead",
                reason="CAPABILITY_MISSING",
                metadata={"backend": live.backend.name, "capabilities": "live_fork"},
            )
        spec = live.view.spec
        copy = _Copy(sandbox_id, spec, asyncio.create_task(self._seal(request_id, live, handle)))
        self._copies[request_id] = copy
        return copy

    async def _seal(self, request_id: str, live: LiveSandbox, handle: SandboxHandle) -> str:
        layer_id, below = f"lf-{secrets.token_hex(16)}", live.view.spec.snapshot_id
        async with live.changing:
            live.check_lives()
            await live.backend.seal_live(handle, layer_id)
            if below:
                self._bases.hold_below(below)

        copy = self._copies[request_id]

        def gone() -> None:
            if self._copies.get(request_id) is copy:
                del self._copies[request_id]
            if below:
                self._bases.release(below)

        self._bases.hold(layer_id)
        self._bases.leave(layer_id, live.backend, gone, closed=False)
        copy.held = True
        return layer_id

    def _revived(self, copy: _Copy) -> bool:
        """Whether a copy that may have been let go can still be used; then it is held again."""
        if not copy.made.done() or copy.held:
            return True
        try:
            self._bases.hold(copy.made.result())
        except NotFound:
            return False  # its last child is gone, and it goes too
        copy.held = True
        return True

    def _let_go(self, request_id: str, copy: _Copy) -> None:
        if copy.callers:
            return
        if copy.made.cancelled() or copy.made.exception() is not None:
            if self._copies.get(request_id) is copy:
                del self._copies[request_id]
        elif copy.held:
            copy.held = False
            self._bases.release(copy.made.result())

    async def aclose(self) -> None:
        """Wait for the copies that are being made; the sandboxes' end removes them."""
        await asyncio.gather(*(copy.made for copy in self._copies.values()), return_exceptions=True)
