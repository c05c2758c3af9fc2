"""`penstock.ops.v1.OperationsService`: the contract that a service serves, its status and its diagnostics.

Diagnostics common to all services are found here: little disk left, few file descriptors left, a stalled event loop. A
service adds its own by `Service.troubles`. Nothing here acts on them.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

from penstock.ops.v1 import operations_service_pb2 as pb
from penstock.ops.v1 import operations_service_pb2_grpc as rpc
from penstock_chassis import times
from penstock_chassis.auth import Caller, Role, caller
from penstock_chassis.errors import Violation
from penstock_chassis.health import Draining
from penstock_chassis.limits import MAX_MESSAGE_BYTES, MIN_PING_S
from penstock_chassis.telemetry import metrics
from penstock_chassis.telemetry.loop_lag import LoopLag
from penstock_chassis.validation import invalid

SERVICE: Final = "penstock.ops.v1.OperationsService"
ROLES: Final = {
    SERVICE: frozenset(Role),
    f"{SERVICE}/Drain": frozenset({Role.OPERATOR}),
    f"{SERVICE}/Undrain": frozenset({Role.OPERATOR}),
}
WAIT_S: Final = 60.0
"""How long Drain waits without a deadline."""

FEATURES: Final = ("namespaces",)
"""What every service serves of the contract beyond revision 1."""

CONTRACT_REVISION: Final = 2
"""Grows with each release that adds to the protos; docs/compatibility.md lists what each revision added."""

DEFAULT_PATIENCE_S: Final = 60.0
DEFAULT_MIN_FREE: Final = 1 << 30
SUBJECTS: Final = 20
LAG_S: Final = 0.5
"""Loop lag that is a problem: an agent's keep-alive is due every few seconds, and every call waits for the loop."""
_FILES_SHARE: Final = 0.8

DISK_FREE: Final = metrics.gauge(
    "penstock_disk_free_bytes", "Free bytes on the disk of the service's state directory", "disk"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """One diagnostic: a problem, present or imminent; see the message of the same name."""

    reason: str
    message: str
    advice: str
    grave: bool = True
    subjects: tuple[str, ...] = ()
    owners: tuple[str, ...] | None = None
    """The namespaces of `subjects`, by position; empty = not known, for operators alone. None: they are in none, as
    members are."""

    def subjects_for(self, who: Caller) -> Sequence[str]:
        """The subjects that exist for a caller."""
        if self.owners is None:
            return self.subjects
        return [one for one, owner in zip(self.subjects, self.owners, strict=True) if who.may_reach(owner)]


Members: TypeAlias = Callable[[], Iterable[pb.Member]]
"""Returns the services that a service has a list of."""


def no_members() -> Iterable[pb.Member]:
    """For a service that has no list of others."""
    return ()


Troubles: TypeAlias = Callable[[float], Iterable[Trouble]]
"""Returns a service's current diagnostics; the argument is how many seconds something may wait."""


def no_troubles(_patience_s: float) -> Iterable[Trouble]:
    """For a service that adds no diagnostics."""
    return ()


class Operations(rpc.OperationsServiceServicer):
    """Reports the status of one service.

    Args:
        name: the service's short name.
        troubles: the service's own diagnostics.
        disks: directories by name.
        clock: seconds since the epoch.
        restarts: how often the service's supervisor has restarted it.
        last_end: how the previous process ended.
        features: what the service serves of the contract beyond revision 1.
        own_name: the service's name among those of its kind.
        draining: whether it takes new work.
        members: the services of each kind of which it has a list.
    """

    def __init__(
        self,
        name: str,
        troubles: Troubles = no_troubles,
        disks: Mapping[str, Path] | None = None,
        clock: Callable[[], float] = time.time,
        restarts: int = 0,
        last_end: str = "",
        features: Sequence[str] = (),
        own_name: str = "",
        draining: Draining | None = None,
        members: Members = no_members,
    ) -> None:
        self._name = name
        self._members = members
        self._info = server_info(name, features, own_name)
        self._draining = draining or Draining()
        self._troubles = troubles
        self._disks = dict(disks or {})
        self._clock = clock
        self._restarts = restarts
        self._last_end = last_end
        self._started = clock()
        self._lag: LoopLag | None = None

    def begin(self) -> None:
        """Marks the service ready: loop delays of its start do not count."""
        self._started = self._clock()
        self._lag = LoopLag()

    def close(self) -> None:
        """Stops measuring."""
        if self._lag is not None:
            self._lag.close()

    def free(self) -> dict[tuple[str, ...], float]:
        """Free bytes on each disk, for the metrics."""
        return {(name,): float(shutil.disk_usage(path).free) for name, path in self._disks.items() if path.exists()}

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        found = caller()
        return pb.GetServerInfoResponse(
            server=self._info,
            role=found.role,
            namespace=found.namespace or "",
            draining=self._draining.is_on,
            members=self._members(),
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        self._draining.begin()
        drained = False
        if request.wait:
            left = context.time_remaining()
            try:
                async with asyncio.timeout(WAIT_S if left is None else left * 0.8):
                    await self._draining.finished()
                drained = True
            except TimeoutError:
                pass
        return pb.DrainResponse(running_count=self._draining.running(), drained=drained)

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainResponse:  # noqa: N802
        self._draining.undo()
        return pb.UndrainResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        patience = (
            request.patience.ToTimedelta().total_seconds() if request.HasField("patience") else DEFAULT_PATIENCE_S
        )
        least = request.min_free_bytes if request.HasField("min_free_bytes") else DEFAULT_MIN_FREE
        below = [name for name, value in (("patience", patience), ("min_free_bytes", least)) if value < 0]
        if below:
            raise invalid([Violation(name, "must be at least 0") for name in below])
        answer = pb.GetStatusResponse(
            service=self._name,
            version=_version(self._name),
            server_time=times.timestamp(self._clock()),
            start_time=times.timestamp(self._started),
            loop_lag=times.duration(0.0 if self._lag is None else self._lag.longest),
            resident_bytes=_resident(),
            open_files=_open_files(),
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
        for name, path in self._disks.items():
            if path.exists():
                usage = shutil.disk_usage(path)
                answer.disks.add(name=name, path=str(path), free_bytes=usage.free, size_bytes=usage.total)
        for family, values in metrics.gauges():
            for labels, value in values.items():
                answer.gauges.add(name=family.name, labels=dict(zip(family.labels, labels, strict=True)), value=value)
        found = [*self._troubles(patience), *_of_process(answer, least), *self._of_restarts(), *self._of_drain()]
        asking = caller()
        for trouble in sorted(found, key=lambda trouble: not trouble.grave):
            answer.troubles.add(
                reason=trouble.reason,
                message=trouble.message,
                advice=trouble.advice,
                grave=trouble.grave,
                subjects=trouble.subjects_for(asking)[:SUBJECTS],
            )
        return answer

    def _of_restarts(self) -> Iterator[Trouble]:
        if self._restarts:
            times_ = "once" if self._restarts == 1 else f"{self._restarts} times"
            yield Trouble(
                "SERVICE_RESTARTED",
                f"the {self._name} service was restarted {times_} after an unexpected end. {self._last_end}",
                "read its log from before that end. If the kernel killed it for memory, give it more memory or run "
                "less at once. State held in memory only is lost, such as weights pushed to an engine",
                grave=False,
            )

    def _of_drain(self) -> Iterator[Trouble]:
        if self._draining.is_on:
            yield Trouble(
                "SERVICE_DRAINING",
                f"the {self._name} service takes no new work; {self._draining.running()} of its work still runs",
                "stop it when nothing runs (`penstock drain NAME --wait`), or let it take work again (--undo)",
                grave=False,
            )


def server_info(name: str, features: Sequence[str], own_name: str = "") -> pb.ServerInfo:
    """Returns which contract the service of this short name serves; `own_name` is its own among those of its kind."""
    return pb.ServerInfo(
        service=name,
        version=_version(name),
        contract_revision=CONTRACT_REVISION,
        features=sorted({*features, *FEATURES}),
        max_message_bytes=MAX_MESSAGE_BYTES,
        min_ping_interval=times.duration(MIN_PING_S),
        name=own_name,
    )


def _of_process(status: pb.GetStatusResponse, min_free_bytes: int) -> Iterator[Trouble]:
    for disk in status.disks:
        if disk.free_bytes < min_free_bytes:
            yield Trouble(
                "DISK_LOW",
                f"only {disk.free_bytes / 1e9:.1f} GB of {disk.size_bytes / 1e9:.1f} GB are free at {disk.path}, "
                "where the"
                f" {status.service} service keeps its {disk.name}",
                "free space: delete old rollouts and snapshots, or move state_dir to a larger disk and restart",
                grave=disk.free_bytes < min_free_bytes / 4,
            )
    if status.max_files and status.open_files > _FILES_SHARE * status.max_files:
        yield Trouble(
            "FILES_LOW",
            f"the {status.service} service has {status.open_files} files and connections open; its limit is "
            f"{status.max_files}",
            "raise its limit (ulimit -n, LimitNOFILE, or the container's) and restart it",
        )
    lag = status.loop_lag.ToTimedelta().total_seconds()
    if lag > LAG_S:
        yield Trouble(
            "LOOP_LAG",
            f"the {status.service} service's event loop was blocked for {lag:.1f} s in the last minute",
            "the machine has too few processors, or swaps: give the service its own processor; if it has one, "
            "report this with the service's log",
            grave=False,
        )


def _version(name: str) -> str:
    try:
        return metadata.version(f"penstock-{name}")
    except metadata.PackageNotFoundError:
        return ""


def _resident() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _open_files() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return 0
