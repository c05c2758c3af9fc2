"""Files of names that the service makes where the daemon gives none to the containers that join a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_sandbox.backends.docker import names_files
from penstock_sandbox.backends.docker.names_files import NamesFiles


@pytest.mark.requirement("R55")
async def test_names_are_files_that_nobody_writes_and_that_equal_names_share(tmp_path: Path) -> None:
    files = NamesFiles(tmp_path / "names")
    hosts, resolver = await files.mounts(["sandbox", "db"], resolver=True)
    assert (hosts["target"], resolver["target"]) == ("/etc/hosts", "/etc/resolv.conf")
    assert hosts["read_only"] and resolver["read_only"]
    text = Path(hosts["source"]).read_text()
    assert text == "127.0.0.1\tlocalhost\n127.0.0.1\tsandbox\n127.0.0.1\tdb\n::1\tlocalhost\n"
    assert Path(resolver["source"]).read_text().startswith("nameserver 192.0.2.1\n")
    assert await files.mounts(["sandbox", "db"], resolver=False) == (hosts,)
    assert len(list((tmp_path / "names").iterdir())) == 2


async def test_a_sandbox_without_companions_or_a_daemon_that_gives_names_needs_none(tmp_path: Path) -> None:
    assert await NamesFiles(tmp_path / "names").mounts([], resolver=True) == ()
    assert await NamesFiles(None).mounts(["sandbox", "db"], resolver=True) == ()
    assert not list(tmp_path.iterdir())


async def test_there_are_only_so_many_files_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers choose names: a file for each would fill the disk."""
    monkeypatch.setattr(names_files, "MOST", 8)
    files = NamesFiles(tmp_path / "names")
    for number in range(40):
        mounts = await files.mounts(["sandbox", f"db{number}"], resolver=True)
        assert all(Path(mount["source"]).exists() for mount in mounts)
        assert len(list((tmp_path / "names").iterdir())) <= 8
