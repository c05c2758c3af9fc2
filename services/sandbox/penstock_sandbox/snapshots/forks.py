"""Forks: n sandboxes from a snapshot, or from a live sandbox's files at one moment.

Invariants
- The children's layer is referenced by the call from before the first create until its end, and by each child.
- A live sandbox is copied once per request id, however often it is requested; the copy is removed with its last child,
  or with the call if it has none.
- Each child has its own identifiers and fails by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, PenstockError
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import Sandbox, SandboxSpec
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.sandboxes.table import SandboxEntry

Child = tuple[int, Sandbox | PenstockError]


@dataclass(slots=True, eq=False)
class _Copy:
    """A live sandbox's files as a layer; ``made`` results in the layer's id."""

    source: str
    namespace: str
    spec: SandboxSpec
    made: asyncio.Task[str]
    callers: int = 0
    held: bool = False


class Forks:
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._layer_refs = sandboxes.layer_refs
        self._copies: dict[str, _Copy] = {}

    async def of_snapshot(
        self,
        request_id: str,
        snapshot_id: str,
        origin: SandboxSpec,
        count: int,
        asked: SandboxSpec,
        wait_s: float | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        joins: str = "",
    ) -> AsyncGenerator[Child, None]:
        """Makes ``count`` sandboxes in the snapshot's ``namespace``; yields each when it is ready, or its error.

        ``origin`` is the spec of the sealed sandbox; ``asked`` gives lease, labels, network, additional environment and
        whether the children are repeatable.
        ``wait_s`` is as in ``Sandboxes.create``. ``joins``: they have no companions, but those of that sandbox.
        """
        self._layer_refs.hold(snapshot_id)
        try:
            async with aclosing(
                self._children(request_id, snapshot_id, origin, count, asked, wait_s, namespace, joins)
            ) as children:
                async for child in children:
                    yield child
        finally:
            self._layer_refs.release(snapshot_id)

    async def of_sandbox(
        self,
        request_id: str,
        sandbox_id: str,
        count: int,
        asked: SandboxSpec,
        wait_s: float | None = None,
        namespace: str | None = None,
    ) -> AsyncGenerator[Child, None]:
        """As ``of_snapshot``, from a live sandbox, whose processes are paused while its files are copied.

        The sandbox must be of ``namespace`` (None: of any). The children are of the sandbox's.

        Raises NotFound (SANDBOX_UNKNOWN), FailedPrecondition (CAPABILITY_MISSING, SANDBOX_LOST, SANDBOX_NOT_READY),
        AlreadyExists (REQUEST_ID_REUSED), Unavailable (PAUSE_FAILED).
        """
        with self._copy(request_id, sandbox_id, namespace) as copy:
            layer_id = await asyncio.shield(copy.made)
            async with aclosing(
                self._children(request_id, layer_id, copy.spec, count, asked, wait_s, copy.namespace)
            ) as children:
                async for child in children:
                    yield child

    async def _children(
        self,
        request_id: str,
        layer_id: str,
        origin: SandboxSpec,
        count: int,
        asked: SandboxSpec,
        wait_s: float | None,
        namespace: str,
        joins: str = "",
    ) -> AsyncGenerator[Child, None]:
        spec = dataclasses.replace(
            origin,
            image="",
            snapshot_id=layer_id,
            network=asked.network,
            env={**origin.env, **asked.env},
            lease_s=asked.lease_s,
            repeatable=asked.repeatable,
            labels=asked.labels,
            companions=() if joins else origin.companions,
            joins=joins,
        )
        self._sandboxes.check(spec)  # what all of them would be refused for fails the call itself

        async def make(index: int) -> Child:
            child_id = f"{request_id}/{index}" if request_id else ""
            try:
                return index, await self._sandboxes.create(child_id, spec, namespace, wait_s=wait_s)
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
    def _copy(self, request_id: str, sandbox_id: str, namespace: str | None) -> Iterator[_Copy]:
        """Yields the copy of a request, begun if there is none, and keeps it meanwhile."""
        copy = self._copies.get(request_id)
        if copy is not None and copy.source != sandbox_id:
            raise AlreadyExists("the request id was used for another request", reason="REQUEST_ID_REUSED")
        if copy is None or not self._revived(copy):
            copy = self._begin(request_id, sandbox_id, namespace)
        copy.callers += 1
        try:
            yield copy
        finally:
            copy.callers -= 1
            # Copying cannot be interrupted: a copy without callers is dropped when it is complete.
            copy.made.add_done_callback(lambda _: self._let_go(request_id, copy))

    def _begin(self, request_id: str, sandbox_id: str, namespace: str | None) -> _Copy:
        live, handle, _ = self._sandboxes.table.there(sandbox_id, namespace)
        if not live.backend.capabilities.live_fork:
            raise FailedPrecondition(
                f"the {live.backend.name} backend cannot fork a live sandbox here: prepare a snapshot instead",
                reason="CAPABILITY_MISSING",
                metadata={"backend": live.backend.name, "capabilities": "live_fork"},
            )
        spec = live.view.spec
        made = asyncio.create_task(self._seal(request_id, live, handle))
        copy = _Copy(sandbox_id, live.view.namespace, spec, made)
        self._copies[request_id] = copy
        return copy

    async def _seal(self, request_id: str, live: SandboxEntry, handle: SandboxHandle) -> str:
        layer_id, below = f"lf-{secrets.token_hex(16)}", live.view.spec.snapshot_id
        async with live.changing:
            live.check_lives()
            await live.backend.seal_live(handle, layer_id)
            if below:
                self._layer_refs.hold_below(below)

        copy = self._copies[request_id]

        def gone() -> None:
            if self._copies.get(request_id) is copy:
                del self._copies[request_id]
            if below:
                self._layer_refs.release(below)

        self._layer_refs.put_in(live.view.namespace, layer_id)
        self._layer_refs.hold(layer_id)
        self._layer_refs.leave(layer_id, live.backend, gone, closed=False)
        copy.held = True
        return layer_id

    def _revived(self, copy: _Copy) -> bool:
        """Whether a copy that may have been released can still be used; then it is referenced again."""
        if not copy.made.done() or copy.held:
            return True
        try:
            self._layer_refs.hold(copy.made.result())
        except NotFound:
            return False  # its last child is gone, so its removal has begun
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
            self._layer_refs.release(copy.made.result())

    async def aclose(self) -> None:
        """Waits for the copies in progress; they are removed with the sandboxes."""
        await asyncio.gather(*(copy.made for copy in self._copies.values()), return_exceptions=True)
