"""The file systems that the Docker tests' images are made of, as tars: no registry is needed.

`python3 -m tests.support.docker.base_images` makes the larger one beforehand, with nothing but the standard library:
continuous integration does it while it installs the rest.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "docker"
_PACKAGES = "ca-certificates,git,procps,python3,python3-venv"
_PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_LEFTOVERS = (
    *("var/cache/apt", "var/lib/apt/lists", "var/lib/dpkg/info"),
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/zoneinfo", "usr/share/bash-completion"),
    *("usr/share/lintian", "usr/share/perl", "usr/share/perl5", "usr/lib/*/perl", "usr/lib/*/perl-base"),
    *("usr/lib/python3*/lib2to3", "usr/lib/python3*/test"),
)
"""What no test asks for, by patterns. On most kernels the daemon walks all files of an image for each commit and each
list of changes."""
_APPLETS = ("cat", "echo", "env", "id", "ls", "mkdir", "rm", "sh", "sleep", "touch", "true", "wc", "yes")


def which(name: str) -> str | None:
    """A program of this machine, those of its administrator included."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin")


def base() -> Path:
    """A minimal Debian with Python as a tar, made once a machine; who comes meanwhile waits."""
    return _debian("debian-3", _PACKAGES)


def database() -> Path:
    """The same of a Debian with PostgreSQL, whose programs are below /usr/lib/postgresql."""
    return _debian("postgresql-1", "postgresql")


def _debian(name: str, packages: str) -> Path:
    target = _CACHE / f"{name}.tar"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _make_debian(target, packages)
    return target


def _make_debian(target: Path, packages: str) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-debootstrap-") as place:
        root = Path(place) / "root"
        argv = [which("debootstrap") or "debootstrap", "--variant=minbase", f"--include={packages}"]
        _run([*argv, "bookworm", str(root), _mirror()])
        # As small as can be, and with accounts that name nobody but root.
        for leftover in (path for pattern in _LEFTOVERS for path in root.glob(pattern)):
            shutil.rmtree(leftover)
        for file in ("etc/shadow", "etc/shadow-", "etc/gshadow", "etc/gshadow-", "etc/passwd-", "etc/group-"):
            (root / file).unlink(missing_ok=True)
        own = [line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("postgres:")]
        (root / "etc/passwd").write_text("\n".join([_PASSWD.strip(), *own, ""]))
        partial = target.with_suffix(f".{os.getpid()}")
        _run(["tar", "-C", str(root), "--exclude=./dev/*", "-cf", str(partial), "."])
        partial.rename(target)


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _mirror() -> str:
    """Where this machine gets its Debian packages from."""
    folder = Path("/etc/apt")
    for file in (folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))):
        if file.is_file() and (found := re.search(r"https?://\S+/debian/?(?=\s)", file.read_text() + "\n")):
            return found[0]
    raise RuntimeError("no mirror of Debian is named in /etc/apt: the Docker tests make their base image from one")


def write_tiny(target: Path) -> None:
    """One static program and its names, as a tar."""
    with tarfile.open(target, "w") as archive:
        for folder in (".", "./bin", "./etc", "./tmp"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        content = Path(which("busybox") or "busybox").read_bytes()
        program = tarfile.TarInfo("./bin/busybox")
        program.mode, program.size = 0o755, len(content)
        archive.addfile(program, io.BytesIO(content))
        for applet in _APPLETS:
            link = tarfile.TarInfo(f"./bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)


if __name__ == "__main__":
    base()
