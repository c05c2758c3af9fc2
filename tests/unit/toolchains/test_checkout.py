"""Tests of the list of a checkout's files."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools import checkout


def test_files_are_listed_whatever_git_knows_of_them(tmp_path: Path) -> None:
    """Neither git's index nor its settings say which files there are: two copies of the same files have others."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".git" / "info" / "exclude").write_text("*\n")
    (tmp_path / ".gitignore").write_text("build/\n*.log\n/alone/\n")
    for name in ("a.py", "build/b.py", "deep/build/c.py", "deep/d.md", "deep/e.log", "alone/f.py", "deep/alone/g.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "link").symlink_to("deep")
    (tmp_path / "lost.py").symlink_to("nowhere")
    everything = [".gitignore", "a.py", "link", "lost.py", "deep/d.md", "deep/alone/g.py"]
    assert sorted(checkout.files(root=tmp_path)) == sorted(everything)
    assert sorted(checkout.files("*.py", root=tmp_path)) == ["a.py", "deep/alone/g.py", "lost.py"]
    assert sorted(checkout.files("deep", root=tmp_path)) == ["deep/alone/g.py", "deep/d.md"]
    assert checkout.files("/alone", root=tmp_path) == []
