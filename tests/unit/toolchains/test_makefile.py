"""What a target of the Makefile needs is made first, also in a fresh clone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tools.names import ROOT

PAGE: Final = "clients/python/sdk/hatch_build.py"
GO: Final = "-m tools.golang install"


def steps(target: str) -> str:
    """All that `make TARGET` runs where nothing has been made yet."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.requirement("R116")
@pytest.mark.parametrize(
    ("target", "first", "then"),
    [
        ("images", PAGE, "build --quiet"),  # the dashboard's image copies the page, and has none of its sources
        ("bench", PAGE, "-m benchmarks"),
        ("bench", GO, "-m benchmarks"),
    ],
)
def test_what_a_target_needs_is_made_first(target: str, first: str, then: str) -> None:
    """The target itself comes last."""
    said = steps(target)
    assert first in said and then in said
    assert said.index(first) < said.index(then)


@pytest.mark.parametrize("has_model", [False, True])
def test_credentials_say_which_model_is_missing(tmp_path: Path, has_model: bool) -> None:
    """Compose would say only that a mount has no source."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if has_model:
        (tmp_path / "runs/demo/latest/model").mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "MAKE"))}
    for _ in range(2):  # the second time .env is there
        done = subprocess.run(
            ["make", "--silent", "--old-file=.venv/.installed", "BIN=bin", "PIP=true", "credentials"],
            cwd=tmp_path, env=kept, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ("`make demo`" in done.stdout) is not has_model, done
        assert ("./runs/demo/latest/model" in done.stdout) is not has_model
    assert "PENSTOCK_MODEL_DIR=./runs/demo/latest/model" in (tmp_path / ".env").read_text(encoding="utf-8")
