"""Metrics of runs as the driver's journal has them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.journal import Journal
from penstock_driver.store import run_metrics
from penstock_driver.store.run_metrics import MIGRATION, At, Logged, RunMetrics

Points = dict[str, list[tuple[int, float]]]


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    async with await Journal.open(tmp_path / "driver.db", [MIGRATION], reads_apart=True) as opened:
        yield opened


@pytest.fixture
async def metrics(journal: Journal) -> RunMetrics:
    return await RunMetrics.open(journal, 1000)


async def put(to: RunMetrics, points: dict[tuple[str, int], float], run: str = "r", namespace: str = "a") -> None:
    await to.put(namespace, run, {At(*at): Logged(value, 7) for at, value in points.items()})


async def listed(
    of: RunMetrics, run: str = "r", namespace: str | None = "a", names: tuple[str, ...] = (), **terms: int
) -> Points:
    found: Points = defaultdict(list)
    async for fragment in of.points(namespace, run, names, terms.get("after", 0), terms.get("most", 0)):
        found[fragment.name] += [(row["step"], row["value"]) for row in fragment.rows]
    return dict(found)


async def counts(journal: Journal) -> tuple[int, int, int]:
    """Points that are there, that are counted for their metrics, and for all namespaces."""
    found: list[int] = []
    for table in ("COUNT(*) FROM metric_points", "SUM(points) FROM metrics", "SUM(points) FROM metric_totals"):
        rows: list[Any] = await journal.query(f"SELECT {table}")
        found.append(rows[0][0] or 0)
    return found[0], found[1], found[2]


async def test_the_last_value_of_a_step_counts(metrics: RunMetrics, journal: Journal) -> None:
    await put(metrics, {("loss", 1): 0.5, ("loss", 2): 0.25})
    await put(metrics, {("loss", 2): 0.125, ("kl", 2): 3.0})
    assert await listed(metrics) == {"kl": [(2, 3.0)], "loss": [(1, 0.5), (2, 0.125)]}
    assert await counts(journal) == (3, 3, 3)


async def test_a_repeat_changes_nothing(metrics: RunMetrics) -> None:
    await put(metrics, {("loss", 1): 0.5})
    before = metrics.revision
    await put(metrics, {("loss", 1): 0.5})
    assert await listed(metrics, after=before) == {}


async def test_what_was_written_after_a_revision_can_be_listed_also_after_a_restart(
    metrics: RunMetrics, journal: Journal
) -> None:
    await put(metrics, {("loss", 5): 1.0, ("kl", 5): 1.0})
    before = metrics.revision
    again = await RunMetrics.open(journal, 1000)
    assert again.revision == before
    await put(again, {("loss", 5): 2.0, ("loss", 3): 3.0})
    assert again.revision > before
    assert await listed(again, after=before) == {"loss": [(3, 3.0), (5, 2.0)]}


async def test_runs_and_namespaces_are_apart(metrics: RunMetrics) -> None:
    await put(metrics, {("loss", 1): 1.0})
    await put(metrics, {("loss", 1): 2.0}, run="other")
    await put(metrics, {("loss", 1): 3.0}, namespace="b")
    assert await listed(metrics) == {"loss": [(1, 1.0)]}
    assert await metrics.delete("b", "r", (), 0) == 1
    assert await listed(metrics) == {"loss": [(1, 1.0)]}
    assert await listed(metrics, namespace=None) == {"loss": [(1, 1.0)]}


async def test_only_named_metrics_are_listed_and_deleted(metrics: RunMetrics, journal: Journal) -> None:
    await put(metrics, {(name, step): 1.0 for name in ("a", "b") for step in range(4)})
    assert list(await listed(metrics, names=("b", "unknown"))) == ["b"]
    assert await metrics.delete("a", "r", ["b"], 2) == 2
    assert await listed(metrics, names=("b",)) == {"b": [(0, 1.0), (1, 1.0)]}
    assert await metrics.delete("a", "r", (), 0) == 6
    assert await metrics.delete("a", "r", (), 0) == 0
    assert await counts(journal) == (0, 0, 0)
    assert await listed(metrics) == {}


async def test_a_namespace_has_a_bound_and_a_replaced_point_is_no_further_one(
    metrics: RunMetrics, journal: Journal
) -> None:
    await put(metrics, {("m", step): 0.0 for step in range(1000)})
    await put(metrics, {("m", step): 1.0 for step in range(1000)})
    with pytest.raises(ResourceExhausted) as refused:
        await put(metrics, {("m", 999): 2.0, ("m", 1000): 2.0}, run="another")
    assert refused.value.reason == "METRIC_LIMIT"
    await put(metrics, {("m", 1): 1.0}, namespace="b")
    assert await counts(journal) == (1001, 1001, 1001)


async def test_a_run_has_at_most_1024_metrics_and_2_million_points(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = await RunMetrics.open(journal, 10_000)
    await put(metrics, {(f"m{index}", 0): 0.0 for index in range(1024)})
    with pytest.raises(ResourceExhausted, match="1025 metrics"):
        await put(metrics, {("one-more", 0): 0.0})
    monkeypatch.setattr(run_metrics, "MOST_POINTS", 1030)
    await put(metrics, {("m0", step): 0.0 for step in range(7)})
    with pytest.raises(ResourceExhausted, match="1031 points"):
        await put(metrics, {("m0", 7): 0.0})


async def test_a_writer_that_was_cancelled_is_counted_once(metrics: RunMetrics, journal: Journal) -> None:
    writer = asyncio.ensure_future(put(metrics, {("loss", step): 1.0 for step in range(9)}))
    for _ in range(4):
        await asyncio.sleep(0)
    writer.cancel()
    await asyncio.wait([writer])
    await put(metrics, {("loss", step): 1.0 for step in range(9)})
    assert await counts(journal) == (9, 9, 9)


async def test_long_metrics_come_in_pieces_and_all_of_them(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "FRAGMENT", 7)
    monkeypatch.setattr(run_metrics, "_DELETED", 7)
    metrics = await RunMetrics.open(journal, 1000)
    await put(metrics, {("m", step * 3): float(step) for step in range(50)})
    assert await listed(metrics) == {"m": [(step * 3, float(step)) for step in range(50)]}
    changed = await listed(metrics, after=1)
    assert sorted(changed["m"]) == [(step * 3, float(step)) for step in range(50)]
    assert await metrics.delete("a", "r", (), 30) == 40
    assert await counts(journal) == (10, 10, 10)


@settings(max_examples=20, deadline=None)
@given(
    values=st.dictionaries(
        st.integers(0, 1 << 53), st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60
    ),
    most=st.integers(3, 40),
)
async def test_a_thinned_metric_keeps_its_extremes_and_its_last_point(
    tmp_path_factory: pytest.TempPathFactory, values: dict[int, float], most: int
) -> None:
    path = tmp_path_factory.mktemp("thinned") / "driver.db"
    async with await Journal.open(path, [MIGRATION]) as journal:
        metrics = await RunMetrics.open(journal, 1000)
        await put(metrics, {("m", step): value for step, value in values.items()})
        found = (await listed(metrics, most=most))["m"]
    assert len(found) <= most
    assert found == sorted(found)
    assert set(found) <= set(values.items())
    assert found[-1][0] == max(values)
    assert min(value for _, value in found) == min(values.values())
    assert max(value for _, value in found) == max(values.values())
