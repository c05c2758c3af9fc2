"""The command of the benchmarks: what its options are of, and what it keeps when one benchmark ends it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as command
from benchmarks import dashboard, scale
from benchmarks.replaying import regrades
from benchmarks.report import Row, Section
from benchmarks.scale import fairness

SECTION = Section("what was measured", [Row("a figure", 1.0, "ms")])


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Runs `python -m benchmarks WORDS`."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    command.main()


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["--rollouts", "10000"], {"scale": 10_000, "regrade": 10_000, "fairness": 10_000}),
        (["--rollouts", "7"], {"scale": 7, "regrade": 7, "fairness": 7}),
        ([], {"scale": scale.ROLLOUTS, "regrade": regrades.ROLLOUTS, "fairness": fairness.ROLLOUTS}),
    ],
)
def test_number_of_rollouts_holds_for_each_benchmark_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], counts: dict[str, int]
) -> None:
    """Without it each has its own, whatever the default of another is."""
    asked: dict[str, int] = {}

    async def measure_scale(place: Path, plan: scale.Plan) -> list[Section]:
        asked["scale"] = plan.rollouts
        return [SECTION]

    async def measure_regrade(place: Path, count: int = regrades.ROLLOUTS) -> list[Section]:
        asked["regrade"] = count
        return [SECTION]

    async def measure_fairness(place: Path, rollouts: int = fairness.ROLLOUTS) -> list[Section]:
        asked["fairness"] = rollouts
        return [SECTION]

    monkeypatch.setattr(scale, "measure", measure_scale)
    monkeypatch.setattr(regrades, "measure", measure_regrade)
    monkeypatch.setattr(fairness, "measure", measure_fairness)
    monkeypatch.setattr(
        command,
        "BENCHMARKS",
        {**command.BENCHMARKS, "regrade": measure_regrade, "fairness": measure_fairness},
    )
    run(monkeypatch, *counts, *words, "--out", str(tmp_path / "figures.json"))
    assert asked == counts


def test_a_table_is_made_of_no_killed_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that comes back counts its processor time from nothing."""
    monkeypatch.setattr(scale, "measure_table", None)  # it is not begun
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "scale", "--kill", "driver", "--table")
    assert "--table" in capsys.readouterr().err


@pytest.mark.parametrize("end", [SystemExit("Go is not installed here"), AssertionError(), KeyboardInterrupt()])
def test_what_was_measured_is_kept_when_a_benchmark_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException
) -> None:
    """A quarter of an hour of figures is not lost with the last of them."""

    async def good(place: Path) -> list[Section]:
        return [SECTION]

    async def bad(place: Path) -> list[Section]:
        raise end

    monkeypatch.setattr(command, "BENCHMARKS", {**command.BENCHMARKS, "tokens": good, "clients": bad})
    out = tmp_path / "figures.json"
    with pytest.raises(type(end)):
        run(monkeypatch, "tokens", "clients", "--out", str(out))
    kept: dict[str, Any] = json.loads(out.read_text("utf-8"))
    assert [section["title"] for section in kept["sections"]] == [SECTION.title]


async def test_dashboard_is_left_out_where_there_is_no_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other benchmarks go on, and the run says what is missing."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert await dashboard.measure(tmp_path) == []
    assert "apt-get install chromium-headless-shell" in capsys.readouterr().out
