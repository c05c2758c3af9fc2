"""A folder for what the installer's own user needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A new folder that every user can read, which tmp_path is not when the tests run as root."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
