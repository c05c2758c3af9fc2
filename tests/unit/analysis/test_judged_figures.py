"""Benchmarks of many rollouts judge their figures: what misses its aim is named, and the command exits with 1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks.report import Row, Section
from benchmarks.scale import fairness
from benchmarks.scale.table import Costs, table

AS_DESIGNED = Costs({"driver": 20.0, "sandbox": 6.0}, {"driver": 30.0, "interception": 34.0}, 2.2)
FAIR = fairness.Figures(5_000, 3.9, 0, mean_s=4.0, first_s=0.5, last_s=9.0)


def test_a_need_a_quarter_beyond_its_design_is_named() -> None:
    assert not table(AS_DESIGNED).faults
    assert not table(replace(AS_DESIGNED, call_ms=2.7)).faults, "less than a quarter beyond"
    driver = table(replace(AS_DESIGNED, cpu_ms={"driver": 30.0, "sandbox": 6.0})).faults
    assert driver == [
        "drivers, steady: 0.167 cores, at most 0.138 (designed 0.11, and a quarter)",
        "drivers, all at once: 300 core s, at most 250 (designed 200, and a quarter)",
        "drivers, rollouts of 60 s: 5 cores, at most 4.12 (designed 3.3, and a quarter)",
    ]
    gate = table(replace(AS_DESIGNED, call_ms=3.5, waiting_kb={"driver": 30.0, "interception": 50.0})).faults
    names = ["gates, steady", "gates, first calls all at once", "gates, held streams"]
    assert [fault.partition(":")[0] for fault in gate] == names


def test_needs_that_are_not_measured_are_labelled() -> None:
    """Neither Envoy, GPUs nor pods depend on what was measured, and none of them has a ratio."""
    cheap, dear = (table(Costs(dict.fromkeys(("driver", "sandbox"), ms), AS_DESIGNED.waiting_kb, ms)) for ms in (1, 99))
    same = [row for row, other in zip(cheap.rows, dear.rows, strict=True) if row == other]
    labelled = [row for row in same if "not measured here" in row.note]
    assert {"Envoy, steady", "trajectories", "GPUs for sampling"} <= {row.name for row in labelled}
    assert not any(" of it" in row.note for row in labelled)


@pytest.mark.requirement("R123")
@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"first_s": 4.1}, "the late owner's first rollout began after 4.10 s, at most 4.00"),
        ({"waiting_kb": 4.3}, "memory of the driver for one that waits: 4.3 KB, at most 4"),
        ({"waiting_kb": 4.3, "waiting": 40}, ""),
        ({"held_beside": 1}, "sandboxes and places at the gate of those that wait: 1, at most 0"),
        ({"mishaps": ["r1 is lost"]}, "r1 is lost"),
    ],
    ids=["fair", "late", "dear", "too few to tell", "held", "lost"],
)
def test_an_unfair_queue_is_named(changed: dict[str, object], fault: str) -> None:
    assert fairness.section(replace(FAIR, **changed)).faults == ([fault] if fault else [])  # type: ignore[arg-type]


def test_a_missed_aim_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After all figures are printed and kept."""

    async def measured(_place: Path) -> list[Section]:
        return [Section("figures", [Row("needs", 5.0, "cores")], faults=["needs: 5 cores, at most 4"])]

    monkeypatch.setitem(command.BENCHMARKS, "busy", measured)
    monkeypatch.setattr("sys.argv", ["benchmarks", "busy", "--out", str(tmp_path / "kept.json")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out.rstrip().endswith("missed:\n  needs: 5 cores, at most 4")
    (section,) = json.loads((tmp_path / "kept.json").read_text())["sections"]
    assert section["rows"][0]["value"] == 5.0
