"""What sandboxes with a kernel of their own are served with: a Python taken from an image; how they are known."""

from __future__ import annotations

import io
import secrets
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.services.processes import argv_of
from tests.support.waiting import awaited

from penstock_sandbox.backends.docker.access.interpreter import Interpreter
from penstock_sandbox.backends.docker.cleanup import leftovers
from penstock_sandbox.backends.docker.probe.trial_container import keeps_apart, unusable


def _tar(*members: tuple[str, str | bytes | None, int]) -> Iterator[bytes]:
    """A tar in pieces; a member's content is a link's target where it is text."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content, mode in members:
            member = tarfile.TarInfo(name)
            member.mode, member.uid = mode, 1000
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            elif content is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    whole = sink.getvalue()
    return iter([whole[start : start + 1000] for start in range(0, len(whole), 1000)])


def _taken(interpreter: Interpreter, *folders: tuple[str, Iterator[bytes]]) -> dict[str, tarfile.TarInfo]:
    archive = b"".join(interpreter.taken(folders, "."))
    with tarfile.open(fileobj=io.BytesIO(archive)) as source:
        return {member.name.removeprefix("./"): member for member in source}


@pytest.mark.requirement("R13", "R53")
def test_only_the_images_root_owned_python_runtime_is_taken() -> None:
    """No other program, no package, no right to change it; links stay within."""
    interpreter = Interpreter()
    found = _taken(
        interpreter,
        ("/lib64", _tar(("lib64", "usr/lib64", 0o777))),
        (
            "/usr/bin",
            _tar(
                ("bin", None, 0o755),
                ("bin/python3.11", b"elf", 0o6777),
                ("bin/python3", "python3.11", 0o777),
                ("bin/sh", b"", 0o755),
            ),
        ),
        (
            "/usr/lib",
            _tar(
                ("lib/x86_64-linux-gnu/libc.so.6", b"libc", 0o755),
                ("lib/x86_64-linux-gnu/perl/Fcntl.so", b"perl", 0o755),
                ("lib/python3.11/os.py", b"import sys", 0o644),
                ("lib/python3.11/test/regrtest.py", b"", 0o644),
                ("lib/python3/dist-packages/apt.py", b"", 0o644),
                ("lib/python3.11/site-packages/evil.py", b"", 0o644),
                ("lib/python3.11/lib-dynload/_ctypes.so", b"", 0o644),
            ),
        ),
        ("/usr/lib64", _tar(("lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", 0o777))),
    )
    assert sorted(found) == [
        "lib64",
        "usr/bin/python3",
        "usr/bin/python3.11",
        "usr/lib/python3.11/lib-dynload/_ctypes.so",
        "usr/lib/python3.11/os.py",
        "usr/lib/x86_64-linux-gnu/libc.so.6",
        "usr/lib64/ld-linux-x86-64.so.2",
    ]
    assert found["usr/lib64/ld-linux-x86-64.so.2"].linkname == "../../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    assert {member.uid for member in found.values()} == {0} and found["usr/bin/python3.11"].mode == 0o755
    assert interpreter.command("/at") == [
        "/at/usr/lib64/ld-linux-x86-64.so.2",
        "--library-path",
        "/at/usr/lib/x86_64-linux-gnu:/at/usr/lib64",
        "/at/usr/bin/python3",
        "-I",
        "-S",
    ]


@pytest.mark.requirement("R48")
def test_an_image_without_a_python_or_a_loader_gives_no_command() -> None:
    """It is told before any sandbox is made."""
    empty, static = Interpreter(), Interpreter()
    assert _taken(empty, ("/usr/bin", _tar(("bin/busybox", b"", 0o755)))) == {}
    _taken(static, ("/usr/bin", _tar(("bin/python3", b"", 0o755))))
    assert empty.command("/at") is None and static.command("/at") is None


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("runtime", "described", "apart"),
    [
        ("sealed", {"path": "/usr/bin/runsc", "runtimeArgs": []}, True),
        ("sealed", {"runtimeType": "io.containerd.runsc.v1"}, True),
        ("kata", {"runtimeType": "io.containerd.kata.v2"}, True),
        ("runsc", {"path": "/opt/runsc/wrapper-of-runc"}, False),
        ("runc", {"path": "runc"}, False),
        ("", None, False),
    ],
)
def test_a_runtime_is_known_by_its_program_and_not_by_its_name(
    runtime: str, described: dict[str, object] | None, apart: bool
) -> None:
    info = {"Runtimes": {runtime: described} if described else {}}
    assert keeps_apart(info, runtime) is apart


@pytest.mark.requirement("R48")
def test_absent_gvisor_is_reported_with_the_package_to_install() -> None:
    info = {"OSType": "linux", "Runtimes": {"runc": {"path": "runc"}}}
    assert "apt-get install runsc" in unusable(info, "runsc")
    assert "it has: runc" in unusable(info, "crun") and "install" not in unusable(info, "crun")
    assert unusable(info, "") == unusable(info, "runc") == ""


def _has_arguments(pid: int) -> bool:
    return len(argv_of(pid)) > 1


@pytest.mark.requirement("R50")
def test_only_what_runs_containers_and_names_the_whole_id_is_found(tmp_path: Path) -> None:
    """A process that merely speaks of a container is left alone."""
    container = secrets.token_hex(32)
    program = tmp_path / "runsc-sandbox"
    shutil.copy("/bin/sh", program)
    wait = [str(program), "-c", "read line"]
    wanted = [[*wait, f"/run/{container}/log"], [*wait, "boot", container]]
    others = [[*wait, container[:12] + "0" * 52], [sys.executable, "-c", "input()", container]]
    started = [subprocess.Popen(argv, stdin=subprocess.PIPE) for argv in (*wanted, *others)]
    try:
        for process in started:
            awaited(partial(_has_arguments, process.pid), "the kernel shows its arguments")
        assert sorted(leftovers.find(container)) == sorted(process.pid for process in started[: len(wanted)])
    finally:
        for process in started:
            process.communicate(b"\n")
