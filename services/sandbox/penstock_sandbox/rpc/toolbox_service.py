"""penstock.sandbox.v1.ToolboxService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.sandbox.v1 import toolbox_service_pb2 as pb
from penstock.sandbox.v1 import toolbox_service_pb2_grpc
from penstock.values import reader, writer
from penstock_chassis.auth import caller
from penstock_chassis.homes import Home
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import Toolbox, ToolboxSpec
from penstock_sandbox.rpc.convert import page
from penstock_sandbox.toolboxes.manager import Toolboxes

Context = grpc.aio.ServicerContext[Any, Any]
_RUNTIMES = (pb.RUNTIME_KIND_PYTHON, pb.RUNTIME_KIND_NODE)


class ToolboxServicer(toolbox_service_pb2_grpc.ToolboxServiceServicer):
    """See the contract."""

    def __init__(self, toolboxes: Toolboxes, home: Home) -> None:
        self._toolboxes = toolboxes
        self._home = home

    async def PrepareToolbox(  # noqa: N802
        self, request: pb.PrepareToolboxRequest, context: Context
    ) -> AsyncIterator[pb.PrepareToolboxResponse]:
        async for event in self._toolboxes.prepare(_spec(request.spec), caller().home):
            if isinstance(event, Toolbox):
                yield pb.PrepareToolboxResponse(toolbox=self._shown(event))
            else:
                yield pb.PrepareToolboxResponse(progress=event)

    async def ListToolboxes(self, request: pb.ListToolboxesRequest, context: Context) -> pb.ListToolboxesResponse:  # noqa: N802
        shown, token = page(
            self._toolboxes.all(caller().scope(request.all_namespaces)),
            lambda one: (one.created_at, one.id),
            request.page_size,
            request.page_token,
        )
        return pb.ListToolboxesResponse(toolboxes=map(self._shown, shown), next_page_token=token)

    async def DeleteToolbox(self, request: pb.DeleteToolboxRequest, context: Context) -> pb.DeleteToolboxResponse:  # noqa: N802
        await self._toolboxes.delete(request.toolbox_id, caller().namespace)
        return pb.DeleteToolboxResponse()

    def _shown(self, toolbox: Toolbox) -> pb.Toolbox:
        message = _toolbox(toolbox)
        message.service = self._home.name
        return message


def _spec(spec: pb.ToolboxSpec) -> ToolboxSpec:
    for index, runtime in enumerate(spec.runtimes):
        if runtime.kind not in _RUNTIMES:
            raise invalid_field(f"spec.runtimes[{index}].kind", "must be PYTHON or NODE")
    return _read_spec(spec)


_read_spec = reader(ToolboxSpec, pb.ToolboxSpec)
_toolbox = writer(
    Toolbox,
    pb.Toolbox,
    renamed={"id": "toolbox_id", "size": "size_bytes", "created_at": "create_time"},
    left_out=("service",),
)
