"""RunService: the metrics of runs over gRPC."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from penstock.driver.v1 import run_service_pb2, run_service_pb2_grpc
from penstock.values import metrics as rules
from penstock_chassis import auth
from penstock_driver.domain.validation import Violations
from penstock_driver.store.run_metrics import At, Fragment, Logged, RunMetrics

SERVICE: Final = "penstock.driver.v1.RunService"
FEATURE: Final = "runs.metrics"
_MOST_SECONDS: Final = 253_402_300_799
"""The end of the year 9999, with which timestamps end."""


class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """See run_service.proto."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    async def LogMetrics(  # noqa: N802
        self, request: run_service_pb2.LogMetricsRequest, context: Any
    ) -> run_service_pb2.LogMetricsResponse:
        """Returns when they are on disk."""
        await self._metrics.put(auth.caller().home, request.run_id, _logged(request))
        return run_service_pb2.LogMetricsResponse()

    async def ListMetrics(  # noqa: N802
        self, request: run_service_pb2.ListMetricsRequest, context: Any
    ) -> AsyncIterator[run_service_pb2.ListMetricsResponse]:
        """The revision, then the points."""
        found = _about(request.run_id, request.names)
        if request.after_revision < 0:
            found.add("after_revision", "must not be negative")
        least, most = rules.THINNED
        if request.max_points and not least <= request.max_points <= most:
            found.add("max_points", f"expected 0, or {least} to {most}")
        found.refuse()
        scope = auth.caller().scope(request.all_namespaces)
        yield run_service_pb2.ListMetricsResponse(revision=self._metrics.revision)
        points = self._metrics.points(scope, request.run_id, request.names, request.after_revision, request.max_points)
        async with aclosing(points):
            async for fragment in points:
                yield run_service_pb2.ListMetricsResponse(points=_to_proto(fragment))

    async def DeleteMetrics(  # noqa: N802
        self, request: run_service_pb2.DeleteMetricsRequest, context: Any
    ) -> run_service_pb2.DeleteMetricsResponse:
        """Returns when they are gone from the disk."""
        found = _about(request.run_id, request.names)
        if problem := rules.step_problem(request.from_step):
            found.add("from_step", problem)
        found.refuse()
        count = await self._metrics.delete(auth.caller().home, request.run_id, request.names, request.from_step)
        return run_service_pb2.DeleteMetricsResponse(count=count)


def _about(run_id: str, names: Sequence[str]) -> Violations:
    """What is wrong with the run and the names of a selection."""
    found = Violations()
    if problem := rules.run_problem(run_id):
        found.add("run_id", problem)
    if len(names) > rules.MOST_METRICS:
        found.add("names", f"expected at most {rules.MOST_METRICS}")
    else:
        for index, name in enumerate(names):
            if problem := rules.name_problem(name):
                found.add(f"names[{index}]", problem)
    return found


def _logged(request: run_service_pb2.LogMetricsRequest) -> dict[At, Logged]:
    """The points of a request. InvalidArgument (FIELD_INVALID) with every wrong field."""
    found = _about(request.run_id, ())
    if not 1 <= len(request.steps) <= rules.MOST_STEPS:
        found.add("steps", f"expected 1 to {rules.MOST_STEPS}")
    elif sum(len(one.values) for one in request.steps) > rules.MOST_VALUES:
        found.add("steps", f"expected at most {rules.MOST_VALUES} values together")
    found.refuse()
    now, points = time.time_ns() // 1000, dict[At, Logged]()
    for index, one in enumerate(request.steps):
        where = f"steps[{index}]"
        for field, problem in rules.problems(one.step, one.values):
            found.add(f"{where}.{field}", problem)
        at = now
        if one.HasField("time"):
            if _is_valid(one.time):
                at = one.time.seconds * 1_000_000 + one.time.nanos // 1000
            else:
                found.add(f"{where}.time", "expected a time from 1970 to 9999")
        points |= {At(name, one.step): Logged(value, at) for name, value in one.values.items()}
    found.refuse()
    return points


def _is_valid(given: Timestamp) -> bool:
    return 0 <= given.seconds <= _MOST_SECONDS and 0 <= given.nanos < 1_000_000_000


def _to_proto(fragment: Fragment) -> run_service_pb2.MetricPoints:
    return run_service_pb2.MetricPoints(
        namespace=fragment.namespace,
        name=fragment.name,
        steps=[row["step"] for row in fragment.rows],
        values=[row["value"] for row in fragment.rows],
        times=[row["time"] for row in fragment.rows],
    )
