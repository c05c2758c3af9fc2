"""What the demo prints and draws."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock_demo.display import Display, Metrics, save_picture


def metrics(step: int, seconds: float = 1.0) -> Metrics:
    """A step of the demo."""
    made: Metrics = {
        "step": step, "policy_version": step, "seconds": seconds, "elapsed": seconds, "loss": 0.0,
        "logprob_gap": 1.2e-5, "success": 0.5, "reward_mean": 0.5, "rollouts": 64, "tokens": 1000, "ungraded": 0,
    }  # fmt: skip
    return made


def test_a_step_that_takes_long_is_one_line_of_a_log() -> None:
    """docs/cli.md: outside a terminal nothing is wrapped."""
    file = io.StringIO()
    display = Display("demo")
    display.console = Console(file=file, width=80)
    display.step(metrics(123, seconds=12345.6))
    assert file.getvalue().count("\n") == 1 and file.getvalue().endswith("12345.6 s\n")


def test_step_axis_has_whole_numbers_and_no_label_at_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no step 2.5."""
    from matplotlib import pyplot

    kept: list[Any] = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    save_picture([metrics(step) for step in range(21)], tmp_path / "reward.png", "demo")
    [figure] = kept
    [axes] = figure.axes
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert len(shown) > 3 and all(float(tick).is_integer() for tick in shown)
    assert low < 0 and high > 20 == shown[-1]
    labels = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert all(label.get_window_extent().x1 < figure.bbox.width - 2 for label in labels)
