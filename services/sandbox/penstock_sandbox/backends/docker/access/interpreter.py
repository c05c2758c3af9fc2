"""A Python for sandboxes whose image may have none: extracted from another image, as files to be mounted.

Purpose: a guest agent inside the sandbox must neither depend on the sandbox's image nor trust it: anybody may have made
the image's own Python. So the interpreter, its library and the libraries of both are extracted from an image of the
operator's, placed below one directory, and started through their own loader.

Invariants: nothing is run to find out what is needed; symbolic links stay within the directory; no packages and no
other programs are extracted. The files are root's, and set-user-id bits are dropped.
"""

from __future__ import annotations

import posixpath
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator

from penstock_sandbox.backends.docker.images.changes import Source
from penstock_sandbox.backends.host.layers import Collector

FOLDERS = ("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/local/bin", "/usr/local/lib")
"""Possible paths in an image; in many images some of them are links to others."""

_CHUNK = 256 * 1024
_PROGRAM = re.compile(r"(usr/|usr/local/)?bin/python3(\.\d+)?")
_SHARED = re.compile(r"(usr/|usr/local/)?lib(64)?/([^/]+-linux-[^/]+/)?[^/]+\.so(\.[^/]*)?")
_LIBRARY = re.compile(r"(usr/|usr/local/)?lib(64)?/python3\.\d+/(?P<rest>.+)")
_LOADER = re.compile(r".*/ld-(linux|musl)-?[^/]*\.so\.\d+")
# Modules that the guest agent never imports, and packages by others.
_LEFT_OUT = re.compile(
    r"(.*/)?(test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip|pydoc_data|unittest|site-packages|dist-packages"
    r"|config-[^/]+)(/.*)?"
)


class Interpreter:
    """The extracted files, filled as ``taken`` passes over them."""

    def __init__(self) -> None:
        self._programs: set[str] = set()
        self._loaders: set[str] = set()
        self._libraries: set[str] = set()

    def taken(self, folders: Iterable[tuple[str, Iterable[bytes]]], below: str) -> Iterator[bytes]:
        """Yields, from an image's folders and the daemon's tars of them, one tar of the needed files, in pieces.

        Its names begin with ``below``.
        """
        sink = Collector()
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as target:
            for folder, chunks in folders:
                above = posixpath.dirname(folder).strip("/")
                with tarfile.open(fileobj=Source(chunks), mode="r|") as source:
                    for member in source:
                        name = f"{above}/{member.name}".strip("/")
                        if not self._wanted(name, member):
                            continue
                        _adopt(member, name, below)
                        target.addfile(member, source.extractfile(member) if member.isreg() else None)
                        while sink.size >= _CHUNK:
                            yield sink.take()
        yield sink.take()

    def _wanted(self, name: str, member: tarfile.TarInfo) -> bool:
        if member.issym() and f"/{name}" in FOLDERS:
            return True
        if not (member.isreg() or member.issym()):
            return False  # of two names of one file the first is kept
        if _PROGRAM.fullmatch(name):
            self._programs.add(name)
            return True
        if _SHARED.fullmatch(name):
            self._libraries.add(posixpath.dirname(name))
            if _LOADER.fullmatch(name):
                self._loaders.add(name)
            return True
        library = _LIBRARY.fullmatch(name)
        return library is not None and not _LEFT_OUT.fullmatch(library["rest"])

    def command(self, at: str) -> list[str] | None:
        """Returns the argv that starts a program of this interpreter, mounted at ``at``; None if a part is missing."""
        programs = sorted((name for name in self._programs if name.endswith("/python3")), key=len, reverse=True)
        if not programs or not self._loaders:
            return None
        libraries = ":".join(f"{at}/{folder}" for folder in sorted(self._libraries))
        loader = min(self._loaders, key=lambda name: (len(name), name))
        return [f"{at}/{loader}", "--library-path", libraries, f"{at}/{programs[0]}", "-I", "-S"]


def _adopt(member: tarfile.TarInfo, name: str, below: str) -> None:
    member.name = f"{below}/{name}"
    if member.issym() and member.linkname.startswith("/"):
        member.linkname = posixpath.relpath(member.linkname, posixpath.dirname(f"/{name}"))
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = member.mode & ~(stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH)
    member.pax_headers = {}
