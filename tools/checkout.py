"""The files of this checkout."""

import os
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[1]


def files(*patterns: str, root: Path = ROOT) -> list[str]:
    """Returns the paths, from `root`, of all files but those that the `.gitignore` of `root` names, in order.

    `patterns` are those of a `.gitignore`: a folder, or what a name matches; without any, all files. Git is not asked:
    its index and its settings differ between two copies of the same files.
    """
    ignore = root / ".gitignore"
    left_out = GitIgnoreSpec.from_lines(ignore.read_text().splitlines() if ignore.exists() else [])
    wanted = GitIgnoreSpec.from_lines(patterns or ["*"])
    return [name for name in _files(root, left_out) if wanted.match_file(name)]


def _files(root: Path, left_out: GitIgnoreSpec) -> Iterator[str]:
    """A folder that is left out is not entered; a link to a folder is a file, as it is for git."""
    for at, folders, names in os.walk(root):
        inside = Path(at).relative_to(root)
        links = [name for name in folders if Path(at, name).is_symlink()]
        kept = [name for name in folders if name != ".git" and not left_out.match_file(f"{inside / name}/")]
        folders[:] = sorted(set(kept) - set(links))
        for name in sorted([*names, *links]):
            path = (inside / name).as_posix()
            if name != ".git" and not left_out.match_file(path):
                yield path
