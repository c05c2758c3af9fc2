"""Sandboxes by themselves: made, used, deleted; without agents or models."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from types import TracebackType
from typing import Final, Self

from penstock.client import tasks, wire, wire_results, wire_specs
from penstock.client.endpoints import Endpoints
from penstock.client.errors import DataLoss, FailedPrecondition, PenstockError, Unavailable
from penstock.client.results import Exit
from penstock.client.rpc import Service
from penstock.sandbox.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    process_service_pb2,
    process_service_pb2_grpc,
    sandbox_pb2,
    sandbox_service_pb2_grpc,
)
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

_CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a small command."""

    exit: Exit
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Metadata of a file; `kind` is file, directory, symlink or other."""

    name: str
    kind: str
    size_bytes: int
    mode: int
    modify_time: datetime | None
    link_target: str


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend of the sandbox service, and what it can do here. `unavailable_reason` says what to install or set."""

    name: str
    available: bool
    unavailable_reason: str
    is_default: bool
    capabilities: frozenset[str]
    networks: frozenset[str]
    fork: str
    max_sandboxes: int


class SandboxHandle:
    """One sandbox. `async with` deletes it at the end; without, its lease does."""

    def __init__(self, client: "SandboxesClient", message: sandbox_pb2.Sandbox, data: Service, owned: bool) -> None:
        self._client = client
        self._data = data
        self._owned = owned
        self._processes = process_service_pb2_grpc.ProcessServiceStub(data.channel)
        self._files = file_service_pb2_grpc.FileServiceStub(data.channel)
        self.sandbox_id = message.sandbox_id
        self.home = message.home
        """Home directory inside."""
        self.workdir = message.workdir
        """Where commands run and relative paths start."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    async def run(
        self,
        command: tasks.Command | Sequence[str],
        *,
        stdin: bytes = b"",
        output_limit_bytes: int | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        """Runs a small command to its end. A command's own timeout is an exit `timed_out`; cancelling kills it.

        Args:
            command: a `Command`, or an argument vector.
            stdin: given to it, then closed.
            output_limit_bytes: of each stream; None = 1 MiB, at most 10 MiB.
            timeout: seconds for the call; None = none.
        """
        given = command if isinstance(command, tasks.Command) else tasks.Command(command)
        request = process_service_pb2.RunRequest(
            sandbox_id=self.sandbox_id,
            command=wire_specs.command(given),
            stdin=stdin,
            output_limit_bytes=output_limit_bytes,
            process_id=secrets.token_hex(16),
        )
        answer = await self._data.call(self._processes.Run, request, timeout=timeout)
        result = answer.result
        return RunResult(wire_results.exit_from(result.exit), result.stdout, result.stderr)

    async def read_file(self, path: str) -> bytes:
        """A file's content.

        Raises:
            NotFound: `FILE_NOT_FOUND`.
            DataLoss: it did not arrive as it was sent.
        """
        return await self._data.repeat(partial(self._read, path))

    async def _read(self, path: str) -> bytes:
        request = file_service_pb2.ReadFileRequest(sandbox_id=self.sandbox_id, path=path)
        content = bytearray()
        found, announced = sha256(), b""
        async with aclosing(self._data.stream(self._files.ReadFile, request)) as messages:
            async for message in messages:
                content += message.chunk
                announced = message.sha256 or announced
                # Off the loop, and while the next one is on its way.
                await asyncio.to_thread(found.update, message.chunk)
        if found.digest() != announced:
            raise DataLoss(f"{path} did not arrive as it was sent", reason="DIGEST_MISMATCH")
        return bytes(content)

    async def write_file(self, path: str, content: bytes, *, mode: int | None = None) -> None:
        """Writes a whole file at once; parents are made. `mode` are permission bits, None = 0644."""
        await self._data.push(self._files.WriteFile, partial(self._frames, path, content, mode))

    async def _frames(
        self, path: str, content: bytes, mode: int | None
    ) -> AsyncIterator[file_service_pb2.WriteFileRequest]:
        frame = file_service_pb2.WriteFileRequest
        yield frame(start=frame.WriteFileStart(sandbox_id=self.sandbox_id, path=path, mode=mode))
        digest = sha256()
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            yield frame(chunk=chunk)
            # Off the loop, and while it is on its way.
            await asyncio.to_thread(digest.update, chunk)
        yield frame(end=frame.WriteFileEnd(sha256=digest.digest()))

    async def files(self, path: str = ".") -> AsyncGenerator[FileInfo, None]:
        """A directory's entries by name."""
        request = file_service_pb2.ListRequest(sandbox_id=self.sandbox_id, path=path)
        while True:
            answer = await self._data.call(self._files.List, request, repeatable=True)
            for item in answer.entries:
                yield FileInfo(
                    item.name,
                    wire.word(file_service_pb2.FileKind, item.kind, "FILE_KIND_"),
                    item.size_bytes,
                    item.mode,
                    wire.time(item, "modify_time"),
                    item.link_target,
                )
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file or, recursively, a directory. What does not exist is a success."""
        request = file_service_pb2.RemoveRequest(sandbox_id=self.sandbox_id, path=path, recursive=recursive)
        await self._data.call(self._files.Remove, request, repeatable=True)

    async def renew(self, lease: float) -> datetime:
        """Sets the end of its lease to so many seconds from now; returns the end that was granted.

        It is sooner where the operator's `max_lifetime_s` ends the sandbox before.
        """
        request = pb.RenewLeaseRequest(sandbox_id=self.sandbox_id, lease=wire.duration(lease))
        answer = await self._client.service.call(self._client.stub.RenewLease, request, repeatable=True)
        return answer.expire_time.ToDatetime(tzinfo=UTC)

    async def pause(self) -> None:
        """Freezes every process in it; returns when all stand still. Idempotent; the lease runs on.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` where its backend cannot, `SANDBOX_LOST`.
        """
        request = pb.PauseSandboxRequest(sandbox_id=self.sandbox_id)
        await self._client.service.call(self._client.stub.PauseSandbox, request, repeatable=True)

    async def resume(self) -> None:
        """Thaws it. Idempotent."""
        request = pb.ResumeSandboxRequest(sandbox_id=self.sandbox_id)
        await self._client.service.call(self._client.stub.ResumeSandbox, request, repeatable=True)

    async def fork(
        self,
        count: int,
        *,
        network: tasks.Network | None = None,
        env: Mapping[str, str] | None = None,
        lease: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator["Fork", None]:
        """Makes sandboxes with its files as they are now, in order of completion; not with its processes, nor /tmp.

        It stands still while its files are copied, once for all, and then runs on.

        Args:
            count: of children, 1 to 256.
            network: what each may reach; None = nothing.
            env: beside its own.
            lease: seconds that each lives without `renew`; None = 15 min.
            labels: of the children; its own are not theirs.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` where its backend cannot fork a live sandbox, `SANDBOX_LOST`.
        """
        spec = sandbox_pb2.SandboxSpec(
            network=wire_specs.network(network), env=env or {}, lease=wire.duration(lease), labels=labels or {}
        )
        request = pb.ForkSandboxesRequest(
            request_id=secrets.token_hex(16), sandbox_id=self.sandbox_id, count=count, spec=spec
        )
        async with aclosing(self._client.service.stream(self._client.stub.ForkSandboxes, request)) as answers:
            async for answer in answers:
                yield self._client.fork_from(answer)

    async def delete(self) -> None:
        """Kills everything in it and removes it. Idempotent."""
        request = pb.DeleteSandboxRequest(sandbox_id=self.sandbox_id)
        try:
            await self._client.service.call(self._client.stub.DeleteSandbox, request, timeout=60.0, repeatable=True)
        finally:
            if self._owned:
                await self._data.close()


@dataclass(frozen=True, slots=True)
class Fork:
    """One child of a fork: a sandbox, or why there is none."""

    index: int
    sandbox: SandboxHandle | None
    failure: PenstockError | None

    def made(self) -> SandboxHandle:
        """The sandbox. Raises why there is none."""
        if self.sandbox is None:
            assert self.failure is not None
            raise self.failure
        return self.sandbox


class SandboxesClient:
    """`ps.sandboxes`."""

    def __init__(self, service: Service, endpoints: Endpoints) -> None:
        self.service = service
        self.stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        self._endpoints = endpoints

    async def create(
        self,
        *,
        backend: str = "",
        image: str = "",
        snapshot_id: str = "",
        resources: tasks.Resources | None = None,
        network: tasks.Network | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "",
        lease: float | None = None,
        labels: Mapping[str, str] | None = None,
        own_kernel: bool = False,
    ) -> SandboxHandle:
        """Makes a sandbox and returns when it is ready: `async with await ps.sandboxes.create() as sandbox`.

        Args:
            backend: empty = the operator's default.
            image: the backend's name of an image; or `snapshot_id`, of the same backend.
            snapshot_id: what it is made from instead of an image.
            resources: limits; one that cannot be enforced is refused.
            network: what it may reach; None = nothing.
            env: of every process in it.
            user: the account that executes; empty = the backend's ordinary user.
            lease: seconds that it lives without `renew`; None = 15 min.
            labels: for finding it.
            own_kernel: refuse it rather than run it on the kernel of the backend's machine (gVisor, virtual machines).
        """
        spec = sandbox_pb2.SandboxSpec(
            backend=backend,
            resources=wire_specs.resources(resources),
            network=wire_specs.network(network),
            env=env or {},
            user=user,
            lease=wire.duration(lease),
            labels=labels or {},
            own_kernel=own_kernel,
        )
        if snapshot_id:
            spec.base.snapshot_id = snapshot_id
        elif image:
            spec.base.image = image
        request = pb.CreateSandboxRequest(request_id=secrets.token_hex(16), spec=spec)
        answer = await self.service.call(self.stub.CreateSandbox, request, timeout=300.0, repeatable=True)
        return self._handle(answer.sandbox, answer.data_plane if answer.HasField("data_plane") else None)

    async def attach(self, sandbox_id: str) -> SandboxHandle:
        """A handle of a sandbox that is there. Raises NotFound `SANDBOX_UNKNOWN`."""
        found = await self.service.call(
            self.stub.GetSandbox, pb.GetSandboxRequest(sandbox_id=sandbox_id), repeatable=True
        )
        where = await self.service.call(
            self.stub.GetDataPlane, pb.GetDataPlaneRequest(sandbox_id=sandbox_id), repeatable=True
        )
        return self._handle(found.sandbox, where.data_plane if where.HasField("data_plane") else None)

    async def list(self, *, labels: Mapping[str, str] | None = None) -> AsyncGenerator[tuple[str, str], None]:
        """Ids and states (creating, ready, paused, lost) of the sandboxes that have all these labels, newest first."""
        request = pb.ListSandboxesRequest(labels=labels or {})
        while True:
            answer = await self.service.call(self.stub.ListSandboxes, request, repeatable=True)
            for item in answer.sandboxes:
                yield item.sandbox_id, wire.word(sandbox_pb2.SandboxState, item.state, "SANDBOX_STATE_")
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def backends(self) -> Sequence[Backend]:
        """What the service's backends can do on its machine."""
        answer = await self.service.call(self.stub.ListBackends, pb.ListBackendsRequest(), repeatable=True)
        return tuple(
            Backend(
                name=item.name,
                available=item.available,
                unavailable_reason=item.unavailable_reason,
                is_default=item.is_default,
                capabilities=frozenset(name.name for name, value in item.capabilities.ListFields() if value is True),
                networks=frozenset(
                    wire.word(sandbox_pb2.NetworkKind, kind, "NETWORK_KIND_") for kind in item.capabilities.networks
                ),
                fork=wire.word(sandbox_pb2.ForkKind, item.capabilities.fork, "FORK_KIND_"),
                max_sandboxes=item.max_sandboxes,
            )
            for item in answer.backends
        )

    def fork_from(self, answer: pb.ForkSandboxesResponse) -> Fork:
        """One child, from its message."""
        if answer.HasField("failure"):
            told = answer.failure
            kind = Unavailable if told.retriable else FailedPrecondition
            return Fork(answer.index, None, kind(told.message, reason=told.reason))
        where = answer.data_plane if answer.HasField("data_plane") else None
        return Fork(answer.index, self._handle(answer.sandbox, where), None)

    def _handle(self, sandbox: sandbox_pb2.Sandbox, where: sandbox_pb2.DataPlane | None) -> SandboxHandle:
        if where is None:
            return SandboxHandle(self, sandbox, self.service, owned=False)
        endpoints = Endpoints(sandbox=where.address, token=where.token or None, tls=self._endpoints.tls)
        return SandboxHandle(self, sandbox, Service("sandbox", endpoints), owned=True)
