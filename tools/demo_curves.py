"""Draws the curves of several runs of a demo into one picture: `python -m tools.demo_curves RUNS PICTURE`.

RUNS is a directory of the demo's runs (`seed-1`, `seed-2`, ...), such as runs/demo-mini-swe-agent; a run without steps
is left out. Needs matplotlib, which the demo installs.
"""

import json
import sys
from pathlib import Path
from typing import Final

WIDE_IN, HIGH_IN, DPI = 7.2, 3.2, 110
GOAL: Final = 0.9


def main(runs: Path, picture: Path) -> None:
    """Writes the picture: success of each step, a line for each seed, over the minutes since the run began."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDE_IN, HIGH_IN), layout="constrained")
    folders = sorted(runs.glob("seed-*"), key=lambda folder: int(folder.name.removeprefix("seed-")))
    for number, folder in enumerate(folders):
        metrics = folder / "metrics.jsonl"
        steps = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()] if metrics.exists() else []
        if steps:
            minutes, success = [one["elapsed"] / 60 for one in steps], [one["success"] for one in steps]
            axes.plot(minutes, success, color=mpl.colormaps["tab10"](number % 10), marker=".", label=folder.name)
    axes.axhline(GOAL, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="minutes", ylabel="success of a step", xlim=(0, None), ylim=(0, 1.03))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=2, fontsize=7, frameon=False, loc="lower right")
    figure.savefig(picture, dpi=DPI)
    pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
