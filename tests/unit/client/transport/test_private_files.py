"""A state directory that somebody else made, or may write to, is not used: what is in it would be followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.client import ConfigurationError
from penstock.client.transport.endpoints import Endpoints, write_connection
from penstock.client.transport.private_files import open_private, private_directory
from penstock.local.stack import LocalStack

NOT_PRIVATE = "STATE_DIR_NOT_PRIVATE"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of another user's."""
    if os.geteuid() != 0:
        return Path("/usr")
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    return folder


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """A directory that everybody may write to."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.mark.requirement("R2")
def test_a_directory_is_made_for_its_owner_only_and_used_again(tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        private_directory(tmp_path / "a" / "state")
        private_directory(tmp_path / "a" / "state")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o700


@pytest.mark.requirement("R2", "R150")
async def test_a_state_directory_of_others_is_refused_before_anything_is_written(
    theirs: Path, open_to_all: Path
) -> None:
    """Another local user must not choose where services log, or what a client connects to."""
    for folder in (theirs, open_to_all):
        entries = sorted(folder.iterdir())
        with pytest.raises(ConfigurationError) as refused:
            async with LocalStack(state_dir=folder):
                raise AssertionError("it started")
        assert refused.value.reason == NOT_PRIVATE and "--state-dir" in str(refused.value)
        with pytest.raises(ConfigurationError) as refused:
            write_connection(
                folder / "connection.json",
                Endpoints(
                    driver="127.0.0.1:1", sandbox="127.0.0.1:1", interception="127.0.0.1:1", inference="", token="t"
                ),
                pid=None,
            )
        assert refused.value.reason == NOT_PRIVATE
        assert sorted(folder.iterdir()) == entries


@pytest.mark.requirement("R2", "R150")
@pytest.mark.parametrize("name", ["stack.lock", "logs", "logs/interception.log"])
async def test_links_in_a_state_directory_are_not_followed(tmp_path: Path, open_to_all: Path, name: str) -> None:
    """A log or a lock that is a link would be appended to, or made, wherever it leads."""
    state, victim = tmp_path / "state", open_to_all / "victim"
    (state / "logs").mkdir(parents=True, mode=0o700)
    state.chmod(0o700)
    if name == "logs":
        (state / "logs").rmdir()
    (state / name).symlink_to(open_to_all if name == "logs" else victim)
    with pytest.raises(ConfigurationError) as refused:
        async with LocalStack(state_dir=state):
            raise AssertionError("it started")
    assert refused.value.reason == NOT_PRIVATE
    assert not list(open_to_all.iterdir())


@pytest.mark.requirement("R145")
def test_a_pipe_in_place_of_a_log_neither_blocks_nor_is_used(tmp_path: Path) -> None:
    """Opening a pipe waits for a reader."""
    os.mkfifo(tmp_path / "x.log")
    with pytest.raises(ConfigurationError):
        open_private(tmp_path / "x.log", os.O_WRONLY | os.O_APPEND)
