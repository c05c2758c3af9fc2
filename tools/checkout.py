"""The files of this checkout."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files(*patterns: str, root: Path = ROOT) -> list[str]:
    """Returns the paths, from `root`, of files that are committed or may be: those that git ignores are left out.

    `patterns` are git's: a folder, or what a name matches; without any, all files.
    A file that was removed but is still in git's index is left out, too.
    """
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True).stdout
    names = dict.fromkeys(filter(None, listed.split("\0")))
    return [name for name in names if (path := root / name).is_file() or path.is_symlink()]
