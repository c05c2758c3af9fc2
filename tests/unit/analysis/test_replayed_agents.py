"""The benchmark of replayed agents goes on where an earlier run ended."""

from __future__ import annotations

from pathlib import Path

from benchmarks.replayed_agents import Played, keep, kept_in, sections
from benchmarks.replayed_agents.tasks import WORKS

REACHED = Played("pi", WORKS[0].name, 4, 3, reached=True)
PARTED = Played("pi", WORKS[1].name, 4, 1, why="it parts at call 1", cause="a date")


def test_results_are_kept_from_run_to_run(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "played.jsonl"
    assert kept_in(file) == kept_in(None) == []
    keep(file, REACHED)
    file.with_name("played.jsonl.new").write_text("what a kill left")
    keep(file, PARTED)
    assert kept_in(file) == [REACHED, PARTED]
    assert [path.name for path in file.parent.iterdir()] == ["played.jsonl"]


def test_the_report_is_of_all_that_is_known(tmp_path: Path) -> None:
    file = tmp_path / "played.jsonl"
    keep(file, REACHED)
    keep(file, PARTED)
    shares, causes = sections(["pi"], kept_in(file))
    assert [(row.name, row.value) for row in shares.rows][:2] == [("pi", 0.5), ("all", 0.5)]
    assert [(row.name, row.value) for row in causes.rows] == [("pi: a date", 1)]
