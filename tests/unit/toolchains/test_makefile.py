"""What a target of the Makefile needs is made first, also in a fresh clone."""

from __future__ import annotations

import subprocess
from typing import Final

import pytest

from tools.names import ROOT

PAGE: Final = "clients/python/sdk/hatch_build.py"


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
    ],
)
def test_what_a_target_needs_is_made_first(target: str, first: str, then: str) -> None:
    """The target itself comes last."""
    said = steps(target)
    assert first in said and then in said
    assert said.index(first) < said.index(then)
