"""Assembles the service: the only module that knows all of its parts, and the access rules of its methods.

Invariants: parts are opened in dependency order and closed in the reverse order, also after a failure.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from penstock.sandbox.v1 import (
    file_service_pb2_grpc,
    process_service_pb2_grpc,
    sandbox_service_pb2_grpc,
    toolbox_service_pb2_grpc,
)
from penstock_chassis.auth import Owned, Role
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.health import NOTICE_S, Draining
from penstock_chassis.journal import Journal
from penstock_chassis.server import Service
from penstock_sandbox.backends.images.registry import RegistryOptions
from penstock_sandbox.backends.images.store import ImageOptions
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.disk.usage import Use
from penstock_sandbox.domain.backend import ENTRY_POINTS, Backend
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.egress.service import Egress, EgressOptions
from penstock_sandbox.rpc.file_service import FileServicer
from penstock_sandbox.rpc.process_service import ProcessServicer
from penstock_sandbox.rpc.sandbox_service import SandboxServicer
from penstock_sandbox.rpc.toolbox_service import ToolboxServicer
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.sandboxes.policy import Limits
from penstock_sandbox.settings import SandboxSettings
from penstock_sandbox.snapshots.forks import Forks
from penstock_sandbox.snapshots.manager import Snapshots
from penstock_sandbox.status import Health
from penstock_sandbox.store.records import MIGRATIONS, SnapshotRecords
from penstock_sandbox.toolboxes import runtimes
from penstock_sandbox.toolboxes.debian_packages import DebianPackages
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes

_PACKAGE = "penstock.sandbox.v1"
_READING = {
    "SandboxService": (
        *("GetSandbox", "ListSandboxes", "WatchSandbox", "WatchSandboxes", "GetStats"),
        *("ListBackends", "GetSnapshot", "ListSnapshots"),
    ),
    "ToolboxService": ("ListToolboxes",),
}
_SERVICES = ("SandboxService", "ProcessService", "FileService", "ToolboxService")

ROLES = (
    {f"{_PACKAGE}.{name}": (Role.TRAINER,) for name in _SERVICES}
    | {
        f"{_PACKAGE}.SandboxService/GetNodeStatus": (),
    }
    | {
        f"{_PACKAGE}.{service}/{method}": (Role.TRAINER, Role.OBSERVER)
        for service, methods in _READING.items()
        for method in methods
    }
)
"""Roles beside the operator that may call each method. Not for observers: outputs and files, which may hold what
agents were given."""

_OF_SANDBOXES = (
    *(
        f"SandboxService/{method}"
        for method in (
            *("GetSandbox", "GetDataPlane", "WatchSandbox", "RenewLease", "SetNetworkPolicy"),
            *("PauseSandbox", "ResumeSandbox", "GetStats", "DiffSandbox"),
        )
    ),
    *(
        f"ProcessService/{method}"
        for method in (
            *("StartProcess", "WatchProcess", "SignalProcess", "KillProcess", "ResizePty"),
            *("GetProcess", "ListProcesses", "WaitProcess", "Run"),
        )
    ),
    *(f"FileService/{method}" for method in ("ReadFile", "ReadTree", "Stat", "List", "MakeDirectory", "Remove")),
)
"""Methods whose request names a sandbox. DeleteSandbox and ForkSandboxes are not among them: deleting an unknown
sandbox succeeds, and a repeated fork may name one that is gone."""
_IN_STREAMS = (
    *("ProcessService/WatchProcesses", "ProcessService/WriteStdin"),
    *("FileService/WriteFile", "FileService/WriteTree"),
)
"""Methods of which messages name a sandbox: the first, of WatchProcesses any."""


@dataclass(frozen=True, slots=True)
class App:
    """The opened domain objects."""

    sandboxes: Sandboxes
    forks: Forks
    snapshots: Snapshots
    toolboxes: Toolboxes
    spool: Path


def _trust(settings: SandboxSettings) -> Path:
    """Where the egress proxy's certificate is: in the local backend's directory, whose parts it can mount."""
    return settings.state_dir / "local" / "egress"


async def _opened_egress(settings: SandboxSettings, stack: AsyncExitStack) -> Egress | None:
    if not settings.egress_hosts:
        return None
    egress = Egress(
        EgressOptions(
            folder=settings.state_dir / "egress",
            trust=_trust(settings),
            private=settings.egress_private_addresses,
            netrc=settings.egress_netrc,
            ca=settings.egress_ca,
            tokens={host: token.get_secret_value() for host, token in settings.egress_tokens.items()},
            store_bytes=settings.egress_store_bytes,
            max_object_bytes=settings.egress_max_object_bytes,
            timeout_s=settings.egress_timeout_s,
            recordings=settings.egress_recordings,
        )
    )
    stack.push_async_callback(egress.aclose)
    await egress.open()
    return egress


def local_backend(settings: SandboxSettings) -> Backend:
    return LocalBackend(
        LocalOptions(
            state_dir=settings.state_dir / "local",
            first_uid=settings.first_uid,
            uid_count=settings.uid_count,
            tmp_bytes=settings.tmp_bytes,
            tmp_inodes=settings.tmp_inodes,
            min_free=Use(settings.min_free_bytes, settings.min_free_inodes),
            extra_read_only=settings.extra_read_only,
            allow_open_network=settings.allow_open_network,
            allowlists=bool(settings.egress_hosts),
            extra_ca=_trust(settings) / "ca.pem" if settings.egress_hosts else None,
            images=ImageOptions(
                RegistryOptions(
                    settings.image_mirrors,
                    {host: text.get_secret_value() for host, text in settings.image_credentials.items()},
                    frozenset(settings.image_plain_http),
                ),
                most_bytes=settings.local_image_bytes,
                most_image_bytes=settings.local_max_image_bytes,
                pull_timeout_s=settings.image_pull_timeout_s,
                prefetch=settings.image_prefetch,
                registries=settings.local_registries,
                # Neither a sandbox's user nor the toolboxes' installer.
                unpack_as=settings.first_uid + settings.uid_count + 1 if os.geteuid() == 0 else None,
            ),
            image=settings.local_image,
            allowed_images=settings.local_allowed_images,
            debian_packages=bool(settings.debian_mirrors),
            staged=dict(runtimes.mountable()),
        )
    )


@asynccontextmanager
async def open_app(settings: SandboxSettings) -> AsyncIterator[App]:
    """Opens everything. Raises FailedPrecondition when the default backend is not installed."""
    # Pipes, sandbox helpers and endpoints: the usual 1024 is not enough for a few hundred sandboxes.
    files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_limit, files_limit))
    async with AsyncExitStack() as stack:
        # The journal's lock makes this instance the only one on its state directory, so it is opened first.
        journal = await stack.enter_async_context(
            await Journal.open(settings.state_dir / "journal.sqlite", MIGRATIONS, sync=settings.journal_sync)
        )
        egress = await _opened_egress(settings, stack)
        backends = {point.name: point.load()(settings) for point in entry_points(group=ENTRY_POINTS)}
        if settings.default_backend not in backends:
            raise FailedPrecondition(
                f"the backend {settings.default_backend!r} is not installed; known backends:  "
                + (", ".join(sorted(backends)) or "none"),
                reason="BACKEND_UNAVAILABLE",
            )
        for backend in backends.values():
            stack.push_async_callback(backend.aclose)
            await backend.open()
        spool = settings.state_dir / "spool"
        await asyncio.to_thread(_fresh_spool, spool)
        installs_as = settings.first_uid + settings.uid_count if os.geteuid() == 0 else None
        toolboxes = Toolboxes(
            settings.state_dir / "local" / "toolboxes",
            Installer(installs_as),
            settings.toolbox_cache_bytes,
            DebianPackages(settings.debian_mirrors, settings.debian_max_bytes, installs_as),
            Watermark(settings.state_dir, settings.min_free_bytes, settings.min_free_inodes),
        )
        await asyncio.to_thread(toolboxes.open)
        stack.push_async_callback(toolboxes.aclose)
        sandboxes = Sandboxes(
            backends,
            settings.default_backend,
            toolboxes,
            journal,
            spool,
            Limits(
                max_sandboxes=settings.max_sandboxes,
                default_lease_s=settings.default_lease_s,
                max_lease_s=settings.max_lease_s,
                default_resources=settings.default_resources,
                allowed_upstreams=settings.allowed_upstreams,
                max_lifetime_s=settings.max_lifetime_s,
                owner_label=settings.owner_label,
                max_sandboxes_per_owner=settings.max_sandboxes_per_owner,
                max_queued=settings.max_queued,
                queue_timeout_s=settings.queue_timeout_s,
                upstream_ca=str(settings.upstream_ca or ""),
                egress_hosts=settings.egress_hosts,
                min_free_bytes=settings.min_free_bytes,
                min_free_inodes=settings.min_free_inodes,
                max_resources=settings.max_resources,
                quotas=settings.quotas(),
            ),
            home=settings.home(),
            egress=egress,
        )
        await sandboxes.open()
        stack.push_async_callback(sandboxes.aclose)
        forks = Forks(sandboxes)
        stack.push_async_callback(forks.aclose)
        snapshots = Snapshots(
            sandboxes,
            SnapshotRecords(journal),
            settings.max_lease_s,
            settings.snapshot_cache_bytes,
            min(settings.snapshot_cache_count, max(1, settings.uid_count // 2)),
            keep=settings.keep_snapshots,
        )
        await snapshots.open()
        stack.push_async_callback(snapshots.aclose)
        yield App(sandboxes, forks, snapshots, toolboxes, spool)


def servicers(app: App, health: Health) -> Service:
    """Returns the gRPC service of an opened app."""

    async def drain(_seconds: float) -> None:
        # A sandbox cannot outlive the service: those that are left after the drain end now.
        await app.sandboxes.drain()

    return Service(
        registrations=(
            (
                SandboxServicer(app.sandboxes, app.forks, app.snapshots, app.toolboxes),
                sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server,
            ),
            (ProcessServicer(app.sandboxes.table), process_service_pb2_grpc.add_ProcessServiceServicer_to_server),
            (FileServicer(app.sandboxes.table, app.spool), file_service_pb2_grpc.add_FileServiceServicer_to_server),
            (
                ToolboxServicer(app.toolboxes, app.sandboxes.home),
                toolbox_service_pb2_grpc.add_ToolboxServiceServicer_to_server,
            ),
        ),
        roles=ROLES,
        owned=_owned(app),
        draining=Draining(app.sandboxes.take, lambda: app.sandboxes.table.count, NOTICE_S),
        drain=drain,
        troubles=health.troubles,
        home=app.sandboxes.home,
    )


def _owned(app: App) -> dict[str, Owned]:
    """Whose the sandboxes and snapshots are that requests name."""

    async def of_sandbox(sandbox_id: str) -> str | None:
        live = app.sandboxes.table.find(sandbox_id)
        return None if live is None else live.view.namespace

    async def of_snapshot(snapshot_id: str) -> str | None:
        snapshot = app.snapshots.find(snapshot_id)
        return None if snapshot is None else snapshot.namespace

    sandbox = Owned(("sandbox_id",), of_sandbox)
    stream = Owned(("start.sandbox_id",), of_sandbox)
    snapshot = Owned(("snapshot_id",), of_snapshot)
    found = dict.fromkeys((f"{_PACKAGE}.{method}" for method in _OF_SANDBOXES), sandbox)
    found |= dict.fromkeys((f"{_PACKAGE}.{method}" for method in _IN_STREAMS), stream)
    return found | {f"{_PACKAGE}.SandboxService/GetSnapshot": snapshot}


@asynccontextmanager
async def build(settings: SandboxSettings) -> AsyncIterator[Service]:
    """Opens the domain and yields the service; closing it ends every sandbox."""
    async with open_app(settings) as app:
        health = Health(app.sandboxes, app.snapshots)
        with health.reported():
            yield servicers(app, health)


def _fresh_spool(spool: Path) -> None:
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in spool.iterdir():
        leftover.unlink()
