"""All sandbox services as one, and all gates as one, for callers that have no place of their own.

Terminal episodes, checks before a rollout, and readers of trajectories use these. A sandbox and a snapshot name in
their ids the service that has them, and a recorded rollout its gate. What has no such name is asked of all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import BinaryIO, Final

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import ids
from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_chassis.membership.peers import PeerLost, until_lost
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Toolbox
from penstock_driver.domain.ports import (
    BackendFacts,
    Captures,
    Command,
    CommandResult,
    Exit,
    Output,
    PathKind,
    PreparedToolbox,
    Sandboxes,
    SandboxFacts,
    SandboxTerms,
    SnapshotSpec,
    SnapshotStep,
)
from penstock_driver.placement.choice import ranking
from penstock_driver.placement.fleet import GateServices, Member, Members, NodeServices, pinned, tried

_WITH_TOOLBOXES: Final = "toolboxes"
"""Key of what needs an installed toolbox: it is prepared where that is installed."""
RETURN_S: Final = 600.0
"""How long a gate that is no member is taken for one that returns: a pod that is replaced leaves the list meanwhile."""


class AllSandboxes:
    """See `ports.Sandboxes`: each call goes to the service that has the sandbox, or to one that takes new work."""

    def __init__(self, nodes: Members[NodeServices]) -> None:
        self._nodes = nodes

    async def backends(self) -> Sequence[BackendFacts]:
        """The backends of all services that answer; one that is available anywhere is available."""
        found: dict[str, BackendFacts] = {}
        last: BaseException | None = None
        asked = [until_lost(node.peer, node.services.sandboxes.backends()) for node in self._nodes.answering()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, PenstockError | PeerLost):
                last = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for facts in answer:
                    if facts.name not in found or not found[facts.name].available:
                        found[facts.name] = facts
        if not found:
            raise _no_node() from last
        return list(found.values())

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, on_line: Callable[[str], None]
    ) -> PreparedToolbox:
        return await self._for(_WITH_TOOLBOXES).prepare_toolbox(name, toolbox, backend, on_line)

    def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[SnapshotStep]:
        key = _WITH_TOOLBOXES if spec.toolbox_ids else hashlib.sha256(repr(spec).encode()).hexdigest()
        return self._for(key).prepare_snapshot(spec)

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        return await self._for(_WITH_TOOLBOXES).create(terms, lease_s, labels)

    async def fork(
        self,
        snapshot_id: str,
        *,
        request_id: str,
        port: int,
        upstream: str,
        lease_s: float,
        labels: Mapping[str, str],
        repeatable: bool = False,
        allowlist: sandbox_pb2.Allowlist | None = None,
        joins: str = "",
    ) -> SandboxFacts:
        return await self._of(snapshot_id).fork(
            snapshot_id,
            request_id=request_id,
            port=port,
            upstream=upstream,
            lease_s=lease_s,
            labels=labels,
            repeatable=repeatable,
            allowlist=allowlist,
            joins=joins,
        )

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        await self._of(sandbox_id).write_files(sandbox_id, files)

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        await self._of(sandbox_id).put_layer(sandbox_id, path, tar)

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        await self._of(sandbox_id).read_tree(sandbox_id, path, sink, max_bytes)

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        return await self._of(sandbox_id).diff(sandbox_id, below, sink, max_bytes)

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        return await self._of(sandbox_id).kind(sandbox_id, path)

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        return await self._of(sandbox_id).entries(sandbox_id, path, most)

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        return await self._of(sandbox_id).read_file(sandbox_id, path, max_bytes)

    async def start(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        stdin: bytes | None,
        *,
        output_ends: tuple[int, int] | None = None,
        kill_all_after: bool = False,
        files: Sequence[FileToWrite] = (),
    ) -> None:
        await self._of(sandbox_id).start(
            sandbox_id, process_id, command, stdin, output_ends=output_ends, kill_all_after=kill_all_after, files=files
        )

    def watch(self, sandbox_id: str, process_id: str) -> AsyncGenerator[Output | Exit, None]:
        return self._of(sandbox_id).watch(sandbox_id, process_id)

    async def send_stdin(self, sandbox_id: str, process_id: str, stdin: bytes) -> None:
        await self._of(sandbox_id).send_stdin(sandbox_id, process_id, stdin)

    async def pause(self, sandbox_id: str, lease_s: float) -> bool:
        return await self._of(sandbox_id).pause(sandbox_id, lease_s)

    async def resume(self, sandbox_id: str, lease_s: float) -> None:
        await self._of(sandbox_id).resume(sandbox_id, lease_s)

    async def rejoin(self, sandbox_id: str, lease_s: float) -> None:
        await self._of(sandbox_id).rejoin(sandbox_id, lease_s)

    async def renew(self, sandbox_id: str, lease_s: float) -> None:
        await self._of(sandbox_id).renew(sandbox_id, lease_s)

    async def labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        """The labelled sandboxes of every service that answers."""
        found: list[str] = []
        for node in self._nodes.answering():
            found += await node.services.sandboxes.labelled(labels)
        return found

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        await self._of(sandbox_id).kill(sandbox_id, process_id, everything=everything)

    async def run(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        output_limit: int,
        *,
        kill_all_after: bool = False,
        result_file: tuple[str, int] | None = None,
        files: Sequence[FileToWrite] = (),
    ) -> CommandResult:
        return await self._of(sandbox_id).run(
            sandbox_id,
            process_id,
            command,
            output_limit,
            kill_all_after=kill_all_after,
            result_file=result_file,
            files=files,
        )

    async def ended_inside(self, sandbox_id: str) -> bool:
        return await self._of(sandbox_id).ended_inside(sandbox_id)

    async def delete(self, sandbox_id: str) -> None:
        await self._of(sandbox_id).delete(sandbox_id)

    async def delete_labelled(self, labels: Mapping[str, str], *, beside: str = "") -> Sequence[str]:
        """See ports.Sandboxes. Raises the error of a service that did not, once all have been asked."""
        deleted: list[str] = []
        failures = []
        for node in self._beside(beside):
            failure = await tried(node.peer, partial(_deleted, node.services.sandboxes, labels, deleted))
            failures += [failure] if failure else []
        if failures:
            raise failures[0]
        return deleted

    def _beside(self, sandbox_id: str) -> Sequence[Member[NodeServices]]:
        """The member that has this sandbox; all members if its id does not say which.

        Where no member has that name, those that have not said theirs may be it; without one, it went with its service.
        """
        home, nodes = ids.home_of(sandbox_id), self._nodes.all()
        if home is None:
            return nodes
        named = [node for node in nodes if node.peer.own_name == home[1]]
        return named or [node for node in nodes if not node.peer.own_name]

    def _for(self, key: str) -> Sandboxes:
        ready = {node.name: node for node in self._nodes.ready()}
        if not ready:
            raise _no_node()
        return ready[ranking(ready.keys(), key)[0]].services.sandboxes

    def _of(self, resource_id: str) -> Sandboxes:
        home = ids.home_of(resource_id)
        for node in self._nodes.all():
            if home is not None and home[1] == node.peer.own_name:
                if node.peer.is_lost:
                    message = f"the sandbox service {node.name}, which has this, does not answer"
                    raise Unavailable(message, reason="NODE_LOST", retry_after_s=1.0)
                return node.services.sandboxes
        # Of a service that is no member any more: it went with its service.
        raise NotFound(f"no sandbox service among the members has {resource_id}", reason="SANDBOX_LOST")


class AllGates:
    """See `ports.Captures`, and the check before a rollout."""

    def __init__(self, gates: Members[GateServices]) -> None:
        self._gates = gates

    async def check(
        self,
        terms: rollout_gate_service_pb2.OpenRolloutRequest,
        *,
        rollout_id: str,
        group_id: str | None,
        labels: Mapping[str, str],
    ) -> Sequence[str]:
        """See ports.Gate. Any gate can say it, but of a run with budgets the one that counts them."""
        if terms.HasField("run_budgets"):
            chosen = pinned(self._gates, terms.run_id)
            order = [] if chosen is None else [chosen]
        else:
            order = list(self._gates.answering())
        names = await self._gates.first(
            order,
            lambda services: services.gate.check(terms, rollout_id=rollout_id, group_id=group_id, labels=labels),
        )
        if names is None:
            raise _no_gate()
        return names

    async def capture(
        self, rollout_id: str, *, gate: str, include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """See ports.Captures. Raises Unavailable (GATE_LOST) while the rollout's gate does not answer."""
        fragments = self._that_has(rollout_id, gate).capture(
            rollout_id, gate=gate, include_bodies=include_bodies, include_top=include_top
        )
        async for fragment in fragments:
            yield fragment

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        """See ports.Captures. Raises Unavailable (GATE_LOST) while the rollout's gate does not answer."""
        return await self._that_has(rollout_id, gate).tensors(rollout_id, call_id, gate=gate)

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        """See ports.Captures. Raises Unavailable (GATE_LOST) while the rollout's gate does not answer."""
        return await self._that_has(rollout_id, gate).media(rollout_id, call_id, gate=gate)

    async def tool_results(self, rollout_id: str, *, gate: str) -> AsyncIterator[trajectory_pb2.HostToolCall]:
        """See ports.Captures. Raises Unavailable (GATE_LOST) while the rollout's gate does not answer."""
        async for call in self._that_has(rollout_id, gate).tool_results(rollout_id, gate=gate):
            yield call

    def _that_has(self, rollout_id: str, gate: str) -> Captures:
        """Returns the gate of this name ("": the only one). Raises Unavailable (GATE_LOST), NotFound (GATE_GONE)."""
        for member in self._gates.all():
            if member.peer.own_name == gate or not gate:
                if member.peer.is_lost:
                    message = f"gate {member.name}, which has the calls of {rollout_id}, does not answer"
                    raise Unavailable(message, reason="GATE_LOST", retry_after_s=1.0)
                return member.services.gate
        raise self._missing(rollout_id, gate)

    def _missing(self, rollout_id: str, gate: str) -> PenstockError:
        """The error for a gate that no member is, by what is known."""
        members = self._gates.all()
        what = f"gate {gate}, which has the calls of {rollout_id}," if gate else f"the gate of {rollout_id}"
        # A member without a name has not answered this process yet, and may be the one.
        if not members or not all(member.peer.own_name for member in members) or self._gates.gone_s(gate) < RETURN_S:
            return Unavailable(f"{what} does not answer", reason="GATE_LOST", retry_after_s=1.0)
        return NotFound(f"{what} is no member any more", reason="GATE_GONE", metadata={"gate": gate})

    async def delete(self, rollout_id: str) -> None:
        """See ports.Captures: at all gates, since each attempt may have been at another one."""
        for member in self._gates.all():
            failure = await tried(member.peer, partial(member.services.gate.delete, rollout_id))
            if failure is not None:
                message = f"what gate {member.name} has of the rollout cannot be deleted now: {failure}"
                raise Unavailable(message, reason="GATE_LOST", retry_after_s=5.0) from failure

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        """See ports.Captures. All others of `gates` are informed before an error is raised for one that is missing."""
        for member in self._gates.all():
            if gates and member.peer.own_name not in gates:
                continue
            failure = await tried(member.peer, partial(member.services.gate.stored, rollout_id, gates))
            if failure is not None and gates:
                message = f"gate {member.name} cannot be informed now that the rollout is stored: {failure}"
                raise Unavailable(message, reason="GATE_LOST", retry_after_s=5.0) from failure
        if missing := set(gates) - {member.peer.own_name for member in self._gates.all()}:
            raise self._missing(rollout_id, min(missing, key=self._gates.gone_s))


async def _deleted(sandboxes: Sandboxes, labels: Mapping[str, str], deleted: list[str]) -> None:
    deleted.extend(await sandboxes.delete_labelled(labels))


def _no_node() -> Unavailable:
    message = "no sandbox service takes new work: no member answers, or all are draining"
    return Unavailable(message, reason="SANDBOX_UNREACHABLE", retry_after_s=1.0)


def _no_gate() -> Unavailable:
    message = "no gate takes new work: no member answers, or all are draining"
    return Unavailable(message, reason="INTERCEPTION_UNREACHABLE", retry_after_s=1.0)
