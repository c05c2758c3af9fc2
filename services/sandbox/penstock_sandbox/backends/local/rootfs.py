"""The root of a local sandbox: visible host files, writable places, and bubblewrap's arguments for them.

Purpose: the root is an overlay (skeleton, sealed layers, the sandbox's own upper) with a read-only subset of the host's
programs bound into it. Writes by the sandbox's user go to its upper: its home, the working directory, and new names at
the top level; /tmp and /dev/shm are memory.

Invariants
- The sandbox's user cannot change anything that was there before it, except in those places: each such name at the top
  level is a read-only mount, which can neither be removed nor renamed, no matter who owns the root (R90).
- Allow-list: a host path is visible only if it is named here or in the operator's ``extra_read_only``.
- /etc is ours: accounts, resolver and host names reveal nothing of the host.
- bubblewrap's arguments hold no secret; the environment of processes never passes through them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.local.images import first_process
from penstock_sandbox.backends.local.spawner.read_only_mounts import NOTHING
from penstock_sandbox.backends.local.spawner.wire import FIRST_PROGRAM
from penstock_sandbox.domain.paths import HOME, OURS, USER, USER_ID

# Programs, libraries and what they need to run. The host's configuration stays out.
_PROGRAM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_SETTINGS = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls",
    "/etc/pki/ca-trust",
    "/etc/ca-certificates",
    "/etc/mime.types",
    "/etc/localtime",
    "/etc/terminfo",
    "/etc/bash.bashrc",
)
WRITTEN = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "etc/group": f"root:x:0:\n{USER}:x:{USER_ID}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "etc/resolv.conf": "",
    "etc/machine-id": "",
    "etc/services": "http 80/tcp\nhttps 443/tcp\n",
    "etc/protocols": "ip 0 IP\nicmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\n",
}
_EMPTY = ("proc", "dev", "tmp", "var/log", "run", "opt", "mnt", "srv", "root", "etc/ssl")
# Of a mount, in bytes: one page, with the zero at its end.
_MOST_OPTIONS = 4095
_BUNDLES = ("etc/ssl/certs/ca-certificates.crt", "etc/pki/tls/certs/ca-bundle.crt")
_LINKS = {"var/tmp": "../tmp"}
# Names at the top level that bubblewrap itself mounts.
_MOUNTED = {"proc", "dev", "tmp", "opt"}
_OF_THE_USER = ("home/agent", "workspace")


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory or file visible read-only at ``target``."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Added:
    """A host directory with usr, etc and var for a sandbox's root, and its path for bubblewrap (``shown``)."""

    folder: Path
    shown: str


def host_binds(extra: Iterable[Path]) -> list[Bind]:
    """Returns the host's programs. A link on the host (/bin, /lib64) becomes a directory: a link could be replaced."""
    return [
        Bind(os.path.realpath(path), path) for path in (*_PROGRAM_FOLDERS, *map(str, extra)) if os.path.exists(path)
    ]


def read_only_names(binds: Iterable[Bind]) -> list[str]:
    """Returns the names at the top level that the sandbox helper makes read-only mounts; the others are mounts already.

    For /home, which holds the user's own directory, those below it: a directory that only holds a mount can be renamed.
    """
    ours = {name.split("/")[0] for name in (*_EMPTY, *WRITTEN)}
    for bind in binds:
        _, first, *others = bind.target.split("/")
        ours.add(f"home/{others[0]}" if first == "home" and others else first)
    return sorted(ours - _MOUNTED - {bind.target[1:] for bind in binds})


def write_skeleton(folder: Path, binds: Sequence[Bind]) -> None:
    """Builds the lowest layer in ``folder``: our own files, and a mount point for every bind.

    With these mount points bubblewrap makes none, so a fresh sandbox's upper is empty. The layer has fixed modes and no
    user directories, which each sandbox gets in its own upper or layer.
    """
    folder.mkdir(mode=0o755)
    for name in _EMPTY:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in WRITTEN.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    for path, target in _LINKS.items():
        (folder / path).symlink_to(target)
    for bind in binds:
        point = folder / bind.target.lstrip("/")
        if os.path.isdir(bind.source):
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
    for setting in _SETTINGS:
        (folder / setting.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
    for parent, _, files in os.walk(folder):
        os.chmod(parent, 0o755)
        for file_name in files:
            if not os.path.islink(os.path.join(parent, file_name)):
                os.chmod(os.path.join(parent, file_name), 0o644)
    # Copied, not bound: bubblewrap pays for each bind in every sandbox. As recent as the service's start.
    for setting in _SETTINGS:
        with contextlib.suppress(FileNotFoundError):
            _copy_setting(setting, f"{folder}{setting}")


def add_certificate(folder: Path, certificate: Path) -> None:
    """Adds a certificate to the system's bundle in a skeleton, under each of its names that the host has."""
    for name in _BUNDLES:
        bundle = folder / name
        if bundle.is_file() and not bundle.is_symlink():
            with bundle.open("ab") as file:
                file.write(b"\n" + certificate.read_bytes())


def _copy_setting(source: str, target: str) -> None:
    """Copies what is world-readable, with fixed modes; skips the rest, and the alternatives of manual pages.

    Most of it are hundreds of links, at each start of the service: each costs one look and one call, and some file
    systems search long for a place. Those of manual pages are half of them.
    """
    if source.endswith(".gz"):
        return
    mode = os.lstat(source).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
    elif not mode & stat.S_IROTH:
        return
    elif stat.S_ISREG(mode):
        shutil.copyfile(source, target)
        os.chmod(target, 0o644)
    elif stat.S_ISDIR(mode):
        os.mkdir(target)
        os.chmod(target, 0o755)
        for name in os.listdir(source):
            _copy_setting(f"{source}/{name}", f"{target}/{name}")


def prepare_upper(upper: Path, work: Path, uid: int | None, *, below: Path, fresh: bool) -> None:
    """Makes a sandbox's writable layer, owned by its host user; ``fresh`` also makes the user's own directories.

    Its root is as old as that of the layer ``below``: `ls -la` in the working directory shows it, and each fork's is
    equal.
    """
    for folder in (upper, work, *((upper / name for name in _OF_THE_USER) if fresh else ())):
        folder.mkdir(mode=0o755, parents=True)
        if uid is not None:
            os.chown(folder, uid, uid)
    if fresh and uid is not None:
        os.chown(upper / "home", uid, uid)
    os.chmod(work, 0o700)
    age = below.stat().st_mtime_ns
    os.utime(upper, ns=(age, age))


def prepare_image_upper(
    upper: Path, work: Path, uid: int | None, *, below: Path, writable: Iterable[str], made: Iterable[str]
) -> None:
    """Makes the writable layer of a sandbox whose base is an image.

    ``writable`` are the directories that its user may write to, and ``made`` those of them that the image lacks.
    """
    own = [upper, work, *(upper / path.lstrip("/") for path in made)]
    # Those above them as well: overlayfs cannot copy up what belongs to another user. Their mounts are read-only.
    above = {part for path in writable for part in (upper / path.lstrip("/")).parents if part.is_relative_to(upper)}
    for folder in (*own[:2], *sorted(above - {upper}), *own[2:]):
        folder.mkdir(exist_ok=True)
        os.chmod(folder, 0o755)
        if uid is not None:
            os.chown(folder, uid, uid)
    os.chmod(work, 0o700)
    age = below.stat().st_mtime_ns
    os.utime(upper, ns=(age, age))


def image_arguments(
    *,
    layers: Sequence[str],
    upper: str,
    work: str,
    mounts: Iterable[Bind],
    tmp_bytes: int,
    share_network: bool,
    ids: tuple[int, int],
) -> list[str]:
    """Returns the same for a sandbox whose base is an image: ``layers`` are all of its root, and nothing of the host.

    ``ids`` are its user and group; the first process's program is below ``OURS``, as are the mounts.
    The sandbox helper makes all but the user's own directories read-only.
    """
    arguments = _isolation(*ids, share_network=share_network)
    for layer in layers:
        arguments += ["--overlay-src", layer]
    arguments += ["--overlay", upper, work, "/"]
    # A tmpfs, since bubblewrap cannot make mount points in a directory of another user.
    arguments += ["--size", "1048576", "--tmpfs", OURS, "--dir", NOTHING, *_first_process()]
    for bind in mounts:
        arguments += ["--ro-bind", bind.source, bind.target]
    return [*arguments, "--remount-ro", OURS, *_in_memory(tmp_bytes)]


def bubblewrap_arguments(
    *,
    layers: Sequence[str],
    upper: str,
    work: str,
    binds: Iterable[Bind],
    mounts: Iterable[Bind],
    tmp_bytes: int,
    share_network: bool,
    own_first_process: bool,
    added: Sequence[Added] = (),
) -> list[str]:
    """Returns all arguments but the binary, its descriptors and the command.

    ``layers`` are listed from the lowest up; ``mounts`` are the toolboxes and runtimes, all under ``/opt/penstock``.
    With ``own_first_process`` its program is there too: it starts in a fraction of a shell's time, without its memory.
    Files of ``added`` are over the host's programs, and below ``layers``, so that our own files stay.
    """
    arguments = _isolation(USER_ID, USER_ID, share_network=share_network)
    for layer in (*(one.shown for one in added), *layers):
        arguments += ["--overlay-src", layer]
    arguments += ["--overlay", upper, work, "/"]
    # A tmpfs, since bubblewrap cannot make mount points in a skeleton of another user. All of /opt, because a
    # directory that only holds a mount can be renamed with it.
    arguments += ["--size", "1048576", "--tmpfs", "/opt", "--dir", OURS]
    if own_first_process:
        arguments += _first_process()
    for bind in binds:
        arguments += _with_added(bind, added)
    for bind in mounts:
        arguments += ["--ro-bind", bind.source, bind.target]
    return [*arguments, "--remount-ro", "/opt", *_in_memory(tmp_bytes)]


def check_layers(layers: Sequence[str], upper: str, work: str) -> None:
    """Raises FailedPrecondition (TOO_MANY_LAYERS) for more layers of a root than the kernel mounts.

    All paths are bubblewrap's. The kernel cuts longer options without an error, and the root may then lack its lowest
    layers.
    """
    # As bubblewrap writes them: by real paths, and with a backslash before what separates options and layers.
    above = {folder: os.path.realpath(folder) for folder in map(os.path.dirname, (*layers, upper, work))}
    paths = [f"{above[os.path.dirname(path)]}/{os.path.basename(path)}" for path in (*layers, upper, work)]
    taken = len("upperdir=,workdir=,lowerdir=,userxattr") + len(layers) - 1
    taken += sum(len("/oldroot") + len(os.fsencode(path)) + sum(map(path.count, "\\,:")) for path in paths)
    if taken > _MOST_OPTIONS:
        raise FailedPrecondition(
            f"a sandbox would stand on {len(layers)} layers, whose paths need {taken} bytes of the kernel's "
            f"{_MOST_OPTIONS}: fork or prepare from an earlier one, or use a shorter state_dir",
            reason="TOO_MANY_LAYERS",
            metadata={"layers": str(len(layers))},
        )


def _with_added(bind: Bind, added: Sequence[Added]) -> list[str]:
    """Returns the arguments of a directory of the host's programs, with what is added to it on top."""
    place = os.path.realpath(bind.target) if added and bind.target in _PROGRAM_FOLDERS else ""
    above = [f"{one.shown}{place}" for one in added if place and _has_folder(one.folder, place)]
    if not above:
        return ["--ro-bind", bind.source, bind.target]
    sources = [argument for source in (bind.source, *above) for argument in ("--overlay-src", source)]
    return [*sources, "--ro-overlay", bind.target]


def _has_folder(root: Path, place: str) -> bool:
    """Whether a tree has a directory there, with no link on the way: a mount would follow it out of the tree."""
    path = f"{os.path.realpath(root)}{place}"
    return os.path.isdir(path) and os.path.realpath(path) == path


def _first_process() -> list[str]:
    """Copied, not bound: that is cheaper."""
    return ["--perms", "0555", "--file", str(FIRST_PROGRAM), first_process.PATH]


def _isolation(user: int, group: int, *, share_network: bool) -> list[str]:
    arguments = ["--unshare-all"]
    if share_network:
        arguments.append("--share-net")
    arguments += ["--unshare-user", "--uid", str(user), "--gid", str(group), "--disable-userns"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    # Only the first process keeps one harmless capability: a process without it may then not trace it. Otherwise
    # code that an agent injected there would outlive the agent, and could change a reward.
    arguments += ["--cap-add", "CAP_WAKE_ALARM"]
    return [*arguments, "--hostname", "sandbox", "--as-pid-1"]


def _in_memory(tmp_bytes: int) -> list[str]:
    arguments = ["--proc", "/proc", "--dev", "/dev"]
    for target in ("/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", target]
    return arguments
