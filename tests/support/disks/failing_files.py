"""A disk that refuses what is done to files below a directory: making, opening, writing, syncing, renaming, removing.

What Python's own modules do to files passes here (`open`, `os.open`, `os.mkdir`, `os.replace`, `os.fsync` and those of
the same kind); what native code writes does not. A write fails where the bytes would go to the disk: at the write that
fills a buffer, at a flush, or at the closing of the file.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

_WRITING: Final = os.O_WRONLY | os.O_RDWR


class Files:
    """Refuses one operation, the `at`-th below `below`, by this `errno`; or all, from `fill` to `free`.

    Nothing is refused, nor counted, while it is not `armed`. With `torn`, a write that is refused has written a part.
    """

    def __init__(self, code: int, below: Path, *, at: int = 0, torn: bool = False) -> None:
        self.code = code
        self.torn = torn
        self.refused: list[str] = []
        self.seen: list[str] = []
        self.armed = True
        self._below = str(below.resolve())
        self._at = at
        self._full = False

    def fill(self) -> None:
        """Every operation is refused from now on."""
        self._full = True

    def free(self) -> None:
        """None is refused any more."""
        self._full = False

    def judge(self, kind: str, path: Any) -> None:
        """Raises OSError for an operation that is refused; it names the path, as the kernel's callers do."""
        if not self.armed or not isinstance(path, str | bytes | os.PathLike):
            return
        name = str(Path(os.fsdecode(path)).absolute())
        if not name.startswith(self._below):
            return
        if self._full:
            self.refused.append(kind)
            raise self._error(name)
        if self.refused:
            return
        self.seen.append(kind)
        if len(self.seen) == self._at:
            self.refused.append(kind)
            raise self._error(name)

    def _error(self, name: str) -> OSError:
        return OSError(self.code, os.strerror(self.code), name)


class _Raw(io.FileIO):
    """A file on such a disk. As the kernel's, its errors of writing name no file."""

    def __init__(self, disk: Files, path: Any, mode: str, opener: Any = None) -> None:
        self._disk = disk
        super().__init__(path, mode, opener=opener)

    def write(self, data: Any) -> int:
        try:
            self._disk.judge("write", self.name)
        except OSError as error:
            if self._disk.torn:
                super().write(bytes(data)[: len(data) // 2])
            error.filename = None
            raise
        return super().write(data)


@contextmanager
def failing(disk: Files) -> Iterator[Files]:
    """What is done to files meanwhile is done on this disk."""
    real_open = io.open
    names: dict[int, Any] = {}

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        path = names.get(file, file) if isinstance(file, int) else file
        if not set(mode) & set("wax+") or not isinstance(path, str | bytes | os.PathLike):
            return real_open(file, mode, buffering, *rest, **options)
        if not isinstance(file, int):
            disk.judge("open", path)
        raw = _Raw(
            disk,
            path,
            mode.replace("b", "").replace("t", ""),
            opener=(lambda *_: file) if isinstance(file, int) else None,
        )
        if buffering == 0:
            return raw
        whole: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return whole
        given = dict(zip(("encoding", "errors", "newline"), rest, strict=False)) | {
            name: options[name] for name in ("encoding", "errors", "newline") if name in options
        }
        return io.TextIOWrapper(whole, **given)

    def open_descriptor(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & _WRITING:
            disk.judge("open", path)
        descriptor = real_descriptor(path, flags, *rest, **options)
        names[descriptor] = path
        return descriptor

    def synced(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        try:
            disk.judge("fsync", Path(f"/proc/self/fd/{number}").readlink())
        except OSError as error:
            error.filename = None
            raise
        real_sync(number)

    def judged(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            disk.judge(kind, path)
            return real(path, *rest, **options)

        return call

    real_descriptor, real_sync = os.open, os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "open", open_descriptor)
        patch.setattr(os, "fsync", synced)
        for kind in ("mkdir", "rename", "replace", "unlink"):
            patch.setattr(os, kind, judged(kind, getattr(os, kind)))
        yield disk
