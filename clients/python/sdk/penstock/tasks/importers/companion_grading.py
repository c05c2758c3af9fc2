"""Where an imported task with companions is graded: in a fork of its own that joins them, or in the agent's sandbox.

In the agent's sandbox its code in a companion can reach the verifier's files. A fork has the agent's changes below the
working directory alone, so it is chosen where the tests name nothing else that an agent could have changed.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.tasks.importers.common import Folder
from penstock.tasks.importers.dockerfile import workdir_of

_PATH: Final = re.compile(r"(?<![\w.}$)/:>~-])/[A-Za-z0-9_][\w.@+-]*(?:/[\w.@+-]+)*")
_HOME: Final = re.compile(r"(?:~|\$HOME|\$\{HOME\})/(?!\.local/bin/)|\bexpanduser\b|\bPath\.home\b")
"""The home, but for where scripts install the tools that run the tests."""
_OF_THE_GRADER: Final = ("/tests", "/logs")
_PROGRAMS: Final = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/lib", "/dev")
"""What a script names to run itself."""
_OF_THE_SYSTEM: Final = frozenset(
    {"", "bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var"}
)


def put_grading(folder: Folder, dockerfile: Path, tests: Path) -> None:
    """Decides where the task is graded, and notes why; `folder` has its verifier.

    Args:
        folder: of the task.
        dockerfile: of the agent's image, if the task has no copy of it; it need not exist.
        tests: the directory of its verifier's tests.
    """
    verifier = folder.content["verifier"]
    verifier["fresh_fork"] = False
    if not folder.content.get("sandbox", {}).get("companions"):
        # Its makers' harness, too, runs the tests in the agent's container, with everything that it installed.
        return
    built = folder.path / folder.content.get("build", "") / "Dockerfile"
    source = built if built.is_file() else dockerfile
    workdir = workdir_of(source) if source.is_file() else None
    if workdir is None or workdir.split("/")[1] in _OF_THE_SYSTEM:
        reason = "the working directory of its image is unknown, or the system's"
    elif elsewhere := next(_elsewhere(workdir, tests), ""):
        reason = f"its tests name {elsewhere}"
    else:
        verifier |= {"fresh_fork": True, "changes_below": [workdir]}
        folder.notes.append(
            f"fresh_fork: graded in a fork of its own, with what the agent leaves below {workdir} and with its"
            " companions; if the tests need what it installs elsewhere, set fresh_fork: false"
        )
        return
    folder.notes.append(
        f"fresh_fork: graded in place, where code of the agent in a companion can forge a reward: {reason}"
    )


def _elsewhere(workdir: str, tests: Path) -> Iterator[str]:
    """Yields what the tests name outside of the working directory."""
    for file in sorted(path for path in tests.rglob("*") if path.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if home := _HOME.search(text):
            yield home[0]
        for found in _PATH.finditer(text):
            path = posixpath.normpath(found[0])
            if not any(_is_below(path, root) for root in (workdir, *_OF_THE_GRADER, *_PROGRAMS)):
                yield path


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
