"""Metrics of runs, over all drivers: logged at one of them, listed and deleted at all."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, SupportsFloat

import numpy as np
import numpy.typing as npt

from penstock.client.intercept.metric_log import MetricLog, checked
from penstock.client.rollouts.driver_rpc import RESULT_TIMEOUT_S, Driver, Drivers
from penstock.driver.v1 import run_service_pb2 as pb
from penstock.driver.v1 import run_service_pb2_grpc as pb_grpc

_LOG_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Metric:
    """The points of one metric, by step.

    Attributes:
        name: of the metric.
        steps: shape [n], int64, ascending and without repeats.
        values: shape [n], float64, finite.
        times: shape [n], datetime64[us], UTC: when each was logged.
        namespace: of the run.
    """

    name: str
    steps: npt.NDArray[np.int64] = field(repr=False)
    values: npt.NDArray[np.float64] = field(repr=False)
    times: npt.NDArray[np.datetime64] = field(repr=False)
    namespace: str = ""

    def __len__(self) -> int:
        """Number of points."""
        return len(self.steps)


class RunsClient:
    """Metrics of runs. A run is the `run_id` of rollouts; its metrics may come before its rollouts."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers = drivers

    async def log(
        self, run_id: str, metrics: Mapping[str, SupportsFloat], *, step: int, time: datetime | None = None
    ) -> None:
        """Logs metrics of a step, and returns once they are on the driver's disk. The last value of a step counts.

        `metric_log` logs many in the background.

        Args:
            run_id: of the run: 1 to 63 letters, digits and `. _ / -`.
            metrics: finite numbers by name: 1 to 128 names of 1 to 128 letters, digits and `_ . / -`.
            step: 0 to 2^53 - 1, in any order.
            time: when it was measured, with a time zone; None = now.

        Raises:
            InvalidArgument: `FIELD_INVALID`; violations name the fields.
            ResourceExhausted: `METRIC_LIMIT`: the run or the namespace has as much as it may.
        """
        await self._send(run_id, [checked(run_id, metrics, step, time)])

    def metric_log(self, run_id: str) -> MetricLog:
        """Logs metrics of a run in the background: `async with ps.runs.metric_log("run-7") as log`."""

        async def send(steps: Sequence[pb.StepMetrics]) -> None:
            await self._send(run_id, steps)

        return MetricLog(run_id, send)

    async def metrics(
        self, run_id: str, *, names: Sequence[str] = (), max_points: int = 0, all_namespaces: bool = False
    ) -> list[Metric]:
        """Fetches a run's metrics from all drivers, in the order of their names. A run without any has none.

        Args:
            run_id: of the run.
            names: only these, at most 1024; none = all.
            max_points: 3 to 10,000: thins longer metrics, at each driver, to about as many points. The least and the
                greatest values stay. 0 = all points.
            all_namespaces: of the runs with this id in all namespaces, for an operator.

        Raises:
            InvalidArgument: `FIELD_INVALID`.
            Unavailable: a driver is away, and what it has is missing.
        """
        request = pb.ListMetricsRequest(
            run_id=run_id, names=names, max_points=max_points, all_namespaces=all_namespaces
        )
        found: dict[tuple[str, str], list[pb.MetricPoints]] = defaultdict(list)
        for driver in await self._drivers.all():
            stub = pb_grpc.RunServiceStub(driver.service.channel)
            for message in await driver.service.collect(stub.ListMetrics, request, timeout=RESULT_TIMEOUT_S):
                if message.HasField("points"):
                    found[message.points.name, message.points.namespace].append(message.points)
        return [_merged(parts) for _, parts in sorted(found.items())]

    async def delete_metrics(self, run_id: str, *, names: Sequence[str] = (), from_step: int = 0) -> int:
        """Deletes metrics of a run at all drivers, and returns how many points. Idempotent.

        A trainer that resumes from a checkpoint deletes what the last attempt logged after it.

        Args:
            run_id: of the run.
            names: only these, at most 1024; none = all.
            from_step: points of this step and later ones; 0 = all.

        Raises:
            InvalidArgument: `FIELD_INVALID`.
            Unavailable: a driver is away; others may have deleted theirs.
        """
        request, deleted = pb.DeleteMetricsRequest(run_id=run_id, names=names, from_step=from_step), 0
        for driver in await self._drivers.all():
            stub = pb_grpc.RunServiceStub(driver.service.channel)
            answer = await driver.service.call(stub.DeleteMetrics, request, timeout=RESULT_TIMEOUT_S, repeatable=True)
            deleted += answer.count
        return deleted

    async def _send(self, run_id: str, steps: Sequence[pb.StepMetrics]) -> None:
        request = pb.LogMetricsRequest(run_id=run_id, steps=steps)

        async def send(driver: Driver, is_only: bool) -> pb.LogMetricsResponse:
            stub = pb_grpc.RunServiceStub(driver.service.channel)
            return await driver.service.call(
                stub.LogMetrics, request, timeout=_LOG_TIMEOUT_S, repeatable=True, while_draining=is_only
            )

        await self._drivers.create(send, run_id)


def _merged(parts: Sequence[pb.MetricPoints]) -> Metric:
    """One metric of several drivers' parts: of two points of a step the one with the later time counts."""
    steps = np.concatenate([np.array(part.steps, np.int64) for part in parts])
    values = np.concatenate([np.array(part.values, np.float64) for part in parts])
    times = np.concatenate([np.array(part.times, np.int64) for part in parts])
    order = np.lexsort((times, steps))
    steps, values, times = steps[order], values[order], times[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return Metric(parts[0].name, steps[last], values[last], times[last].astype("datetime64[us]"), parts[0].namespace)
