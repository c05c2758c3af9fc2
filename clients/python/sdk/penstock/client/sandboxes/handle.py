"""One sandbox: its commands, its files, its forks, its deletion."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Final, Self

from penstock.client.errors import DataLoss, FailedPrecondition, PenstockError, Unavailable, wrong_type
from penstock.client.sandboxes.data_plane import DataPlane
from penstock.client.sandboxes.processes import ProcessHandle
from penstock.client.tasks import spec as tasks
from penstock.client.transport.endpoints import Endpoints
from penstock.client.transport.rpc import Service
from penstock.client.types.processes import Process
from penstock.client.types.sandboxes import Diff, FileInfo, RunResult, Sandbox, SandboxSpec, Stats
from penstock.client.wire import chat, sandboxes, specs
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
    """One sandbox. `async with` deletes it at the end; otherwise it lives until its lease expires."""

    def __init__(
        self,
        service: Service,
        endpoints: Endpoints,
        message: sandbox_pb2.Sandbox,
        data_plane: sandbox_pb2.DataPlane | None,
    ) -> None:
        self._endpoints = endpoints
        self._data = service
        if data_plane is not None:
            self._data = DataPlane(service, endpoints, message.sandbox_id, data_plane)
        self._stub = sandbox_service_pb2_grpc.SandboxServiceStub(self._data.channel)
        self._processes = process_service_pb2_grpc.ProcessServiceStub(self._data.channel)
        self._files = file_service_pb2_grpc.FileServiceStub(self._data.channel)
        self.sandbox_id: str = message.sandbox_id
        """Its id."""
        self.backend: str = message.spec.backend
        """Name of its backend."""
        self.home: str = message.home
        """Home directory inside."""
        self.workdir: str = message.workdir
        """Working directory of commands, and base of relative paths."""

    def __repr__(self) -> str:
        return f"SandboxHandle({self.sandbox_id}, backend={self.backend}, workdir={self.workdir})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.delete()

    async def run(
        self,
        command: tasks.Command | Sequence[str],
        *,
        stdin: bytes = b"",
        output_limit_bytes: int | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        """Runs a small command to its end. A command that times out exits as `timed_out`; cancelling kills it.

        Args:
            command: a `Command`, or an argument vector.
            stdin: written to it, then closed.
            output_limit_bytes: of each stream; None = 1 MiB, at most 10 MiB.
            timeout: seconds for the call; None = none.
        """
        given = command if isinstance(command, tasks.Command) else tasks.Command(command)
        if not isinstance(stdin, bytes):
            raise wrong_type("stdin", "bytes (text.encode())", stdin)
        request = process_service_pb2.RunRequest(
            sandbox_id=self.sandbox_id,
            command=specs.command(given),
            stdin=stdin,
            output_limit_bytes=output_limit_bytes,
            process_id=secrets.token_hex(16),
        )
        answer = await self._data.call(self._processes.Run, request, timeout=timeout)
        return sandboxes.run_result(answer.result)

    async def start(
        self,
        command: tasks.Command | Sequence[str],
        *,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        output_limit_bytes: int | None = None,
        output_tail_bytes: int | None = None,
        process_id: str = "",
    ) -> ProcessHandle:
        """Starts a process in the background and returns once it runs: `async with await sandbox.start(...) as p`.

        Args:
            command: a `Command`, or an argument vector. Its `timeout` ends it as `timed_out`.
            stdin: whether it will be written to; otherwise its input is empty.
            pty: rows and columns of a terminal, for programs that want one: one output stream, and an input.
            output_limit_bytes: kept of each stream, later ones are discarded and counted; None = 64 MiB.
            output_tail_bytes: kept of the end beyond that limit, at most 10 MiB; None = none.
            process_id: chosen by you, unique in the sandbox: a repeat returns the process. Empty = assigned.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING`, the backend has no terminals.
            AlreadyExists: `PROCESS_ID_REUSED`.
        """
        given = command if isinstance(command, tasks.Command) else tasks.Command(command)
        request = process_service_pb2.StartProcessRequest(
            sandbox_id=self.sandbox_id,
            process_id=process_id or secrets.token_hex(16),
            command=specs.command(given),
            stdin=stdin,
            pty=None if pty is None else process_service_pb2.PtySize(rows=pty[0], columns=pty[1]),
            output_limit_bytes=output_limit_bytes,
            output_tail_bytes=output_tail_bytes,
        )
        answer = await self._data.call(self._processes.StartProcess, request, repeatable=True)
        return ProcessHandle(self._data, self.sandbox_id, sandboxes.process(answer.process))

    async def process(self, process_id: str) -> ProcessHandle:
        """Returns a handle of a process that was started elsewhere. Raises NotFound `PROCESS_UNKNOWN`."""
        request = process_service_pb2.GetProcessRequest(sandbox_id=self.sandbox_id, process_id=process_id)
        answer = await self._data.call(self._processes.GetProcess, request, repeatable=True)
        return ProcessHandle(self._data, self.sandbox_id, sandboxes.process(answer.process))

    async def processes(self) -> AsyncGenerator[Process, None]:
        """Yields its processes, ended ones included, newest first."""
        request = process_service_pb2.ListProcessesRequest(sandbox_id=self.sandbox_id)
        async for page in self._data.pages(self._processes.ListProcesses, request):
            for item in page.processes:
                yield sandboxes.process(item)

    async def read_file(self, path: str) -> bytes:
        """Returns a file's content.

        Raises:
            NotFound: `FILE_NOT_FOUND`.
            DataLoss: the data was damaged on the way.
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
            raise DataLoss(f"{path} arrived damaged: its digest differs", reason="DIGEST_MISMATCH")
        return bytes(content)

    async def write_file(self, path: str, content: bytes, *, mode: int | None = None) -> None:
        """Writes a whole file at once; creates parent directories. `mode` are permission bits, None = 0644.

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

    async def read_tree(self, path: str = ".", *, max_bytes: int | None = None) -> bytes:
        """Returns a directory as a POSIX pax archive: `tarfile.open(fileobj=io.BytesIO(tar))`, in memory.

        Args:
            path: of the directory.
            max_bytes: maximum size of its files, not negative; None = 1 GiB.

        Raises:
            ResourceExhausted: `TREE_TOO_LARGE`, before the excess is read.
            FailedPrecondition: `FILE_REPLACED`, a file became shorter meanwhile.
            DataLoss: the data was damaged on the way.
        """
        return await self._data.repeat(partial(self._read_tree, path, max_bytes))

    async def _read_tree(self, path: str, max_bytes: int | None) -> bytes:
        request = file_service_pb2.ReadTreeRequest(sandbox_id=self.sandbox_id, path=path, max_bytes=max_bytes)
        content, announced = bytearray(), b""
        async with aclosing(self._data.stream(self._files.ReadTree, request)) as messages:
            async for message in messages:
                content += message.tar_chunk
                announced = message.sha256 or announced
        tar = bytes(content)
        if (await asyncio.to_thread(sha256, tar)).digest() != announced:
            raise DataLoss(f"{path} arrived damaged: its digest differs", reason="DIGEST_MISMATCH")
        return tar

    async def write_tree(self, path: str, tar: bytes, *, layer: bool = False) -> int:
        """Unpacks an archive into a directory, which is created; returns the number of its entries.

        Args:
            path: of the directory.
            tar: POSIX tar, at most 8 GiB and 500,000 entries.
            layer: a member replaces whatever is in its place, and `.wh.NAME` removes NAME, as in images' layers.

        Raises:
            InvalidArgument: `TAR_MEMBER_REFUSED`, nothing was unpacked; `ARGUMENT_TYPE`.
            ResourceExhausted: `TREE_TOO_LARGE`, `DISK_FULL`.
        """
        if not isinstance(tar, bytes):
            raise wrong_type("tar", "bytes", tar)
        answer = await self._data.push(self._files.WriteTree, partial(self._tree_frames, path, tar, layer))
        return answer.entry_count

    async def _tree_frames(
        self, path: str, tar: bytes, layer: bool
    ) -> AsyncIterator[file_service_pb2.WriteTreeRequest]:
        frame = file_service_pb2.WriteTreeRequest
        yield frame(start=frame.WriteTreeStart(sandbox_id=self.sandbox_id, path=path, layer=layer))
        for start in range(0, len(tar), _CHUNK_BYTES):
            yield frame(tar_chunk=tar[start : start + _CHUNK_BYTES])
        yield frame(end=frame.WriteTreeEnd(sha256=(await asyncio.to_thread(sha256, tar)).digest()))

    async def stat(self, path: str) -> FileInfo:
        """Returns a file's metadata; a symbolic link is not followed. Raises NotFound `FILE_NOT_FOUND`."""
        request = file_service_pb2.StatRequest(sandbox_id=self.sandbox_id, path=path)
        answer = await self._data.call(self._files.Stat, request, repeatable=True)
        return sandboxes.file_info(answer.info)

    async def make_directory(self, path: str, *, mode: int | None = None) -> None:
        """Creates a directory and its parents; an existing one is a success. `mode` None = 0755."""
        request = file_service_pb2.MakeDirectoryRequest(sandbox_id=self.sandbox_id, path=path, mode=mode)
        await self._data.call(self._files.MakeDirectory, request, repeatable=True)

    async def files(self, path: str = ".") -> AsyncGenerator[FileInfo, None]:
        """Yields a directory's entries, sorted by name."""
        request = file_service_pb2.ListRequest(sandbox_id=self.sandbox_id, path=path)
        async for page in self._data.pages(self._files.List, request):
            for item in page.entries:
                yield sandboxes.file_info(item)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file or, recursively, a directory. A missing path is a success."""
        request = file_service_pb2.RemoveRequest(sandbox_id=self.sandbox_id, path=path, recursive=recursive)
        await self._data.call(self._files.Remove, request, repeatable=True)

    async def renew(self, lease: float) -> datetime:
        """Extends its lease to `lease` seconds from now; returns the granted end.

        The end is sooner if the operator's `max_lifetime_s` comes first.
        """
        request = pb.RenewLeaseRequest(sandbox_id=self.sandbox_id, lease=chat.duration(lease))
        answer = await self._data.call(self._stub.RenewLease, request, repeatable=True)
        return answer.expire_time.ToDatetime(tzinfo=UTC)

    async def narrow_network(self, network: tasks.Network | None) -> None:
        """Restricts its network; None = no access. Connections that are no longer allowed are cut.

        Raises:
            FailedPrecondition: `POLICY_WIDER`, a network can only be narrowed; `CAPABILITY_MISSING`.
        """
        policy = specs.network(network) or sandbox_pb2.NetworkPolicy(none=sandbox_pb2.NoNetwork())
        request = pb.SetNetworkPolicyRequest(sandbox_id=self.sandbox_id, network=policy)
        await self._data.call(self._stub.SetNetworkPolicy, request, repeatable=True)

    async def refresh(self) -> Sandbox:
        """Fetches its current state. Raises NotFound `SANDBOX_UNKNOWN`."""
        request = pb.GetSandboxRequest(sandbox_id=self.sandbox_id)
        answer = await self._data.call(self._stub.GetSandbox, request, repeatable=True)
        return sandboxes.sandbox(answer.sandbox)

    async def watch(self) -> AsyncGenerator[Sandbox, None]:
        """Yields its state: the present one at once, then each change; ends when it is lost or deleted."""
        request = pb.WatchSandboxRequest(sandbox_id=self.sandbox_id)
        async with aclosing(self._data.stream(self._stub.WatchSandbox, request)) as messages:
            async for message in messages:
                yield sandboxes.sandbox(message.sandbox)

    async def stats(self) -> Stats:
        """Returns its current and peak resource usage."""
        request = pb.GetStatsRequest(sandbox_id=self.sandbox_id)
        answer = await self._data.call(self._stub.GetStats, request, repeatable=True)
        return sandboxes.stats(answer)

    async def diff(self, *, max_bytes: int | None = None) -> Diff:
        """Returns the files that differ from its base, in memory.

        Args:
            max_bytes: maximum size of the tar, not negative; None = 1 GiB.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` if its backend has no diffs; `FILE_REPLACED` if a file became
                shorter meanwhile; `PATH_NOT_TEXT` if the backend cannot give the name of a deleted file.
            ResourceExhausted: `TREE_TOO_LARGE`, before the excess is read.
            DataLoss: the data was damaged on the way.
        """
        return await self._data.repeat(lambda: self._diff(max_bytes))

    async def _diff(self, max_bytes: int | None) -> Diff:
        request = pb.DiffSandboxRequest(sandbox_id=self.sandbox_id, max_bytes=max_bytes)
        content, end = bytearray(), pb.DiffSandboxResponse.DiffEnd()
        async with aclosing(self._data.stream(self._stub.DiffSandbox, request)) as messages:
            async for message in messages:
                content += message.tar_chunk
                if message.HasField("end"):
                    end = message.end
        tar = bytes(content)
        if (await asyncio.to_thread(sha256, tar)).digest() != end.sha256:
            raise DataLoss("The diff arrived damaged: its digest differs", reason="DIGEST_MISMATCH")
        raw = (path.decode(errors="surrogateescape") for path in end.raw_deleted_paths)
        return Diff(tar, (*end.deleted_paths, *raw))

    async def pause(self) -> None:
        """Freezes every process in it; returns when all are stopped. Idempotent; the lease runs on.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` if its backend cannot pause, `SANDBOX_LOST`.
        """
        request = pb.PauseSandboxRequest(sandbox_id=self.sandbox_id)
        await self._data.call(self._stub.PauseSandbox, request, repeatable=True)

    async def resume(self) -> None:
        """Thaws it. Idempotent."""
        request = pb.ResumeSandboxRequest(sandbox_id=self.sandbox_id)
        await self._data.call(self._stub.ResumeSandbox, request, repeatable=True)

    async def fork(
        self,
        count: int,
        *,
        network: tasks.Network | None = None,
        env: Mapping[str, str] | None = None,
        lease: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncGenerator["Fork", None]:
        """Creates sandboxes with its current files, yielded in order of completion; without its processes and /tmp.

        It is frozen while its files are copied, once for all children, and then runs on.

        Args:
            count: number of children, 1 to 256.
            network: what each may reach; None = nothing.
            env: in addition to its own.
            lease: seconds that each lives without `renew`; None = 15 min.
            labels: of the children; they do not inherit its own.

        Raises:
            FailedPrecondition: `CAPABILITY_MISSING` if its backend cannot fork a live sandbox, `SANDBOX_LOST`.
        """
        request = pb.ForkSandboxesRequest(sandbox_id=self.sandbox_id)
        child = SandboxSpec(network=network, env=env or {}, lease=lease, labels=labels or {})
        async with aclosing(forks(self._data, self._endpoints, request, count, child)) as made:
            async for fork in made:
                yield fork

    async def delete(self) -> None:
        """Kills everything in it and removes it. Idempotent."""
        request = pb.DeleteSandboxRequest(sandbox_id=self.sandbox_id)
        try:
            await self._data.call(self._stub.DeleteSandbox, request, timeout=60.0, repeatable=True)
        finally:
            if isinstance(self._data, DataPlane):
                await self._data.close()


@dataclass(frozen=True, slots=True)
class Fork:
    """One child of a fork: a sandbox, or the error."""

    index: int
    sandbox: SandboxHandle | None
    failure: PenstockError | None

    def made(self) -> SandboxHandle:
        """Returns the sandbox, or raises the error."""
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
    """Yields the children of the request's source, a snapshot or a live sandbox; `child` is the spec of each."""
    request.request_id = secrets.token_hex(16)
    request.count = count
    request.spec.CopyFrom(sandboxes.spec(child))
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
    async with aclosing(service.stream(stub.ForkSandboxes, request)) as answers:
        async for answer in answers:
            if answer.HasField("failure"):
                failure = answer.failure
                kind = Unavailable if failure.retriable else FailedPrecondition
                yield Fork(answer.index, None, kind(failure.message, reason=failure.reason))
                continue
            where = answer.data_plane if answer.HasField("data_plane") else None
            yield Fork(answer.index, SandboxHandle(service, endpoints, answer.sandbox, where), None)
