"""`penstock` command lines, each in a process of its own that is forked from one that has imported everything: the
interpreter's start and the imports would be most of what a test takes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

_FORKED: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["penstock.cli.main"])


def invoke(
    *argv: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None, keys: str = ""
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command; `keys` is its standard input."""
    with tempfile.TemporaryDirectory(prefix="penstock-command-") as name:
        folder = Path(name)
        (folder / "in").write_text(keys)
        surroundings = {**os.environ, "COLUMNS": "200", **(environment or {})}
        process = _FORKED.Process(target=_run, args=(argv, surroundings, str(cwd or Path.cwd()), folder))
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = (
            (folder / stream).read_text(encoding="utf-8", errors="surrogateescape") for stream in ("out", "err")
        )
        return process.exitcode, out, err


def _run(argv: tuple[str, ...], environment: dict[str, str], cwd: str, folder: Path) -> None:
    for descriptor, stream in enumerate(("in", "out", "err")):
        opened = os.open(folder / stream, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # the one of multiprocessing reads nothing
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    from penstock.cli.main import app

    app(list(argv), prog_name="penstock")
