"""One sandbox: its commands, its files, its copies, its end."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from types import TracebackType
from typing import Final, Self

from penstock.client import tasks, wire, wire_sandboxes, wire_specs
from penstock.client.endpoints import Endpoints
from penstock.client.errors import DataLoss, FailedPrecondition, PenstockError, Unavailable, wrong_type
from penstock.client.rpc import Service
from penstock.client.sandbox_spec import SandboxSpec
from penstock.client.sandbox_values import Diff, FileInfo, RunResult, Stats
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


class SandboxHandle:
    """One sandbox. `async with` deletes it at the end; without, its lease does."""

    def __init__(
        self,
        service: Service,
        endpoints: Endpoints,
        message: sandbox_pb2.Sandbox,
        data_plane: sandbox_pb2.DataPlane | None,
    ) -> None:
        self._service = service
        self._endpoints = endpoints
        self._stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        self._data = service
        if data_plane is not None:
            where = Endpoints(
                sandbox=data_plane.address,
                token=data_plane.token or None,
                tls=endpoints.tls,
                token_origin="the sandbox service, with this sandbox",  # noqa: S106 - no token
            )
            self._data = Service("sandbox", where)
        self._processes = process_service_pb2_grpc.ProcessServiceStub(self._data.channel)
        self._files = file_service_pb2_grpc.FileServiceStub(self._data.channel)
        self.sandbox_id = message.sandbox_id
        self.backend = message.spec.backend
        """Name of its backend."""
        self.home = message.home
        """Home directory inside."""
        self.workdir = message.workdir
        """Where commands run and relative paths start."""

    def __repr__(self) -> str:
        return f"SandboxHandle({self.sandbox_id}, backend={self.backend}, workdir={self.workdir})"

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
        if not isinstance(stdin, bytes):
            raise wrong_type("stdin", "bytes (text.encode())", stdin)
        request = process_service_pb2.RunRequest(
            sandbox_id=self.sandbox_id,
            command=wire_specs.command(given),
            stdin=stdin,
            output_limit_bytes=output_limit_bytes,
            process_id=secrets.token_hex(16),
        )
        answer = await self._data.call(self._processes.Run, request, timeout=timeout)
        return wire_sandboxes.run_result(answer.result)

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
        """Writes a whole file at once; parents are made. `mode` are permission bits, None = 0644.

        Raises:
            InvalidArgument: `ARGUMENT_TYPE`, the content is no bytes: text has to be encoded.
        """
        if not isinstance(content, bytes):
            raise wrong_type("content", "bytes (text.encode())", content)
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
        async for page in self._data.pages(self._files.List, request):
            for item in page.entries:
                yield wire_sandboxes.file_info(item)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file or, recursively, a directory. What does not exist is a success."""
        request = file_service_pb2.RemoveRequest(sandbox_id=self.sandbox_id, path=path, recursive=recursive)
        await self._data.call(self._files.Remove, request, repeatable=True)

    async def renew(self, lease: float) -> datetime:
        """Sets the end of its lease to so many seconds from now; returns the end that was granted.

        It is sooner where the operator's `max_lifetime_s` ends the sandbox before.
        """
        request = pb.RenewLeaseRequest(sandbox_id=self.sandbox_id, lease=wire.duration(lease))
        answer = await self._service.call(self._stub.RenewLease, request, repeatable=True)
        return answer.expire_time.ToDatetime(tzinfo=UTC)

    async def narrow_network(self, network: tasks.Network | None) -> None:
        """Lets it reach less than now; None = nothing. Connections that are no longer allowed are cut.

        Raises:
            FailedPrecondition: `POLICY_WIDER`, a network can only be narrowed; `CAPABILITY_MISSING`.
        """
        policy = wire_specs.network(network) or sandbox_pb2.NetworkPolicy(none=sandbox_pb2.NoNetwork())
        request = pb.SetNetworkPolicyRequest(sandbox_id=self.sandbox_id, network=policy)
        await self._service.call(self._stub.SetNetworkPolicy, request, repeatable=True)

    async def stats(self) -> Stats:
        """What it uses now and used at most."""
        request = pb.GetStatsRequest(sandbox_id=self.sandbox_id)
        answer = await self._service.call(self._stub.GetStats, request, repeatable=True)
        return Stats(
            memory_bytes=wire.optional(answer, "memory_bytes"),
            memory_peak_bytes=wire.optional(answer, "memory_peak_bytes"),
            pids=wire.optional(answer, "pids"),
            cpu_time=wire.seconds(answer, "cpu_time"),
            disk_bytes=wire.optional(answer, "disk_bytes"),
            inodes=wire.optional(answer, "inodes"),
        )

    async def diff(self, *, max_bytes: int | None = None) -> Diff:
        """The files that differ from what it was made from, in memory.

        Args:
            max_bytes: most bytes of the tar, not negative; None = 1 GiB.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` where its backend cannot tell; `FILE_REPLACED` where a file became
                shorter meanwhile.
            ResourceExhausted: `TREE_TOO_LARGE`, before what is too much is read.
            DataLoss: they did not arrive as they were sent.
        """
        return await self._service.repeat(lambda: self._diff(max_bytes))

    async def _diff(self, max_bytes: int | None) -> Diff:
        request = pb.DiffSandboxRequest(sandbox_id=self.sandbox_id, max_bytes=max_bytes)
        content, end = bytearray(), pb.DiffSandboxResponse.DiffEnd()
        async with aclosing(self._service.stream(self._stub.DiffSandbox, request)) as messages:
            async for message in messages:
                content += message.tar_chunk
                if message.HasField("end"):
                    end = message.end
        tar = bytes(content)
        if (await asyncio.to_thread(sha256, tar)).digest() != end.sha256:
            raise DataLoss("The diff did not arrive as it was sent", reason="DIGEST_MISMATCH")
        return Diff(tar, tuple(end.deleted_paths))

    async def pause(self) -> None:
        """Freezes every process in it; returns when all stand still. Idempotent; the lease runs on.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` where its backend cannot, `SANDBOX_LOST`.
        """
        request = pb.PauseSandboxRequest(sandbox_id=self.sandbox_id)
        await self._service.call(self._stub.PauseSandbox, request, repeatable=True)

    async def resume(self) -> None:
        """Thaws it. Idempotent."""
        request = pb.ResumeSandboxRequest(sandbox_id=self.sandbox_id)
        await self._service.call(self._stub.ResumeSandbox, request, repeatable=True)

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
        request = pb.ForkSandboxesRequest(sandbox_id=self.sandbox_id)
        child = SandboxSpec(network=network, env=env or {}, lease=lease, labels=labels or {})
        async with aclosing(forks(self._service, self._endpoints, request, count, child)) as made:
            async for fork in made:
                yield fork

    async def delete(self) -> None:
        """Kills everything in it and removes it. Idempotent."""
        request = pb.DeleteSandboxRequest(sandbox_id=self.sandbox_id)
        try:
            await self._service.call(self._stub.DeleteSandbox, request, timeout=60.0, repeatable=True)
        finally:
            if self._data is not self._service:
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


async def forks(
    service: Service,
    endpoints: Endpoints,
    request: pb.ForkSandboxesRequest,
    count: int,
    child: SandboxSpec,
) -> AsyncGenerator[Fork, None]:
    """The children of the request's source, a snapshot or a live sandbox; `child` is what is said of each."""
    request.request_id = secrets.token_hex(16)
    request.count = count
    request.spec.CopyFrom(wire_sandboxes.spec(child))
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
    async with aclosing(service.stream(stub.ForkSandboxes, request)) as answers:
        async for answer in answers:
            if answer.HasField("failure"):
                told = answer.failure
                kind = Unavailable if told.retriable else FailedPrecondition
                yield Fork(answer.index, None, kind(told.message, reason=told.reason))
                continue
            where = answer.data_plane if answer.HasField("data_plane") else None
            yield Fork(answer.index, SandboxHandle(service, endpoints, answer.sandbox, where), None)
