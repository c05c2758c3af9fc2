"""The notebook, run top to bottom as a newcomer runs it, with fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.unit.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
SMALL = """
STEPS, TASKS_A_STEP, GROUP_SIZE = 2, 2, 4
from penstock_demo import learner as shortened
from penstock_demo import train as shortened_too
from pathlib import Path
shortened.WARM_STEPS = 2 * shortened.WARM_CHUNK
shortened_too.RUNS = Path({runs!r})
"""


def read() -> Any:
    """The notebook."""
    return nbformat.read(  # type: ignore[no-untyped-call]
        EXAMPLES / "first-rollouts.ipynb", as_version=4
    )


def test_the_notebook_is_kept_as_it_is_before_it_is_run() -> None:
    """No outputs, no counts, no paths of anybody's machine; a kernel that every environment has."""
    notebook = read()
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.parametrize("page", ["examples/first-rollouts.ipynb", "README.md", "docs/guides/start.md"])
def test_notebook_states_how_it_is_run(page: str) -> None:
    """In the environment that `make demo` makes, with a browser or without: the same commands on every page."""
    told = read().cells[0].source if page.endswith(".ipynb") else (ROOT / page).read_text(encoding="utf-8")
    assert "`make demo`" in told
    for command in (
        ".venv/bin/python -m pip install -c constraints.txt notebook",
        ".venv/bin/jupyter notebook examples/first-rollouts.ipynb",
        ".venv/bin/jupyter nbconvert --execute --to html --output-dir runs examples/first-rollouts.ipynb",
    ):
        assert command in told, command


def test_the_notebook_runs_top_to_bottom(tmp_path: Path) -> None:
    """Services, a rollout, its tokens, a group, training, an export: each cell works, and three plots are drawn."""
    notebook = read()
    first = next(index for index, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells[first].source += SMALL.format(runs=str(tmp_path))
    folder = {"metadata": {"path": EXAMPLES}}
    NotebookClient(notebook, timeout=240, startup_timeout=240, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    said = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert "step 2: success" in said and "rows of" in said
