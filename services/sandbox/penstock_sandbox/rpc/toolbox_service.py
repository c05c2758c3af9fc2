"""penstock.sandbox.v1.ToolboxService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.sandbox.v1 import toolbox_service_pb2 as pb
from penstock.sandbox.v1 import toolbox_service_pb2_grpc
from penstock_chassis import times
from penstock_sandbox.model import Runtime, RuntimeKind, Toolbox, ToolboxFile, ToolboxSpec
from penstock_sandbox.rpc import convert
from penstock_sandbox.rpc.pages import page
from penstock_sandbox.toolboxes import Toolboxes

Context = grpc.aio.ServicerContext[Any, Any]
_RUNTIMES = {pb.RUNTIME_KIND_PYTHON: RuntimeKind.PYTHON, pb.RUNTIME_KIND_NODE: RuntimeKind.NODE}


class ToolboxServicer(toolbox_service_pb2_grpc.ToolboxServiceServicer):
    """See the contract."""

    def __init__(self, toolboxes: Toolboxes) -> None:
        self._toolboxes = toolboxes

    async def PrepareToolbox(  # noqa: N802
        self, request: pb.PrepareToolboxRequest, context: Context
    ) -> AsyncIterator[pb.PrepareToolboxResponse]:
        async for event in self._toolboxes.prepare(_spec(request.spec)):
            if isinstance(event, Toolbox):
                yield pb.PrepareToolboxResponse(toolbox=_toolbox(event))
            else:
                yield pb.PrepareToolboxResponse(progress=event)

    async def ListToolboxes(self, request: pb.ListToolboxesRequest, context: Context) -> pb.ListToolboxesResponse:  # noqa: N802
        shown, token = page(
            self._toolboxes.all(), lambda one: (one.created_at, one.id), request.page_size, request.page_token
        )
        return pb.ListToolboxesResponse(toolboxes=map(_toolbox, shown), next_page_token=token)

    async def DeleteToolbox(self, request: pb.DeleteToolboxRequest, context: Context) -> pb.DeleteToolboxResponse:  # noqa: N802
        await self._toolboxes.delete(request.toolbox_id)
        return pb.DeleteToolboxResponse()


def _spec(spec: pb.ToolboxSpec) -> ToolboxSpec:
    for index, runtime in enumerate(spec.runtimes):
        if runtime.kind not in _RUNTIMES:
            raise convert.refuse(f"spec.runtimes[{index}].kind", "must be PYTHON or NODE")
    return ToolboxSpec(
        name=spec.name,
        runtimes=tuple(
            Runtime(_RUNTIMES[runtime.kind], runtime.min_version, runtime.below_version) for runtime in spec.runtimes
        ),
        npm_packages=tuple(spec.npm_packages),
        files=tuple(
            ToolboxFile(file.path, file.content, file.mode if file.HasField("mode") else None) for file in spec.files
        ),
        path_directories=tuple(spec.path_directories),
        python_packages=tuple(spec.python_packages),
    )


def _toolbox(toolbox: Toolbox) -> pb.Toolbox:
    return pb.Toolbox(
        toolbox_id=toolbox.id,
        name=toolbox.name,
        mount_path=toolbox.mount_path,
        size_bytes=toolbox.size,
        create_time=times.timestamp(toolbox.created_at),
    )
