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
from collections.abc import Callable, Sequence
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "docker"
_PACKAGES = "ca-certificates,git,procps,python3,python3-venv"
_DATABASE_PACKAGES = ("libicu72", "libpq5", "libxml2", "postgresql-15", "postgresql-client-15")
"""What Debian 12's PostgreSQL needs beside the base image."""
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
    return _once("debian-3", _make_base)


def database() -> Path:
    """The same with PostgreSQL below /usr/lib/postgresql, and its user; for a test on demand."""
    return _once("postgresql-1", _make_database)


def _once(name: str, make: Callable[[Path, Path], None]) -> Path:
    target = _CACHE / f"{name}.tar"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix="penstock-debian-") as place:
                root = Path(place) / "root"
                make(root, Path(place))
                partial = target.with_suffix(f".{os.getpid()}")
                _run(["tar", "-C", str(root), "--exclude=./dev/*", "-cf", str(partial), "."])
                partial.rename(target)
    return target


def _make_base(root: Path, _: Path) -> None:
    argv = [which("debootstrap") or "debootstrap", "--variant=minbase", f"--include={_PACKAGES}"]
    _run([*argv, "bookworm", str(root), _mirror()])
    # As small as can be, and with accounts that name nobody but root.
    for leftover in (path for pattern in _LEFTOVERS for path in root.glob(pattern)):
        shutil.rmtree(leftover)
    for file in ("etc/shadow", "etc/shadow-", "etc/gshadow", "etc/gshadow-", "etc/passwd-", "etc/group-"):
        (root / file).unlink(missing_ok=True)
    (root / "etc/passwd").write_text(_PASSWD)


def _make_database(root: Path, place: Path) -> None:
    """By unpacking: nothing of the packages is run."""
    root.mkdir()
    _run(["tar", "-C", str(root), "-xf", str(base())])
    _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *_DATABASE_PACKAGES], place)
    for package in place.glob("*.deb"):
        files = package.with_suffix(".tar")
        with files.open("wb") as content:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=content, check=True)
        _run(["tar", "-C", str(root), "--keep-directory-symlink", "-xf", str(files)])
    (root / "etc/passwd").write_text(f"{_PASSWD}postgres:x:700:700::/var/lib/postgresql:/bin/bash\n")
    with (root / "etc/group").open("a") as groups:
        groups.write("postgres:x:700:\n")


def _run(argv: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
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
