"""Project quotas are claimed only where they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_sandbox.backends.local.disk.quotas import Quotas
from penstock_sandbox.backends.local.disk.usage import Limit, Use

NOBODY = 65534


@pytest.mark.requirement("R55", "R95")
@pytest.mark.usefixtures("root")
def test_quotas_are_claimed_only_where_they_count_and_the_trial_leaves_nothing(tmp_path: Path) -> None:
    """By doing; most file systems have none in force."""
    found = Quotas.detect(tmp_path, NOBODY)
    assert list(tmp_path.iterdir()) == []
    if found is None:
        place = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        unheld = Quotas(place)
        (tmp_path / "box").mkdir()
        with pytest.raises(OSError):
            unheld.give(tmp_path / "box", Limit(1 << 20, 10))
        unheld.close()
        return
    (tmp_path / "box").mkdir()
    project = found.give(tmp_path / "box", Limit(1 << 20, 10))
    (tmp_path / "box" / "file").write_bytes(bytes(100_000))
    assert found.use(project).bytes >= 100_000 and found.use(project).inodes == 2
    (tmp_path / "box" / "file").unlink()
    (tmp_path / "box").rmdir()
    assert found.use(project) == Use()
    found.release(project)
    found.close()
