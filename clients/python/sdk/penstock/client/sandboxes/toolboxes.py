"""Toolboxes: programs that are installed once and mounted read-only in any number of sandboxes."""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from penstock.client.errors import PenstockError, Unavailable
from penstock.client.transport.rpc import Service
from penstock.client.types.toolboxes import Toolbox, ToolboxSpec
from penstock.client.wire import sandboxes
from penstock.sandbox.v1 import toolbox_service_pb2 as pb
from penstock.sandbox.v1 import toolbox_service_pb2_grpc as pb_grpc

_NOTE_LINES: Final = 20
"""Maximum progress lines in the note of an error."""


class ToolboxesClient:
    """`ps.toolboxes`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stub = pb_grpc.ToolboxServiceStub(service.channel)

    async def prepare(self, spec: ToolboxSpec, *, backend: str = "") -> Toolbox:
        """Installs a toolbox, once; equal ones are shared by all callers. Mount it by `SandboxSpec.toolbox_ids`.

        Args:
            spec: its content.
            backend: of the sandboxes; empty = the operator's default.

        Raises:
            FailedPrecondition: `RUNTIME_MISSING`, `CAPABILITY_MISSING`.
            Unavailable: `INSTALL_FAILED`; a note has the last lines of its progress.
        """
        request = pb.PrepareToolboxRequest(spec=sandboxes.toolbox_spec(spec), backend=backend)
        lines: deque[str] = deque(maxlen=_NOTE_LINES)
        try:
            async with aclosing(self._service.stream(self._stub.PrepareToolbox, request)) as events:
                async for event in events:
                    if event.HasField("toolbox"):
                        return sandboxes.toolbox(event.toolbox)
                    lines.append(event.progress)
        except PenstockError as error:
            if lines:
                error.add_note("\n".join(lines))
            raise
        raise Unavailable("The service ended the installation without a toolbox", reason="STREAM_ENDED")

    async def list(self) -> AsyncGenerator[Toolbox, None]:
        """Yields the installed toolboxes, newest first."""
        async for page in self._service.pages(self._stub.ListToolboxes, pb.ListToolboxesRequest()):
            for item in page.toolboxes:
                yield sandboxes.toolbox(item)

    async def delete(self, toolbox_id: str) -> None:
        """Deletes an installed toolbox. Idempotent. Raises FailedPrecondition `TOOLBOX_IN_USE`."""
        request = pb.DeleteToolboxRequest(toolbox_id=toolbox_id)
        await self._service.call(self._stub.DeleteToolbox, request, timeout=60.0, repeatable=True)
