"""The parts of the Docker backend that need no daemon."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.attendant import families
from penstock_sandbox.backends.docker import additions, changes, confinement, handover, hold
from penstock_sandbox.backends.docker.daemon import Missing, Refused
from penstock_sandbox.backends.docker.wire import CommandPipes, Wire

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")


# The first process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_first_process_is_a_small_static_program(architecture: str) -> None:
    """R45: it needs nothing of the image."""
    program = hold.program(architecture)
    assert program is not None and program.startswith(b"\x7fELF") and len(program) < 300
    (entry,) = struct.unpack_from("<Q", program, 24)
    assert entry - 0x400000 == 120
    assert hold.program("riscv64") is None


def test_the_first_process_waits_and_leaves_no_zombies(tmp_path: Path) -> None:
    """R40: orphans that are left to it are reaped."""
    program = hold.program(MACHINE)
    assert program is not None, f"no first process for {os.uname().machine}"
    file = tmp_path / "hold"
    file.write_bytes(program)
    file.chmod(0o755)
    # A shell that becomes it after it made a child which ends later: the child is then its own.
    shell = f"(read line < {tmp_path}/gate) & echo $!; exec {file}"
    os.mkfifo(tmp_path / "gate")
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        while Path(f"/proc/{process.pid}/comm").read_text() != "hold\n":
            pass
        (tmp_path / "gate").write_text("go\n")
        while Path(f"/proc/{child}").exists():
            assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL


# The filter -----------------------------------------------------------------------------------------------------------


def _judge(program: bytes, architecture: int, number: int, argument: int) -> int:
    """What the kernel would answer: the filter, run."""
    data = struct.pack("<IIQQ", number, architecture, 0, argument)
    at, held = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
            at += if_true if holds else if_false


ALLOWED, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x00050001, 0x00050000 | 38, 0x00050000 | errno.EAFNOSUPPORT


@pytest.mark.parametrize(
    ("architecture", "name", "clone", "unshare"), [("amd64", 0xC000003E, 56, 272), ("arm64", 0xC00000B7, 220, 97)]
)
def test_the_filter_leaves_no_way_to_new_namespaces(architecture: str, name: int, clone: int, unshare: int) -> None:
    """R55"""
    program = confinement.program(architecture)
    assert _judge(program, name, unshare, 0) == EPERM
    assert _judge(program, name, clone, 0x10000000 | signal.SIGCHLD) == EPERM
    # As a C library forks, and as it makes threads.
    assert _judge(program, name, clone, 0x01200011) == ALLOWED
    assert _judge(program, name, clone, 0x003D0F00) == ALLOWED
    assert _judge(program, name, 435, 0) == ENOSYS
    assert _judge(program, 0x40000003, 1, 0) == EPERM


@given(st.integers(0, 600), st.integers(0, 0xFFFFFFFF))
def test_the_filter_always_comes_to_a_judgement(number: int, argument: int) -> None:
    """R80: no jump leads astray."""
    for architecture, name in (("amd64", 0xC000003E), ("arm64", 0xC00000B7)):
        assert _judge(confinement.program(architecture), name, number, argument) in (
            ALLOWED,
            EPERM,
            ENOSYS,
            EAFNOSUPPORT,
        )


@pytest.mark.parametrize(
    ("machine", "architecture", "name", "calls"),
    [("x86_64", "amd64", 0xC000003E, (41, 53)), ("aarch64", "arm64", 0xC00000B7, (198, 199))],
)
@given(st.integers(0, 0xFFFFFFFF))
def test_both_filters_allow_the_same_four_families_of_sockets(
    machine: str, architecture: str, name: int, calls: tuple[int, int], family: int
) -> None:
    """R92: as the kernel reads the argument, also of a socket pair; no other convention's calls pass."""
    expected = ALLOWED if family in (1, 2, 10, 16) else EAFNOSUPPORT
    for program in (confinement.program(architecture), families.program(machine)):
        assert [_judge(program, name, call, family) for call in calls] == [expected] * 2
        assert _judge(program, 0x40000003, 102, 1) == EPERM  # i386's socketcall
    assert families.program("riscv64") == b""


# Accounts -------------------------------------------------------------------------------------------------------------


def test_an_image_without_accounts_gets_the_user_and_a_root() -> None:
    """R45"""
    account, passwd, group = additions.account_in("", "", "/bin/sh")
    assert (account.uid, account.gid, account.home) == (1000, 1000, "/home/agent")
    assert passwd.splitlines()[0].startswith("root:") and passwd.splitlines()[1].endswith(":/home/agent:/bin/sh")
    assert group == "agent:x:1000:\n"


def test_the_user_that_an_image_has_is_kept_and_no_id_is_taken_twice() -> None:
    """R45: the image's real home."""
    account, passwd, _ = additions.account_in("agent:x:501:502::/srv/agent:/bin/sh\n", "", "/bin/sh")
    assert (account.uid, account.gid, account.home) == (501, 502, "/srv/agent")
    assert passwd.count("agent:x:") == 1
    account, passwd, _ = additions.account_in(
        "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh", "node:x:1001:", "/bin/sh"
    )
    assert account.uid == 1002 and "\nagent:x:1002:1002:" in passwd
    # One that is root by another name is not the sandbox's user.
    account, _, _ = additions.account_in("agent:x:0:0::/root:/bin/sh\n", "", "/bin/sh")
    assert account.uid == 1000


@given(st.text(max_size=200), st.text(max_size=200))
def test_no_account_file_makes_the_user_root(passwd: str, group: str) -> None:
    """R80"""
    account, written, _ = additions.account_in(passwd, group, "/bin/sh")
    assert account.uid > 0 and account.gid > 0 and account.home.startswith("/") and "agent:x:" in written


def test_a_user_of_the_image_is_found_by_name_or_number_and_nobody_else_is() -> None:
    """R45, R63"""
    passwd = "root:x:0:0::/root:/bin/sh\ncoder:x:1234:1235::/home/coder:/bin/zsh\nodd:x:none:5::/:/bin/sh\n"
    found = additions.account_named("coder", passwd, "/bin/sh")
    assert found == additions.Account("coder", 1234, 1235, "/home/coder", "/bin/sh")
    assert additions.account_named("1234", passwd, "/bin/sh") == found
    root = additions.Account("root", 0, 0, "/root", "/bin/sh")
    assert additions.account_named("root", "", "/bin/sh") == additions.account_named("0", passwd, "/bin/sh") == root
    alone = additions.account_named("77", passwd, "/bin/sh")
    assert alone is not None and (alone.name, alone.uid, alone.gid) == ("77", 77, 77)
    for unknown in ("odd", "nobody", "4294967295", "-1", "1234:0", ""):
        assert additions.account_named(unknown, passwd, "/bin/sh") is None


# Handing over ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "workdir"),
    [
        ("", "/workspace"), ("/", "/workspace"), ("/usr", "/workspace"), ("/etc/app", "/workspace"),
        ("/lib/../usr/lib/x", "/workspace"), ("//etc", "/workspace"), ("relative", "/workspace"),
        ("/opt/penstock/x", "/workspace"), ("/tmp/x", "/workspace"), ("/testbed/", "/testbed"),
        ("/app/./src/..", "/app"),
        ("/usr/src/app", "/usr/src/app"), ("/home/repository", "/home/repository"), ("/root", "/root"),
    ],
)  # fmt: skip
def test_no_directory_of_the_system_is_a_working_directory(declared: str, workdir: str) -> None:
    """R45, R55"""
    assert handover.workdir_of(declared) == workdir


@given(st.text(alphabet="./abet", max_size=12))
def test_a_working_directory_is_always_one_of_its_own(declared: str) -> None:
    """R80: whatever an image declares."""
    workdir = handover.workdir_of(declared)
    assert workdir.startswith("/") and workdir != "/" and ".." not in workdir.split("/")


def test_what_is_handed_over_changes_its_owner_and_nothing_else() -> None:
    """R44: what is his already, and what only root may make, stays as it is."""
    account = additions.Account("agent", 1000, 1001, "/home/agent", "/bin/sh")
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, mode, uid, content in (
            ("testbed", tarfile.DIRTYPE, 0o2755, 0, b""), ("testbed/tool", tarfile.REGTYPE, 0o4755, 0, b"x" * 300_000),
            ("testbed/hard", tarfile.LNKTYPE, 0o755, 0, b""), ("testbed/soft", tarfile.SYMTYPE, 0o777, 5, b""),
            ("testbed/his", tarfile.REGTYPE, 0o600, 1000, b"his"), ("testbed/disk", tarfile.BLKTYPE, 0o600, 0, b""),
            ("testbed/\udcff", tarfile.REGTYPE, 0o600, 0, b"odd"),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.mtime = kind, mode, uid, 12345.5
            member.gid = 1001 if uid == 1000 else 0
            member.linkname = {tarfile.LNKTYPE: "testbed/tool", tarfile.SYMTYPE: "/etc/passwd"}.get(kind, "")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    whole = b"".join(handover.handed_over([sink.getvalue()], "/srv/testbed", account))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        found = {member.name: member for member in archive}
        tool = archive.extractfile(found["srv/testbed/tool"])
        assert tool is not None and tool.read() == b"x" * 300_000
    assert set(found) == {f"srv/testbed{rest}" for rest in ("", "/tool", "/hard", "/soft", "/\udcff")}
    assert {(member.uid, member.gid, member.mtime) for member in found.values()} == {(1000, 1001, 12345.5)}
    assert found["srv/testbed/tool"].mode == 0o755 and found["srv/testbed"].mode == 0o2755
    assert found["srv/testbed/hard"].linkname == "srv/testbed/tool"
    assert found["srv/testbed/soft"].linkname == "/etc/passwd"


# Differences ----------------------------------------------------------------------------------------------------------


def test_added_directories_are_taken_whole_and_our_own_paths_left_out() -> None:
    """R76"""
    listed = changes.Listed([])
    for path, kind in (
        ("/", 0),
        ("/workspace", 0),
        ("/workspace/new", 1),
        ("/workspace/new/a", 1),
        ("/workspace/file", 0),
        ("/workspace/gone", 2),
        ("/opt/penstock/toolboxes/x", 1),
    ):
        listed.take(path, kind)
    assert "/workspace/new/a" not in listed.kinds, "it comes with its directory"
    assert changes.plan(listed.kinds) == (["/workspace/new"], ["/workspace/file"], ["/workspace/gone"])


_NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(st.dictionaries(_NAMES, st.sampled_from([0, 1, 2]), max_size=20))
def test_every_change_is_told_once(kinds: dict[str, int]) -> None:
    """R26: nothing is dropped silently."""
    whole, maybe, deleted = changes.plan(kinds)
    for path, kind in kinds.items():
        parent = path.rpartition("/")[0]
        if kind == 1:
            assert (path in whole) != (kinds.get(parent) == 1)
        elif kind == 2:
            assert path in deleted
        else:
            assert path in maybe or any(other.startswith(f"{path}/") for other in kinds)


# The daemon's streams -------------------------------------------------------------------------------------------------


async def _serve(answer: bytes, pieces: list[int], tmp_path: Path) -> tuple[asyncio.Server, Wire]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        start = 0
        for size in [*pieces, len(answer)]:
            writer.write(answer[start : start + size])
            await writer.drain()
            start += size
        writer.close()

    path = tmp_path / "docker.sock"
    return await asyncio.start_unix_server(handle, path), Wire(f"unix://{path}")


@pytest.mark.parametrize("pieces", [[], [1] * 40, [100, 3, 7, 1]])
async def test_objects_come_however_the_daemon_cuts_them(tmp_path: Path, pieces: list[int]) -> None:
    """R26"""
    first, second = json.dumps({"a": "é" * 10}).encode() + b"\r\n", b'{"b": 2}\n{"c"'
    chunks = [first, second, b": 3}"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    server, wire = await _serve(answer, pieces, tmp_path)
    async with server:
        assert [one async for one in wire.objects("GET", "/x", {})] == [{"a": "é" * 10}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 404 Not Found\r\nContent-Length: 16\r\n\r\n{"message": "x"}', Missing),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nhmm", Refused),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", Unavailable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{", Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", Unavailable),
        (b"garbage\r\n\r\n", Unavailable),
        (b"", Unavailable),
    ],
)
async def test_a_daemon_that_breaks_off_or_refuses_is_a_typed_error(
    tmp_path: Path, answer: bytes, error: type[Exception]
) -> None:
    """R8, R80"""
    server, wire = await _serve(answer, [], tmp_path)
    async with server:
        with pytest.raises(error):
            [one async for one in wire.objects("GET", "/x", {})]


async def test_who_hears_a_command_after_another_goes_on_where_that_one_left_off(tmp_path: Path) -> None:
    """A command's last words are read while its output is still being heard, in the middle of a frame."""
    more = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 UPGRADED\r\n\r\n" + struct.pack(">BxxxI", 2, 5) + b"la")
        await writer.drain()
        await more.wait()
        writer.write(b"st!" + struct.pack(">BxxxI", 1, 2) + b"ok")
        writer.close()

    async def heard(pipes: CommandPipes) -> bytes:
        return b"".join([piece async for piece in pipes.output()])

    path = tmp_path / "docker.sock"
    async with await asyncio.start_unix_server(handle, path), Wire(f"unix://{path}").command("x") as pipes:
        first, second = asyncio.create_task(heard(pipes)), asyncio.create_task(heard(pipes))
        await eventually(lambda: pipes.errors == b"la", "a part of the frame")
        first.cancel()
        more.set()
        assert (await second, pipes.errors) == (b"ok", b"last!")


def test_an_address_that_no_daemon_has_is_refused() -> None:
    """R48"""
    with pytest.raises(FailedPrecondition):
        Wire("gopher://somewhere")


def test_the_added_layer_holds_absolute_places_of_roots(tmp_path: Path) -> None:
    """R44"""
    with tarfile.open(fileobj=io.BytesIO(additions.packed([additions.File("/opt/x", b"content")]))) as packed:
        (member,) = packed.getmembers()
        assert (member.name.lstrip("/"), member.uid, member.mode) == ("opt/x", 0, 0o755)
