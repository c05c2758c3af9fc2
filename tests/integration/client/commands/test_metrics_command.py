"""`penstock metrics`, over real services: shown, as JSON, thinned, deleted from a step on."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from tests.integration.client.test_watch import connection
from tests.support.terminal.commands import invoke

from penstock.client import Penstock, sync

__all__ = ["connection"]  # a fixture
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_metrics_of_a_run_are_shown_and_deleted(ps: Penstock, connection: dict[str, str]) -> None:
    async with ps.intercept(run_id="measured") as session:
        for step in range(50):
            await session.log({"loss": 1 / (step + 1), "lr": 1e-6}, step=step)
    code, out, err = invoke("metrics", "measured", environment=connection)
    assert code == 0, err
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [
        ["loss", "49", "0.02", "0.02", "1"],
        ["lr", "49", "1e-06", "1e-06", "1e-06"],
    ]
    code, out, err = invoke(
        "metrics", "measured", "--name", "loss", "--max-points", "9", "--json", environment=connection
    )
    (found,) = [orjson.loads(line) for line in out.splitlines()]
    assert code == 0 and (found["name"], found["steps"][-1], found["values"][0]) == ("loss", 49, 1.0), err
    assert len(found["steps"]) == len(found["values"]) == len(found["times"]) <= 9
    code, out, _ = invoke("metrics", "measured", "--delete", "--from-step", "20", "--json", environment=connection)
    assert (code, orjson.loads(out)) == (0, {"run_id": "measured", "deleted": 60})
    assert invoke("metrics", "measured", "--delete", environment=connection)[:2] == (0, "40 points deleted\n")
    code, out, err = invoke("metrics", "measured", environment=connection)
    assert (code, out, err) == (1, "", "no metric of measured\n")
    code, _, err = invoke("metrics", "measured", "--from-step", "1", environment=connection)
    assert code == 2 and "--delete" in err


async def test_the_client_without_await_logs_too(ps: Penstock) -> None:
    def log() -> list[float]:
        with sync.connect(ps.endpoints) as blocking:
            with blocking.runs.metric_log("blocking") as log:
                for step in range(20):
                    log.log({"loss": float(step)}, step=step)
            with blocking.intercept(run_id="blocking") as session:
                session.log({"loss": -1.0}, step=0)
            (metric,) = blocking.runs.metrics("blocking")
            return [float(value) for value in metric.values]

    assert await asyncio.to_thread(log) == [-1.0, *map(float, range(1, 20))]
