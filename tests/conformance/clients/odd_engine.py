"""An engine that keeps what it is sent, for what no engine of the tests' machine does: adapters, and transfers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from tests.conformance.clients.odd_services import fail

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_CHUNK_BYTES = 1 << 20


class OddEngine(pb_grpc.InferenceServiceServicer):
    """Adapters and transfers in memory. The first load of an adapter named `lost-...` is taken; its answer is lost."""

    def __init__(self) -> None:
        self._adapters: dict[str, pb.Adapter] = {}
        self._transfers: dict[str, tuple[str, int]] = {}
        self._version = 0
        self._lost: set[str] = set()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:  # noqa: N802
        del request, context
        return pb.GetInfoResponse(engine="odd", policy_version=self._version)

    async def LoadAdapter(  # noqa: N802
        self, requests: AsyncIterator[pb.LoadAdapterRequest], context: Context
    ) -> pb.LoadAdapterResponse:
        begin = (await anext(requests)).begin
        content, commit = b"", b""
        async for frame in requests:
            if len(frame.chunk) > _CHUNK_BYTES:
                await _refused(context, "ADAPTER_INVALID", "a chunk is too large")
            content += frame.chunk
            commit = frame.commit.sha256
        if not begin.path:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            size = 8 + int.from_bytes(content[:8], "little") + max(item["data_offsets"][1] for item in header.values())
            if hashlib.sha256(content).digest() != commit or size != len(content):
                await _refused(context, "ADAPTER_INVALID", "it is not the file that was announced")
        known = self._adapters.get(begin.name)
        if known is not None and known.policy_version > begin.policy_version:
            await _refused(context, "POLICY_VERSION_NOT_NEWER", f"version {known.policy_version} is loaded")
        rank = json.loads(begin.adapter_config_json or "{}").get("r", 1)
        self._adapters[begin.name] = pb.Adapter(name=begin.name, policy_version=begin.policy_version, rank=rank)
        if begin.name.startswith("lost-") and begin.name not in self._lost:
            self._lost.add(begin.name)
            wait = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=20_000_000))
            await fail(context, grpc.StatusCode.UNAVAILABLE, "The answer was lost.", wait)
        return pb.LoadAdapterResponse(adapter=self._adapters[begin.name])

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:  # noqa: N802
        del context
        self._adapters.pop(request.name, None)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:  # noqa: N802
        """One a page."""
        del context
        names = sorted(self._adapters)
        at = int(request.page_token or 0)
        more = str(at + 1) if at + 1 < len(names) else ""
        return pb.ListAdaptersResponse(
            adapters=[self._adapters[name] for name in names[at : at + 1]], next_page_token=more
        )

    async def InitTransfer(self, request: pb.InitTransferRequest, context: Context) -> pb.InitTransferResponse:  # noqa: N802
        if request.backend != "nccl" or json.loads(request.options_json) != {"port": 1}:
            await _refused(context, "TRANSFER_REFUSED", "another backend, or other options")
        return pb.InitTransferResponse()

    async def StartTransfer(self, request: pb.StartTransferRequest, context: Context) -> pb.StartTransferResponse:  # noqa: N802
        if not request.request_id:
            await _refused(context, "TRANSFER_REFUSED", "there is no request id")
        self._transfers[request.request_id] = ("", request.policy_version)
        return pb.StartTransferResponse(transfer_id=request.request_id)

    async def TransferTensors(self, request: pb.TransferTensorsRequest, context: Context) -> pb.TransferTensorsResponse:  # noqa: N802
        if request.transfer_id not in self._transfers:
            await _refused(context, "NO_TRANSFER", "it was abandoned")
        if "names" not in json.loads(request.descriptor_json):
            await _refused(context, "TRANSFER_REFUSED", "it names no tensors")
        return pb.TransferTensorsResponse()

    async def FinishTransfer(self, request: pb.FinishTransferRequest, context: Context) -> pb.FinishTransferResponse:  # noqa: N802
        del context
        _, version = self._transfers.pop(request.transfer_id, ("", self._version))
        if request.commit:
            self._version = version
        return pb.FinishTransferResponse(policy_version=self._version)


async def _refused(context: Context, reason: str, message: str) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="penstock")
    await fail(context, grpc.StatusCode.FAILED_PRECONDITION, message, info)


@asynccontextmanager
async def odd_engine() -> AsyncIterator[str]:
    """Serves it; gives its address."""
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    pb_grpc.add_InferenceServiceServicer_to_server(OddEngine(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
