"""The client of the sandbox service: `ports.Sandboxes` over gRPC."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import secrets
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import BinaryIO, Final

import grpc
import structlog

from penstock.sandbox.v1 import (
    file_service_pb2,
    process_service_pb2,
    sandbox_pb2,
    sandbox_service_pb2,
    toolbox_service_pb2,
    toolbox_service_pb2_grpc,
)
from penstock.values import writer
from penstock_chassis import times
from penstock_chassis.aio.pace import Pace
from penstock_chassis.aio.retry import Delays
from penstock_chassis.auth import acting_in
from penstock_chassis.channel import read, streaming, typed_errors, upload
from penstock_chassis.errors import (
    FailedPrecondition,
    Internal,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Toolbox
from penstock_driver.clients.data_planes import DataPlanes, Dial
from penstock_driver.domain.ports import (
    LIMITED,
    BackendFacts,
    Command,
    CommandReport,
    CommandResult,
    Exit,
    Load,
    Output,
    PathKind,
    PreparedSnapshot,
    PreparedToolbox,
    SandboxFacts,
    SandboxTerms,
    SnapshotSpec,
    SnapshotStep,
)
from penstock_driver.domain.rollout import MAKE_S
from penstock_driver.environments.throttle import Creations
from penstock_driver.wire.converters import (
    command_to_proto,
    exit_from_proto,
    result_from_proto,
    seed_to_proto,
    toolbox_to_proto,
)

_log = structlog.get_logger(__name__)

CHUNK_BYTES: Final = 256 << 10
CALL_S: Final = 60.0
"""Deadline of small calls; calls that run a client's commands use the caller's."""
TREE_S: Final = 300.0
"""Deadline of calls that move whole trees; the operation around them has its own limit."""
WATCH_RETRIES: Final = 8
_WATCH_DELAYS: Final = Delays(0.2, 5.0)
_PAGE_SIZE: Final = 1000
_KINDS: Final = {
    file_service_pb2.FILE_KIND_FILE: PathKind.FILE,
    file_service_pb2.FILE_KIND_DIRECTORY: PathKind.DIRECTORY,
    file_service_pb2.FILE_KIND_SYMLINK: PathKind.SYMLINK,
    file_service_pb2.FILE_KIND_OTHER: PathKind.OTHER,
}
_PROBE_S: Final = 5.0
_UNTIL_JUDGED_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses while the sandbox service finds out why a sandbox ended."""


class GrpcSandboxes:
    """Calls one sandbox service over a channel that the caller owns; `pace` spaces what it makes there."""

    def __init__(self, channel: grpc.aio.Channel, dial: Dial | None = None, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._creations = Creations()
        self._planes = DataPlanes(channel, dial)
        self._sandboxes = self._planes.service.sandboxes
        self._toolboxes = toolbox_service_pb2_grpc.ToolboxServiceStub(channel)

    async def backends(self) -> Sequence[BackendFacts]:
        """See ports.Sandboxes."""
        try:
            with typed_errors():
                answer = await self._sandboxes.ListBackends(sandbox_service_pb2.ListBackendsRequest(), timeout=_PROBE_S)
        except Unavailable as error:
            message = f"the sandbox service cannot be reached: {error.message}"
            raise Unavailable(message, reason="SANDBOX_UNREACHABLE", retry_after_s=1.0) from error
        return [
            BackendFacts(
                name=backend.name,
                available=backend.available,
                unavailable_reason=backend.unavailable_reason,
                is_default=backend.is_default,
                one_endpoint=sandbox_pb2.NETWORK_KIND_ONE_ENDPOINT in backend.capabilities.networks,
                egress_hosts=tuple(backend.egress_hosts),
                forks=backend.capabilities.fork > sandbox_pb2.FORK_KIND_NONE,
                root=backend.capabilities.root,
                diff=backend.capabilities.diff,
                toolboxes=backend.capabilities.toolboxes,
                stdin=backend.capabilities.stdin_stream,
                companions=backend.capabilities.companions,
                debian_packages=backend.capabilities.debian_packages,
                limits=frozenset(
                    name
                    for name, held in (
                        ("cpu", backend.capabilities.limit_cpu),
                        ("memory_bytes", backend.capabilities.limit_memory),
                        ("pids", backend.capabilities.limit_pids),
                        ("disk_bytes", backend.capabilities.limit_disk),
                        ("inodes", backend.capabilities.limit_inodes),
                    )
                    if held
                ),
            )
            for backend in answer.backends
        ]

    async def load(self, timeout_s: float) -> Load:
        """What the service says of its load. Raises PenstockError, Unsupported where it is older."""
        request = sandbox_service_pb2.GetNodeStatusRequest()
        with typed_errors():
            answer = await self._sandboxes.GetNodeStatus(request, timeout=timeout_s)
        return Load(
            answer.sandbox_count + answer.waiting_count,
            answer.room,
            answer.free_memory_bytes if answer.HasField("free_memory_bytes") else None,
            frozenset(answer.snapshot_keys),
            self._creations.seconds,
        )

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, on_line: Callable[[str], None]
    ) -> PreparedToolbox:
        """See ports.Sandboxes."""
        request = toolbox_service_pb2.PrepareToolboxRequest(spec=toolbox_to_proto(name, toolbox), backend=backend)
        with typed_errors():
            async for step in self._toolboxes.PrepareToolbox(request):
                if step.WhichOneof("event") == "toolbox":
                    return PreparedToolbox(step.toolbox.toolbox_id, step.toolbox.mount_path)
                on_line(step.progress)
        raise Internal("the sandbox service ended the installation without a toolbox", reason="PROTOCOL_BROKEN")

    async def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[SnapshotStep]:
        """See ports.Sandboxes."""
        sandbox = _sandbox_spec(spec.terms)
        sandbox.toolbox_ids.extend(spec.toolbox_ids)
        request = sandbox_service_pb2.PrepareSnapshotRequest(
            spec=sandbox_service_pb2.SnapshotSpec(
                sandbox=sandbox,
                files=[seed_to_proto(file) for file in spec.files],
                setup=[command_to_proto(command) for command in spec.setup],
            )
        )
        await self._pace.turn()
        with typed_errors():
            async for step in self._sandboxes.PrepareSnapshot(request):
                kind = step.WhichOneof("event")
                if kind == "command_finished":
                    yield CommandReport(step.command_finished.index, result_from_proto(step.command_finished.result))
                elif kind == "snapshot":
                    yield PreparedSnapshot(step.snapshot.snapshot_id, step.snapshot.fork_kind, step.snapshot.key)

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        """See ports.Sandboxes."""
        spec = _sandbox_spec(terms)
        spec.lease.CopyFrom(times.duration(lease_s))
        spec.labels.update(labels)
        request = sandbox_service_pb2.CreateSandboxRequest(request_id=secrets.token_hex(16), spec=spec)
        await self._pace.turn()
        with typed_errors(), self._creations.measured():
            answer = await self._sandboxes.CreateSandbox(request, timeout=MAKE_S)
        self._planes.keep(answer.sandbox.sandbox_id, answer.data_plane)
        return _facts(answer.sandbox)

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
        """See ports.Sandboxes."""
        spec = sandbox_pb2.SandboxSpec(lease=times.duration(lease_s), labels=labels, repeatable=repeatable)
        if allowlist is not None:
            spec.network.allowlist.CopyFrom(allowlist)
        if upstream:
            one = spec.network.one_endpoint if allowlist is None else spec.network.allowlist.one_endpoint
            one.local_port, one.upstream = port, upstream
        request = sandbox_service_pb2.ForkSandboxesRequest(
            request_id=request_id, snapshot_id=snapshot_id, count=1, spec=spec, join_sandbox_id=joins
        )
        await self._pace.turn()
        made: SandboxFacts | None = None
        with self._creations.measured(), streaming(self._sandboxes.ForkSandboxes(request, timeout=MAKE_S)) as children:
            # Read to its end: a call that is left before keeps 16 KB until the garbage collector finds it.
            async for child in children:
                if child.WhichOneof("result") == "sandbox":
                    self._planes.keep(child.sandbox.sandbox_id, child.data_plane)
                    made = _facts(child.sandbox)
                    continue
                failure = child.failure
                kind = ResourceExhausted if failure.retriable else FailedPrecondition
                raise kind(failure.message or "the sandbox could not be forked", reason=failure.reason or "FORK_FAILED")
        if made is not None:
            return made
        raise Internal("the sandbox service ended the fork without a sandbox", reason="PROTOCOL_BROKEN")

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        """See ports.Sandboxes."""
        if len(files) == 1:
            await self._write_file(sandbox_id, files[0])
            return
        root = posixpath.commonpath([posixpath.dirname(file.path) for file in files])
        tar = _tar(root, files)

        def frames() -> Iterator[file_service_pb2.WriteTreeRequest]:
            start = file_service_pb2.WriteTreeRequest.WriteTreeStart(sandbox_id=sandbox_id, path=root)
            yield file_service_pb2.WriteTreeRequest(start=start)
            for offset in range(0, len(tar), CHUNK_BYTES):
                yield file_service_pb2.WriteTreeRequest(tar_chunk=tar[offset : offset + CHUNK_BYTES])
            yield file_service_pb2.WriteTreeRequest(end=file_service_pb2.WriteTreeRequest.WriteTreeEnd())

        with typed_errors():
            await upload((await self._planes.at(sandbox_id)).files.WriteTree, frames, timeout=CALL_S)

    async def _write_file(self, sandbox_id: str, file: FileToWrite) -> None:
        def frames() -> Iterator[file_service_pb2.WriteFileRequest]:
            yield file_service_pb2.WriteFileRequest(
                start=file_service_pb2.WriteFileRequest.WriteFileStart(
                    sandbox_id=sandbox_id, path=file.path, mode=file.mode
                )
            )
            for offset in range(0, len(file.content), CHUNK_BYTES):
                yield file_service_pb2.WriteFileRequest(chunk=file.content[offset : offset + CHUNK_BYTES])
            yield file_service_pb2.WriteFileRequest(end=file_service_pb2.WriteFileRequest.WriteFileEnd())

        with typed_errors():
            await upload((await self._planes.at(sandbox_id)).files.WriteFile, frames, timeout=CALL_S)

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        """See ports.Sandboxes."""
        begin = tar.tell()

        def frames() -> Iterator[file_service_pb2.WriteTreeRequest]:
            tar.seek(begin)
            start = file_service_pb2.WriteTreeRequest.WriteTreeStart(sandbox_id=sandbox_id, path=path, layer=True)
            yield file_service_pb2.WriteTreeRequest(start=start)
            while chunk := tar.read(CHUNK_BYTES):
                yield file_service_pb2.WriteTreeRequest(tar_chunk=chunk)
            yield file_service_pb2.WriteTreeRequest(end=file_service_pb2.WriteTreeRequest.WriteTreeEnd())

        with typed_errors():
            await upload((await self._planes.at(sandbox_id)).files.WriteTree, frames, timeout=TREE_S)

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        """See ports.Sandboxes."""
        request = file_service_pb2.ReadTreeRequest(sandbox_id=sandbox_id, path=path, max_bytes=max_bytes)
        with typed_errors():
            async for event in (await self._planes.at(sandbox_id)).files.ReadTree(request, timeout=TREE_S):
                if event.WhichOneof("event") == "tar_chunk":
                    sink.write(event.tar_chunk)

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        """See ports.Sandboxes."""
        request = sandbox_service_pb2.DiffSandboxRequest(sandbox_id=sandbox_id, below=below, max_bytes=max_bytes)
        size = 0
        with typed_errors():
            method = partial((await self._planes.at(sandbox_id)).sandboxes.DiffSandbox, timeout=TREE_S)
        async with aclosing(read(method, request)) as events:
            async for event in events:
                if event.WhichOneof("event") == "end":
                    return [*event.end.deleted_paths, *map(os.fsdecode, event.end.raw_deleted_paths)]
                size += len(event.tar_chunk)
                if size > max_bytes:
                    raise ResourceExhausted(f"the diff has more than {max_bytes} bytes", reason="TREE_TOO_LARGE")
                sink.write(event.tar_chunk)
        raise Internal("the sandbox service ended the diff without its end", reason="PROTOCOL_BROKEN")

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        """See ports.Sandboxes."""
        try:
            with typed_errors():
                request = file_service_pb2.StatRequest(sandbox_id=sandbox_id, path=path)
                answer = await (await self._planes.at(sandbox_id)).files.Stat(request, timeout=CALL_S)
        except NotFound as error:
            if error.reason != "FILE_NOT_FOUND":
                raise
            return None
        return _KINDS[answer.info.kind]

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        """See ports.Sandboxes."""
        found: dict[str, PathKind] = {}
        token = ""
        while True:
            request = file_service_pb2.ListRequest(
                sandbox_id=sandbox_id, path=path, page_size=_PAGE_SIZE, page_token=token
            )
            with typed_errors():
                answer = await (await self._planes.at(sandbox_id)).files.List(request, timeout=CALL_S)
            found |= {os.fsdecode(info.raw_name) or info.name: _KINDS[info.kind] for info in answer.entries}
            token = answer.next_page_token
            if not token or len(found) > most:
                return found

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        """See ports.Sandboxes."""
        request = file_service_pb2.ReadFileRequest(sandbox_id=sandbox_id, path=path, length=max_bytes)
        content, size = bytearray(), 0
        with typed_errors():
            async for event in (await self._planes.at(sandbox_id)).files.ReadFile(request, timeout=CALL_S):
                kind = event.WhichOneof("event")
                if kind == "info":
                    size = event.info.size_bytes
                elif kind == "chunk":
                    content += event.chunk
        return bytes(content), size

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
        """See ports.Sandboxes."""
        request = process_service_pb2.StartProcessRequest(
            sandbox_id=sandbox_id,
            process_id=process_id,
            command=command_to_proto(command),
            stdin=stdin is not None,
            kill_all_after=kill_all_after,
            files=map(_initial_file, files),
        )
        if output_ends is not None:
            request.output_limit_bytes, request.output_tail_bytes = output_ends
        with typed_errors():
            await (await self._planes.at(sandbox_id)).processes.StartProcess(request, timeout=CALL_S)
        if stdin is not None:
            await self.send_stdin(sandbox_id, process_id, stdin)

    async def send_stdin(self, sandbox_id: str, process_id: str, stdin: bytes) -> None:
        """See ports.Sandboxes."""

        def frames() -> Iterator[process_service_pb2.WriteStdinRequest]:
            start = process_service_pb2.WriteStdinRequest.StdinStart(sandbox_id=sandbox_id, process_id=process_id)
            yield process_service_pb2.WriteStdinRequest(start=start)
            for offset in range(0, len(stdin), CHUNK_BYTES):
                yield process_service_pb2.WriteStdinRequest(data=stdin[offset : offset + CHUNK_BYTES])
            yield process_service_pb2.WriteStdinRequest(end=process_service_pb2.WriteStdinRequest.StdinEnd())

        try:
            with typed_errors():
                await upload((await self._planes.at(sandbox_id)).processes.WriteStdin, frames, timeout=CALL_S)
        except FailedPrecondition as error:
            # The process closed its input or has exited: its exit explains why.
            if error.reason not in ("STDIN_CLOSED", "STDIN_NOT_OPEN"):
                raise

    async def watch(self, sandbox_id: str, process_id: str) -> AsyncGenerator[Output | Exit, None]:
        """See ports.Sandboxes."""
        offsets = {process_service_pb2.OUTPUT_STREAM_STDOUT: 0, process_service_pb2.OUTPUT_STREAM_STDERR: 0}
        failures = 0
        while True:
            try:
                watches = (await self._planes.at(sandbox_id)).watches
                async with aclosing(watches.watch(sandbox_id, process_id, *offsets.values())) as events:
                    async for event in events:
                        failures = 0
                        kind = event.WhichOneof("event")
                        if kind == "chunk":
                            chunk = event.chunk
                            offsets[chunk.stream] = chunk.offset + len(chunk.data)
                            yield Output(chunk.data, chunk.stream == process_service_pb2.OUTPUT_STREAM_STDERR)
                        elif kind == "gap":
                            offsets[event.gap.stream] = event.gap.end
                        elif kind == "exit":
                            yield exit_from_proto(event.exit)
                            return
                error: PenstockError = Unavailable("the stream ended without an exit", reason="STREAM_BROKEN")
            except PenstockError as broken:
                error = broken
            failures += 1
            if not isinstance(error, Unavailable) or failures > WATCH_RETRIES:
                raise error
            await asyncio.sleep(_WATCH_DELAYS.after(failures))

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        """See ports.Sandboxes."""
        request = process_service_pb2.KillProcessRequest(
            sandbox_id=sandbox_id, process_id=process_id, everything=everything
        )
        with typed_errors():
            await (await self._planes.at(sandbox_id)).processes.KillProcess(request, timeout=CALL_S)

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
        """See ports.Sandboxes."""
        request = process_service_pb2.RunRequest(
            sandbox_id=sandbox_id,
            process_id=process_id,
            command=command_to_proto(command),
            output_limit_bytes=output_limit,
            kill_all_after=kill_all_after,
            files=map(_initial_file, files),
        )
        if result_file is not None:
            request.result_file.path, request.result_file.max_bytes = result_file
        with typed_errors():
            answer = await (await self._planes.at(sandbox_id)).processes.Run(request)
        return result_from_proto(answer.result)

    async def ended_inside(self, sandbox_id: str) -> bool:
        """See ports.Sandboxes. Retries, because the loss may be visible before its cause."""
        request = file_service_pb2.StatRequest(sandbox_id=sandbox_id, path="/")
        for pause in _UNTIL_JUDGED_S:
            try:
                with typed_errors():
                    await (await self._planes.at(sandbox_id)).files.Stat(request, timeout=_PROBE_S)
                return False
            except PenstockError as error:
                if error.metadata.get("ended_inside") == "true":
                    return True
                if error.reason != "SANDBOX_LOST":
                    return False
            await asyncio.sleep(pause)
        return False

    async def delete(self, sandbox_id: str) -> None:
        """See ports.Sandboxes."""
        with typed_errors():
            request = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id)
            await (await self._planes.at(sandbox_id)).sandboxes.DeleteSandbox(request, timeout=CALL_S)
        self._planes.drop(sandbox_id)

    async def pause(self, sandbox_id: str, lease_s: float) -> bool:
        """See ports.Sandboxes."""
        request = sandbox_service_pb2.PauseSandboxRequest(sandbox_id=sandbox_id, hold_timeouts=True)
        with typed_errors():
            answer = await self._sandboxes.PauseSandbox(request, timeout=CALL_S)
        await self.renew(sandbox_id, lease_s)
        return not answer.timeouts_only

    async def resume(self, sandbox_id: str, lease_s: float) -> None:
        """See ports.Sandboxes."""
        with typed_errors():
            request = sandbox_service_pb2.ResumeSandboxRequest(sandbox_id=sandbox_id)
            await self._sandboxes.ResumeSandbox(request, timeout=CALL_S)
        await self.renew(sandbox_id, lease_s)

    async def rejoin(self, sandbox_id: str, lease_s: float) -> None:
        """See ports.Sandboxes."""
        with typed_errors():
            where = sandbox_service_pb2.GetDataPlaneRequest(sandbox_id=sandbox_id)
            answer = await self._sandboxes.GetDataPlane(where, timeout=CALL_S)
        await self.renew(sandbox_id, lease_s)
        self._planes.keep(sandbox_id, answer.data_plane)

    async def renew(self, sandbox_id: str, lease_s: float) -> None:
        """See ports.Sandboxes."""
        renewal = sandbox_service_pb2.RenewLeaseRequest(sandbox_id=sandbox_id, lease=times.duration(lease_s))
        try:
            with typed_errors():
                await self._sandboxes.RenewLease(renewal, timeout=CALL_S)
        except FailedPrecondition as error:
            if error.reason != "LEASE_REFUSED":
                raise
            # The sandbox is there, for as long as before, which may well be enough.
            _log.warning("a sandbox keeps its lease", sandbox_id=sandbox_id, error=error.message)

    async def labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        """See ports.Sandboxes."""
        found: list[str] = []
        request = sandbox_service_pb2.ListSandboxesRequest(labels=labels, page_size=_PAGE_SIZE, all_namespaces=True)
        while True:
            with acting_in(None), typed_errors():
                answer = await self._sandboxes.ListSandboxes(request, timeout=CALL_S)
            found += [sandbox.sandbox_id for sandbox in answer.sandboxes]
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def delete_labelled(self, labels: Mapping[str, str], *, beside: str = "") -> Sequence[str]:
        """See ports.Sandboxes."""
        request = sandbox_service_pb2.DeleteSandboxesRequest(labels=labels, all_namespaces=True)
        with acting_in(None), typed_errors():
            answer = await self._sandboxes.DeleteSandboxes(request, timeout=CALL_S)
        for sandbox_id in answer.sandbox_ids:
            self._planes.drop(sandbox_id)
        return list(answer.sandbox_ids)


_sandbox_spec: Final = writer(
    SandboxTerms,
    sandbox_pb2.SandboxSpec,
    renamed={name: f"resources.{name}" for name in LIMITED} | {"image": "base.image", "setup_network": "network"},
    left_out=("env", "toolbox_ids", "lease", "labels", "repeatable"),
)


def _facts(sandbox: sandbox_pb2.Sandbox) -> SandboxFacts:
    home = sandbox.home.rstrip("/") or "/"
    return SandboxFacts(sandbox.sandbox_id, home, sandbox.workdir, sandbox.service, sandbox.takes_files)


def _initial_file(file: FileToWrite) -> process_service_pb2.InitialFile:
    return process_service_pb2.InitialFile(path=file.path, content=file.content, mode=file.mode)


def _tar(root: str, files: Sequence[FileToWrite]) -> bytes:
    """A tar of the files, relative to `root`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(posixpath.relpath(file.path, root))
            member.size, member.mode = len(file.content), file.mode
            tar.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()
