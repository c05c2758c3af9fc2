"""penstock.sandbox.v1.FileService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from penstock.sandbox.v1 import file_service_pb2 as pb
from penstock.sandbox.v1 import file_service_pb2_grpc
from penstock_chassis.validation import invalid_field, page_size
from penstock_sandbox import files
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import FileInfo
from penstock_sandbox.rpc import convert
from penstock_sandbox.sandboxes.table import Table

Context = grpc.aio.ServicerContext[Any, Any]


class FileServicer(file_service_pb2_grpc.FileServiceServicer):
    """See the contract. ``spool`` holds an archive until it is complete."""

    def __init__(self, table: Table, spool: Path) -> None:
        self._table = table
        self._spool = spool

    def _handle(self, sandbox_id: str) -> SandboxHandle:
        return self._table.usable(sandbox_id)[1]

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.ReadFileResponse]:  # noqa: N802
        pieces = files.read(
            self._handle(request.sandbox_id),
            request.path,
            request.offset,
            request.length if request.HasField("length") else None,
            follow_symlink=request.follow_symlink,
        )
        # The digest is the last piece, so each piece is held back until the next one arrives.
        held: bytes | None = None
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, FileInfo):
                    yield pb.ReadFileResponse(info=convert.file_to(piece))
                    continue
                if held is not None:
                    yield pb.ReadFileResponse(chunk=held)
                held = piece
        yield pb.ReadFileResponse(sha256=held or b"")

    async def WriteFile(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WriteFileRequest], context: Context
    ) -> pb.WriteFileResponse:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "start":
            raise invalid_field("frame", "the first frame must be start")
        start = first.start
        expected: list[bytes] = []

        async def chunks() -> AsyncIterator[bytes | None]:
            async for request in request_iterator:
                match request.WhichOneof("frame"):
                    case "chunk":
                        yield request.chunk
                    case "end":
                        expected.append(request.end.sha256)
                        yield None
                        return
                    case _:
                        raise invalid_field("frame", "chunk or end is expected here")

        mode = start.mode & 0o777 if start.HasField("mode") else 0o644
        size, digest = await files.write(self._handle(start.sandbox_id), start.path, mode, chunks(), expected)
        return pb.WriteFileResponse(size_bytes=size, sha256=digest)

    async def ReadTree(self, request: pb.ReadTreeRequest, context: Context) -> AsyncIterator[pb.ReadTreeResponse]:  # noqa: N802
        limit = files.tree_limit(request.max_bytes if request.HasField("max_bytes") else None)
        async with aclosing(files.read_tree(self._handle(request.sandbox_id), request.path, limit)) as pieces:
            async for chunk, digest in pieces:
                yield pb.ReadTreeResponse(tar_chunk=chunk) if chunk else pb.ReadTreeResponse(sha256=digest)

    async def WriteTree(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WriteTreeRequest], context: Context
    ) -> pb.WriteTreeResponse:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "start":
            raise invalid_field("frame", "the first frame must be start")
        expected: list[bytes] = []

        async def chunks() -> AsyncIterator[bytes | None]:
            async for request in request_iterator:
                match request.WhichOneof("frame"):
                    case "tar_chunk":
                        yield request.tar_chunk
                    case "end":
                        expected.append(request.end.sha256)
                        yield None
                        return
                    case _:
                        raise invalid_field("frame", "tar_chunk or end is expected here")

        start = first.start
        handle = self._handle(start.sandbox_id)
        entries, size = await files.write_tree(handle, start.path, self._spool, chunks(), expected, layer=start.layer)
        return pb.WriteTreeResponse(entry_count=entries, size_bytes=size)

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.StatResponse:  # noqa: N802
        handle = self._handle(request.sandbox_id)
        return pb.StatResponse(info=convert.file_to(await handle.stat(files.absolute(handle, request.path))))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:  # noqa: N802
        handle = self._handle(request.sandbox_id)
        entries, last = await handle.entries(
            files.absolute(handle, request.path),
            convert.name_in(request.page_token),
            page_size(request.page_size),
        )
        return pb.ListResponse(entries=map(convert.file_to, entries), next_page_token=convert.token_of(last))

    async def MakeDirectory(self, request: pb.MakeDirectoryRequest, context: Context) -> pb.MakeDirectoryResponse:  # noqa: N802
        handle = self._handle(request.sandbox_id)
        mode = request.mode & 0o777 if request.HasField("mode") else 0o755
        await handle.make_directory(files.absolute(handle, request.path), mode)
        return pb.MakeDirectoryResponse()

    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveResponse:  # noqa: N802
        handle = self._handle(request.sandbox_id)
        await handle.remove(files.absolute(handle, request.path), recursive=request.recursive)
        return pb.RemoveResponse()
