"""A driver with many rollouts that run, and a dashboard before it: the real stream of rows over a real journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.support.endpoints.loopback import unused_port

from penstock.client.transport.endpoints import Endpoints
from penstock.dashboard.serving import Place, serve
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2_grpc, run_service_pb2_grpc
from penstock.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from penstock_chassis.journal import Journal, Statement
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.records import Filter, Record, RequestKey, RolloutEnd
from penstock_driver.domain.rollout import Outcome, Phase, PhaseChanged, Reward
from penstock_driver.rpc.row_stream import watch_rows
from penstock_driver.rpc.run_service import RunServicer
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.store.run_metrics import RunMetrics
from penstock_driver.store.summaries import Summaries
from penstock_driver.wire.to_proto import outcome_to_proto


@dataclass
class Engine(inference_service_pb2_grpc.InferenceServiceServicer):
    """What an inference service says of the gaps that trainers reported."""

    gaps: Sequence[inference_service_pb2.LogprobGap]

    async def WatchStats(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One message, and then nothing until the watcher leaves."""
        yield inference_service_pb2.WatchStatsResponse(gaps=self.gaps)
        await asyncio.Event().wait()


@dataclass
class Driver(rollout_service_pb2_grpc.RolloutServiceServicer):
    """A driver's own stream of rows over its own journal, which can be stopped and started where it was."""

    rows: Summaries
    history: EventLog
    metrics: RunMetrics
    engine: Engine | None = None
    """Served at the same port."""
    port: int = field(default_factory=unused_port)
    server: Any = field(default=None)

    async def WatchRollouts(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """As the driver's, by run."""
        matching = Filter(run_id=request.filter.run_id or None)
        async for message in watch_rows(self.rows, self.history, matching, request, heartbeat_s=3600):
            yield message

    async def start(self, *, old: bool = False) -> None:
        """Serves, at the port that it had; an `old` one knows no such method."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        if not old:
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(self, self.server)
            run_service_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(self.metrics), self.server)
        if self.engine:
            inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self.engine, self.server)
        self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self) -> None:
        """Nobody answers any more."""
        await self.server.stop(None)

    async def end(self, rollout_id: str, reward: float) -> None:
        """A rollout comes to its end."""
        outcome = Outcome(reward=Reward(reward, 0.0, 1.0, {}))
        self.history.append(rollout_id, None, 1, PhaseChanged(Phase.ENDED), is_summary=True)
        self.history.end(rollout_id, None, RolloutEnd(outcome_to_proto(outcome), {}, last_sequence=1, is_result=True))
        await self.history.flush()


@asynccontextmanager
async def serving(
    place: Path, records: Sequence[Record], updates: Sequence[Statement] = (), engine: Engine | None = None
) -> AsyncIterator[tuple[Driver, str]]:
    """A driver with these rollouts, changed by `updates` before anybody watches, and its dashboard's address."""
    async with AsyncExitStack() as opened:
        journal = await opened.enter_async_context(await Journal.open(place / "driver.db", MIGRATIONS))
        history = EventLog(journal)
        opened.push_async_callback(history.aclose)
        await Records(journal).create(RequestKey("q", "d"), records)
        if updates:
            await journal.write(updates)
        # One method is all that a page of rows needs.
        metrics = await RunMetrics.open(journal, 1_000_000)
        driver = Driver(Summaries(journal), history, metrics, engine)  # type: ignore[abstract]
        await driver.start()
        opened.push_async_callback(driver.stop)
        at = f"127.0.0.1:{driver.port}"
        endpoints = Endpoints(driver=at, sandbox=at, interception=at, inference=at if engine else "")
        shown = await opened.enter_async_context(serve(endpoints, Place(port=0)))
        yield driver, shown.address


@asynccontextmanager
async def many(place: Path, count: int) -> AsyncIterator[tuple[Driver, str]]:
    """A driver with `count` rollouts that run, and its dashboard's address."""
    records = [
        Record(
            rollout_id=f"row-{index:04d}",
            group_id=None,
            index=0,
            run_id="big",
            task_id="<img src=x onerror=alert(1)>" if index == 7 else f"task-{index % 10}",
            agent="shell",
            agent_sha256="",
            labels={"shard": str(index % 4)},
            spec=rollout_pb2.RolloutSpec(),
            create_time=1_700_000_000.0 + index,
            phase=Phase.RUNNING,
        )
        for index in range(count)
    ]
    async with serving(place, records) as opened:
        yield opened
