"""The service as gRPC sees it: which servicers there are and who may call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.sandbox.v1 import (
    file_service_pb2_grpc,
    process_service_pb2_grpc,
    sandbox_service_pb2_grpc,
    toolbox_service_pb2_grpc,
)
from penstock_chassis.auth import Role
from penstock_chassis.server import Service
from penstock_sandbox.app import App, open_app
from penstock_sandbox.oversight import Oversight
from penstock_sandbox.rpc.file_service import FileServicer
from penstock_sandbox.rpc.process_service import ProcessServicer
from penstock_sandbox.rpc.sandbox_service import SandboxServicer
from penstock_sandbox.rpc.toolbox_service import ToolboxServicer
from penstock_sandbox.settings import SandboxSettings

_PACKAGE = "penstock.sandbox.v1"
_READING = {
    "SandboxService": (
        *("GetSandbox", "ListSandboxes", "WatchSandbox", "WatchSandboxes", "GetStats"),
        *("ListBackends", "GetSnapshot", "ListSnapshots"),
    ),
    "ToolboxService": ("ListToolboxes",),
}
_SERVICES = ("SandboxService", "ProcessService", "FileService", "ToolboxService")

ROLES = {f"{_PACKAGE}.{name}": (Role.TRAINER,) for name in _SERVICES} | {
    f"{_PACKAGE}.{service}/{method}": (Role.TRAINER, Role.OBSERVER)
    for service, methods in _READING.items()
    for method in methods
}
"""Who may call what beside the operator. Outputs and files may hold what agents were given: not for observers."""


def servicers(app: App, oversight: Oversight) -> Service:
    """What to serve for an opened app."""

    async def drain(_seconds: float) -> None:
        # A sandbox cannot outlive the service, so waiting for what runs in it would only delay its end.
        await app.sandboxes.drain()

    return Service(
        registrations=(
            (
                SandboxServicer(app.sandboxes, app.forks, app.snapshots),
                sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server,
            ),
            (ProcessServicer(app.sandboxes), process_service_pb2_grpc.add_ProcessServiceServicer_to_server),
            (FileServicer(app.sandboxes, app.spool), file_service_pb2_grpc.add_FileServiceServicer_to_server),
            (ToolboxServicer(app.toolboxes), toolbox_service_pb2_grpc.add_ToolboxServiceServicer_to_server),
        ),
        roles=ROLES,
        drain=drain,
        troubles=oversight.troubles,
    )


@asynccontextmanager
async def build(settings: SandboxSettings) -> AsyncIterator[Service]:
    """Open the domain and yield what to serve; closing ends every sandbox."""
    async with open_app(settings) as app:
        oversight = Oversight(app.sandboxes, app.snapshots)
        with oversight.told():
            yield servicers(app, oversight)
