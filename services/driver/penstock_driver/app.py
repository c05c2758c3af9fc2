"""Assembles the driver: journal, clients of the other services, domain, servicers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import grpc
import structlog
from pydantic import SecretStr

from penstock.driver.v1 import (
    agent_service_pb2_grpc,
    rollout_service_pb2_grpc,
    run_service_pb2_grpc,
    terminal_service_pb2_grpc,
)
from penstock_chassis import times
from penstock_chassis.aio.pace import Pace
from penstock_chassis.auth import Owned, Role
from penstock_chassis.channel import connect
from penstock_chassis.health import Draining
from penstock_chassis.homes import Home
from penstock_chassis.journal import Journal
from penstock_chassis.membership import members
from penstock_chassis.membership.peers import Peer, Peers, following
from penstock_chassis.server import Registration, Service
from penstock_chassis.tls import ClientTls
from penstock_driver.agents import registry
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.clients.gate import GrpcGate
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.pauses import PauseLimits
from penstock_driver.domain.ports import Captures, GateClient, GateReader, Sandboxes
from penstock_driver.domain.records import Filter, new_id
from penstock_driver.environments.throttle import AdaptiveThrottle
from penstock_driver.grading.carried import remove_others
from penstock_driver.placement.everywhere import AllGates, AllSandboxes
from penstock_driver.placement.fleet import (
    NODE_PATIENCE,
    FleetPlacement,
    GateServices,
    Members,
    NodeServices,
    gate_lost,
    gate_patience,
    node_lost,
)
from penstock_driver.placement.members import PeerAddresses, shown
from penstock_driver.placement.placement import OnePlace, Placement
from penstock_driver.placement.services import RunnerServices
from penstock_driver.rollouts.branch_room import BranchRoom
from penstock_driver.rollouts.branching import Parents
from penstock_driver.rollouts.event_limits import EventLimits
from penstock_driver.rollouts.manager import Capacity, RolloutManager
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.rollouts.recovery.replayed_answers import RecordingFile
from penstock_driver.rollouts.recovery.sealed_specs import SealedSpecs
from penstock_driver.rollouts.regrading import Regrader
from penstock_driver.rollouts.use_cases import RolloutCreation, RolloutDeletion, RolloutReading, RolloutUseCases
from penstock_driver.rpc import rollout_service, run_service, terminal_service
from penstock_driver.rpc.agent_service import AgentServicer
from penstock_driver.rpc.rollout_service import RolloutServicer
from penstock_driver.rpc.run_service import RunServicer
from penstock_driver.rpc.terminal_service import TerminalServicer
from penstock_driver.settings import DriverSettings
from penstock_driver.status import ExportHealth, Health
from penstock_driver.store import annotations as annotation_rows
from penstock_driver.store import end_states, exports, records, run_metrics, summaries
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.end_states import Bounds, EndStates
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.exports import ExportQueue
from penstock_driver.store.records import Records
from penstock_driver.store.run_metrics import RunMetrics
from penstock_driver.store.seal import Seal
from penstock_driver.store.summaries import Summaries
from penstock_driver.terminals import records as terminal_records
from penstock_driver.terminals.manager import OpenLimits, TerminalManager
from penstock_driver.terminals.records import TerminalRecords
from penstock_driver.trajectories.annotating import Annotator
from penstock_driver.trajectories.exports.destination import Destination, described
from penstock_driver.trajectories.exports.exporter import BatchLimits, Exporter, Failing, Sources

MIGRATIONS: Final = (
    *(registry.MIGRATION, records.MIGRATION, records.MIGRATION_ATTEMPTS, terminal_records.MIGRATION),
    *(summaries.MIGRATION, records.MIGRATION_NAMESPACES, registry.MIGRATION_NAMESPACES),
    records.MIGRATION_HOME,
    exports.MIGRATION,
    records.MIGRATION_ADOPTION,
    records.MIGRATION_PAUSES,
    records.MIGRATION_BRANCHES,
    records.MIGRATION_KEPT_SPECS,
    end_states.MIGRATION,
    annotation_rows.MIGRATION,
    run_metrics.MIGRATION,
    summaries.MIGRATION_LOGPROBS,
)
EXPORT_THREADS: Final = 2
CARRIED: Final = "carried"
END_STATES: Final = "end-states"
RECORDINGS: Final = "recordings"
"""Directory in the state directory for agents' work that waits to be graded."""
_SHORT: Final = 13
"""Characters of an instance id that distinguish drivers of one name: the letter and 48 bits."""
CONNECTIONS: Final = 8
"""To each sandbox service and gate, which take calls from 4 queues: all of them have one as a rule."""
SETTLE_S: Final = 10.0
"""How long a start waits for the first answers of the other services."""
_EVERYBODY: Final = (Role.TRAINER, Role.OBSERVER)
_READING: Final = {
    "penstock.driver.v1.AgentService": ("ListAgents", "GetAgent"),
    "penstock.driver.v1.RolloutService": (
        *("GetRollout", "ListRollouts", "WatchRollout", "WatchRollouts", "WaitRollout"),
        *("GetGroup", "ListGroups", "WatchGroup", "WaitGroup"),
        *("GetTrajectory", "GetTensor", "GetMedia", "ExportTrajectories"),
    ),
    "penstock.driver.v1.RunService": ("ListMetrics",),
    "penstock.driver.v1.TerminalService": ("GetTerminal",),
}
ROLES: Final = dict.fromkeys(_READING, (Role.TRAINER,)) | {
    f"{service}/{method}": _EVERYBODY for service, methods in _READING.items() for method in methods
}
"""A trainer may do everything here, an observer may only read."""

_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class Driver:
    """The parts of one driver, wired. Before `recover()` only the event log's writer runs; `stop()` ends all else."""

    home: Home
    instance_id: str
    records: Records
    event_log: EventLog
    agents: AgentRegistry
    specs: SealedSpecs
    manager: RolloutManager
    regrader: Regrader
    sandboxes: Sandboxes
    terminals: TerminalManager
    rollout_servicer: RolloutServicer
    agent_servicer: AgentServicer
    run_servicer: RunServicer
    terminal_servicer: TerminalServicer
    owned: Mapping[str, Owned]
    exporter: Exporter | None
    queue: ExportQueue

    async def recover(self) -> None:
        """Go on with what the last process left, and start recording model calls."""
        self.regrader.recover(self.sandboxes)
        left = await self.manager.recover()
        if continued := await self.terminals.recover():
            _log.info("terminals of the previous driver continue", count=continued)
        self.manager.watch_calls()
        if left:
            _log.warning("the driver goes on with rollouts of its last start", count=left)

    async def leave(self, wait_s: float) -> None:
        """Take no more, and leave rollouts and episodes to this driver's next process; wait at most so long for what
        could not go on.
        """
        if self.exporter is not None:
            self.exporter.drain(on=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.regrader.aclose())
            tasks.create_task(self.terminals.leave(wait_s))
            tasks.create_task(self.manager.leave(wait_s))

    async def stop(self) -> None:
        """End all rollouts and episodes, and return when they are released."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.regrader.aclose())
            tasks.create_task(self.terminals.aclose())
            tasks.create_task(self.manager.aclose())

    def take(self, takes: bool) -> None:
        """Take new rollouts and terminals, or refuse them."""
        self.manager.drain(on=not takes)
        self.terminals.draining = not takes
        if self.exporter is not None:
            self.exporter.drain(on=not takes)

    def running(self) -> int:
        """How many rollouts and terminals have not ended, or are not exported yet."""
        exports = 0 if self.exporter is None else self.exporter.pending
        return self.manager.running_count + self.regrader.running_count + self.terminals.open_count + exports

    def registrations(self) -> Sequence[Registration]:
        """The servicers with the generated functions that add them to a server."""
        return [
            (self.agent_servicer, agent_service_pb2_grpc.add_AgentServiceServicer_to_server),
            (self.rollout_servicer, rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server),
            (self.run_servicer, run_service_pb2_grpc.add_RunServiceServicer_to_server),
            (self.terminal_servicer, terminal_service_pb2_grpc.add_TerminalServiceServicer_to_server),
        ]


@asynccontextmanager
async def wired(
    journal: Journal,
    sandboxes: Sandboxes,
    gate: GateReader,
    placement: Placement,
    settings: DriverSettings,
    clock: Callable[[], float] = times.even_time,
    drivers: Peers | None = None,
    destination: Destination | None = None,
) -> AsyncIterator[Driver]:
    """Wire a driver over a journal and clients of the other services; at the end, write what is still to be written.

    `clock` gives monotonic seconds since the epoch. `drivers` are all drivers, where there is a list of them.
    `destination` is where ended rollouts are exported.
    """
    home = settings.home()
    if drivers is not None:
        home = replace(home, peers=PeerAddresses(drivers, home.peers))
    agents, driver_records = await AgentRegistry.open(journal), Records(journal)
    seal = Seal.of(settings.state_dir, _text(settings.journal_key) or "")
    specs = SealedSpecs(seal, agents)
    event_log = EventLog(journal, exports=destination is not None, kept_spec_bytes=settings.kept_spec_bytes)
    terminal_rows = TerminalRecords(journal, seal)
    queue, judged = ExportQueue(journal), Annotations(journal)
    try:
        instance_id, preflight = await driver_records.instance_id(new_id("d")), Preflight(sandboxes, gate)
        exporter = None
        if destination is not None:
            exporter = await _exporter(
                destination,
                queue,
                driver_records,
                event_log,
                gate,
                judged,
                settings,
                f"{home.name}-{instance_id[:_SHORT]}",
            )

        def ended(rollout_id: str) -> None:
            RecordingFile(settings.state_dir / RECORDINGS, rollout_id).remove()
            if exporter is not None:
                exporter.ended()

        states = await EndStates.open(
            journal,
            settings.state_dir / END_STATES,
            Bounds(
                settings.kept_end_state_bytes, settings.kept_end_state_bytes_per_namespace, settings.kept_end_state_s
            ),
            spool=settings.spool_dir,
        )
        regrader = Regrader(
            driver_records,
            specs,
            agents,
            states,
            placement,
            gate,
            instance_id=instance_id,
            most=settings.max_regrades,
        )
        manager = RolloutManager(
            driver_records,
            event_log,
            placement,
            specs,
            instance_id=instance_id,
            capacity=Capacity(
                settings.max_running,
                settings.max_queued,
                EventLimits(settings.max_events, settings.max_event_bytes),
                settings.quotas(),
                settings.weights(),
                PauseLimits(settings.max_pause_s),
            ),
            on_end=ended,
            end_states=states,
        )
        terminals = TerminalManager(
            driver_records,
            terminal_rows,
            sandboxes,
            preflight,
            instance_id=instance_id,
            home=home,
            limits=OpenLimits(settings.max_terminals, settings.quotas()),
            clock=clock,
        )
        recordings = settings.state_dir / RECORDINGS
        room = BranchRoom(settings.max_recording_bytes, driver_records, recordings, manager.is_running)
        parents = Parents(driver_records, specs, gate, recordings, room)
        deletion = RolloutDeletion(manager, driver_records, gate, exporter, states)
        service = RolloutUseCases(
            manager,
            driver_records,
            RolloutCreation(manager, driver_records, agents, preflight, specs, home, parents, deletion),
            deletion,
            RolloutReading(manager, driver_records, event_log, gate, judged),
            Annotator(judged, gate),
            regrader,
        )
        yield Driver(
            home,
            instance_id,
            driver_records,
            event_log,
            agents,
            specs,
            manager,
            regrader,
            sandboxes,
            terminals,
            RolloutServicer(service, manager, driver_records, event_log, Summaries(journal), home),
            AgentServicer(agents, sandboxes),
            RunServicer(await RunMetrics.open(journal, settings.max_metric_points)),
            TerminalServicer(terminals),
            {**rollout_service.owned(driver_records), **terminal_service.owned(terminal_rows)},
            exporter,
            queue,
        )
    finally:
        await event_log.aclose()


async def _exporter(
    destination: Destination,
    queue: ExportQueue,
    driver_records: Records,
    event_log: EventLog,
    captures: Captures,
    judged: Annotations,
    settings: DriverSettings,
    name: str,
) -> Exporter:
    """An exporter to a destination that can be written. Raises what `Destination.check` raises."""
    error = await destination.check(name, is_known=await queue.written_before(destination.url))
    if error is None:
        await queue.writable(destination.url)
    return Exporter(
        queue,
        Sources(driver_records, event_log, captures, judged),
        destination,
        driver=name,
        spool=settings.state_dir / "exports",
        limits=BatchLimits(settings.export_rollouts, settings.export_bytes, settings.export_wait_s),
        bodies=settings.export_bodies,
        failing=None if error is None else Failing(time.time(), described(error)),
    )


def runner_services(
    node: NodeServices, gate: GateServices, captures: Captures, settings: DriverSettings
) -> RunnerServices:
    """What the attempts at one sandbox service and one gate share. `captures` are those of all gates."""
    return RunnerServices(
        node.sandboxes,
        gate.gate,
        node.environments,
        node.forks,
        agent_port=settings.agent_port,
        spool=settings.spool_dir or settings.state_dir,
        max_changes_bytes=settings.max_changes_bytes,
        openings=gate.openings,
        loadings=gate.loadings,
        is_node_lost=node.is_lost,
        is_gate_lost=gate.is_lost,
        captures=captures,
        recordings=settings.state_dir / RECORDINGS,
        carried=settings.state_dir / CARRIED,
        recording_wait_s=settings.recording_wait_s,
        leave_s=settings.leave_s,
    )


def one_place(sandboxes: Sandboxes, gate: GateClient, settings: DriverSettings) -> OnePlace:
    """The placement of a driver with one sandbox service and one gate."""
    return OnePlace(runner_services(NodeServices.of(sandboxes), GateServices(gate), gate, settings))


@asynccontextmanager
async def other_services(
    settings: DriverSettings, lists: dict[str, Peers]
) -> AsyncIterator[tuple[Sandboxes, GateReader, Placement]]:
    """Clients of the sandbox services and the gates, and the placement. `lists` gets the members by kind of service."""
    tls = settings.client_tls()
    sandbox_token, gate_token = _text(settings.sandbox_token), _text(settings.interception_token)

    def dial(address: str, token: str) -> grpc.aio.Channel:
        return connect(address, token or None, tls)

    def node_services(peer: Peer) -> NodeServices:
        sandboxes = GrpcSandboxes(peer.channel, dial, Pace(settings.node_creates_per_s))
        return NodeServices.of(sandboxes, peer, sandboxes.load)

    def gate_services(peer: Peer) -> GateServices:
        gate = GrpcGate(peer.channel, keep_captures=bool(settings.export_url))
        return GateServices(gate, lambda: peer.is_lost, AdaptiveThrottle(waits_out_drains=False), gate.load)

    async with AsyncExitStack() as stack:

        async def followed(kind: str, source: str, token: str | None, connections: int = CONNECTIONS) -> Peers:
            lists[kind] = await stack.enter_async_context(
                following(kind, members.parse(source), lambda member: _to(member, token, tls, connections))
            )
            return lists[kind]

        if settings.driver_members:
            await followed("driver", settings.driver_members, _text(settings.operator_token), connections=1)
        if not settings.sandbox_members:
            sandbox = await stack.enter_async_context(
                connect(settings.sandbox_address, sandbox_token, tls, connections=CONNECTIONS)
            )
            channel = await stack.enter_async_context(
                connect(settings.interception_address, gate_token, tls, connections=CONNECTIONS)
            )
            sandboxes, gate = (
                GrpcSandboxes(sandbox, dial, Pace(settings.node_creates_per_s)),
                GrpcGate(channel, keep_captures=bool(settings.export_url)),
            )
            yield sandboxes, gate, one_place(sandboxes, gate, settings)
            return
        nodes = Members[NodeServices](
            await followed("sandbox", settings.sandbox_members, sandbox_token),
            node_services,
            node_lost,
            NODE_PATIENCE,
        )
        gates = Members[GateServices](
            await followed("interception", settings.interception_members, gate_token),
            gate_services,
            gate_lost,
            gate_patience(settings.interception_silence_s),
        )
        await nodes.settled(SETTLE_S)
        await gates.settled(SETTLE_S)
        captures = AllGates(gates)
        placement = FleetPlacement(nodes, gates, lambda node, gate: runner_services(node, gate, captures, settings))
        yield AllSandboxes(nodes), captures, placement


def _to(member: members.Member, token: str | None, tls: ClientTls | None, connections: int) -> grpc.aio.Channel:
    return connect(member.address, token, tls, certified=member.certified, connections=connections)


@asynccontextmanager
async def build(settings: DriverSettings) -> AsyncIterator[Service]:
    """Open the driver's resources. Rollouts that ran when it last died go on."""
    async with AsyncExitStack() as stack:
        lists: dict[str, Peers] = {}
        sandboxes, gate, placement = await stack.enter_async_context(other_services(settings, lists))
        journal = await stack.enter_async_context(
            await Journal.open(
                settings.state_dir / "driver.db", MIGRATIONS, sync=settings.journal_sync, reads_apart=True
            )
        )
        destination = None
        if settings.export_url:
            pool = ThreadPoolExecutor(EXPORT_THREADS, thread_name_prefix="export")
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            destination = await Destination.opened(settings.export_url, pool)
        driver = await stack.enter_async_context(
            wired(journal, sandboxes, gate, placement, settings, drivers=lists.get("driver"), destination=destination)
        )
        exporting = ExportHealth(driver.exporter, (await driver.queue.backlog()).count)
        health = Health(driver.manager, driver.terminals, placement, exporting, lists.get("driver"), driver.home.name)
        stack.enter_context(health.reported())

        async def drain(_seconds: float) -> None:
            await driver.stop()
            if driver.exporter is not None:
                await driver.exporter.finish()  # as far as the time for the stop allows

        try:
            running = [record.rollout_id async for record in driver.records.all(Filter(ended=False))]
            for folder in (CARRIED, RECORDINGS):
                await asyncio.to_thread(remove_others, settings.state_dir / folder, running)
            await driver.recover()
            # A driver whose journal is broken exits; its next start ends what ran, so no caller waits forever. One that
            # sees no losses any more exits too.
            async with asyncio.TaskGroup() as whole:
                watching = [
                    whole.create_task(driver.event_log.until_broken()),
                    whole.create_task(placement.follow(), name="losses"),
                    *([] if driver.exporter is None else [whole.create_task(driver.exporter.run(), name="exports")]),
                    *(whole.create_task(peers.until_broken()) for kind, peers in lists.items() if kind == "driver"),
                ]
                yield Service(
                    registrations=driver.registrations(),
                    roles=ROLES,
                    draining=Draining(driver.take, driver.running),
                    drain=drain,
                    leave=driver.leave if settings.on_stop == "leave" else None,
                    troubles=health.troubles,
                    owned=driver.owned,
                    features=(*rollout_service.FEATURES, run_service.FEATURE),
                    home=driver.home,
                    members=lambda: shown(lists, driver.home.name),
                )
                for task in watching:
                    task.cancel()
        finally:
            await driver.stop()


def _text(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
