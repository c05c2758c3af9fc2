"""The names under which Penstock is published stand in one file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tools import checkout
from tools.names import LICENSED, ROOT, problems

OTHER: Final = {
    "python": "acme-rl",
    "npm": "@acme/rl",
    "go": "acme.dev/rl",
    "images": "registry.acme.dev/rl",
    "repository": "https://git.acme.dev/rl",
    "authors": "Acme",
}


@pytest.mark.requirement("R116")
def test_every_file_has_the_names_that_names_toml_states() -> None:
    """Beside the names, each published thing has the repository's licence."""
    assert problems() == []


@pytest.mark.requirement("R116")
def test_one_change_of_names_toml_renames_everything(tmp_path: Path) -> None:
    """In a copy: its check then finds nothing, and no file written by hand has an old name."""
    listed = "\0".join(checkout.files())
    subprocess.run(
        ["xargs", "-0", "cp", "--no-dereference", "--parents", "-t", str(tmp_path)],
        input=listed,
        text=True,
        cwd=ROOT,
        check=True,
    )
    for argv in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *argv], cwd=tmp_path, check=True)
    place = tmp_path / "tools" / "names.toml"
    told = place.read_text()
    for key, value in OTHER.items():
        told = re.sub(rf'^{key} = ".*"$', f'{key} = "{value}"', told, flags=re.MULTILINE)
    place.write_text(told)
    asked = [sys.executable, "-m", "tools.names"]
    before = subprocess.run([*asked, "--check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert before.returncode and "names.toml" in before.stderr
    (tmp_path / LICENSED[0] / "LICENSE").unlink()
    subprocess.run(asked, cwd=tmp_path, capture_output=True, check=True)
    after = subprocess.run([*asked, "--check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (after.returncode, after.stderr) == (0, "")
    old = r"penstock\.example|@penstock/client|The Penstock authors|[\"'`]penstock(-[a-z]+)?(\[[a-z]|==[0-9])"
    left = [
        "git",
        "grep",
        "-lE",
        old,
        "--",
        ":!CHANGELOG.md",
        ":!*/gen/*",
        ":!*_pb2.py*",
        f":!{Path(__file__).relative_to(ROOT)}",
    ]
    assert subprocess.run(left, cwd=tmp_path, capture_output=True, text=True, check=False).stdout == ""
