"""Files of a local clone at a commit, without its history and without what its configuration would run."""

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.tasks.importers.common import Refused

MAX_ENTRIES: Final = 200_000
MAX_BYTES: Final = 8 << 30
_SUBMODULE: Final = "160000"
_LFS: Final = b"version https://git-lfs.github.com/spec/"
_LFS_POINTER_BYTES: Final = 1024
_LIMIT_S: Final = 900.0
"""Of one command."""


def extract(clone: Path, commit: str, folder: str, target: Path) -> None:
    """Puts the files of a commit, or those of one of its folders, into an empty directory.

    Raises:
        Refused: the clone lacks the commit or the folder; or there are too many files, or Git LFS pointers.
    """
    # A repository of its own that only borrows the clone's objects: the configuration of the clone may name programs
    # (filters, a file system monitor) and a server from which missing objects would be fetched.
    with tempfile.TemporaryDirectory(prefix="penstock-import-") as place:
        git(Path(place), "init", "-q", "--bare")
        objects = git(clone, "rev-parse", "--path-format=absolute", "--git-path", "objects").rstrip("\n")
        env = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": json.dumps(objects, ensure_ascii=False)}

        def borrowed(*arguments: str) -> str:
            return git(Path(place), *arguments, env=env)

        try:
            whole = git(clone, "rev-parse", "--quiet", "--verify", "--end-of-options", commit).strip()
            borrowed("rev-parse", "--quiet", "--verify", "--end-of-options", f"{whole}^{{commit}}")
        except Refused:
            raise Refused(f"{clone} has no commit {commit}: fetch it there") from None
        listed = borrowed("ls-tree", "-r", "-l", "-z", "--full-tree", "--end-of-options", whole, folder or ".")
        entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
        if not entries:
            raise Refused(f"{clone} has no {folder or 'file'} at {commit}")
        sizes = [int(size) for size in (entry[0].split()[3] for entry in entries) if size != "-"]
        if len(entries) > MAX_ENTRIES or sum(sizes) > MAX_BYTES:
            raise Refused(f"{folder or clone} has {len(entries)} files and {sum(sizes)} bytes: that is too much")
        if folder and (special := next((name for head, _, name in entries if head.startswith(_SUBMODULE)), "")):
            raise Refused(f"{special} is a submodule, whose files a clone lacks")
        # Git refuses names such as `..` and `.git` itself.
        borrowed("read-tree", f"{whole}:{folder}" if folder else f"{whole}^{{tree}}")
        borrowed(f"--work-tree={target.resolve()}", "checkout-index", "--all", "--quiet")


def lfs_pointers(folder: Path) -> list[str]:
    """Returns the files that are Git LFS pointers in the place of their contents."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < _LFS_POINTER_BYTES:
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    found.append(str(path.relative_to(folder)))
    return found


def git(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Runs git with a fixed name and time, so that the same content is the same commit. Returns its output.

    Raises:
        Refused: it failed, with the end of what it reported, or took too long.
    """
    settings = (
        "user.name=penstock",
        "user.email=penstock@localhost",
        "core.hooksPath=/dev/null",
        "commit.gpgsign=false",
        # In the background it would still write into a directory that is being removed.
        "gc.auto=0",
        "maintenance.auto=false",
    )
    flags = [part for item in settings for part in ("-c", item)]
    when = "2000-01-01T00:00:00+00:00"
    fixed = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": "/dev/null"}
    argv = ["git", "-C", str(folder), *flags, *arguments]
    whole = {**os.environ, **fixed, **(env or {})}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=whole, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"git {shlex.join(arguments[:4])} in {folder} took more than {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise Refused(f"git {shlex.join(arguments[:4])} in {folder}: {done.stderr.strip()[-300:]}")
    return done.stdout


def clone_of(repositories: Path, repo: str) -> Path:
    """Returns the clone of OWNER/NAME in a directory of clones: `OWNER/NAME`, `OWNER__NAME` or `NAME`.

    Raises:
        Refused: there is none.
    """
    home = repositories.resolve()
    names = (repo, repo.replace("/", "__"), repo.rpartition("/")[2])
    clone = next((path for name in names if (path := (home / name).resolve()).is_dir()), None)
    if clone is None or not clone.is_relative_to(home) or clone == home:
        raise Refused(f"{repositories} has no clone of {repo}")
    return clone
