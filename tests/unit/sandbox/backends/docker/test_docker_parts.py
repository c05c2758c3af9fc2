"""The parts of the Docker backend that need no daemon."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import ssl
import struct
import subprocess
import sys
import tarfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import eventually

from penstock_chassis.errors import FailedPrecondition, NotFound, Unavailable
from penstock_sandbox.backends.docker import seccomp
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Missing, Refused
from penstock_sandbox.backends.docker.engine.streams import CommandPipes
from penstock_sandbox.backends.docker.images import changes, workdir_owner
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.prepared_images import Prepared, described
from penstock_sandbox.backends.images import additions, pause_program
from penstock_sandbox.guest import confinement
from penstock_sandbox.guest.common import filters

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")


# The first process ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R45")
@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_first_process_is_a_small_static_program(architecture: str) -> None:
    """It needs nothing of the image."""
    program = pause_program.program(architecture)
    assert program is not None and program.startswith(b"\x7fELF") and len(program) < 300
    (entry,) = struct.unpack_from("<Q", program, 24)
    assert entry - 0x400000 == 120
    assert pause_program.program("riscv64") is None


@pytest.mark.requirement("R40")
def test_the_first_process_waits_and_leaves_no_zombies(tmp_path: Path) -> None:
    """Orphans that are left to it are reaped."""
    program = pause_program.program(MACHINE)
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


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("architecture", "name", "clone", "unshare"), [("amd64", 0xC000003E, 56, 272), ("arm64", 0xC00000B7, 220, 97)]
)
def test_the_filter_leaves_no_way_to_new_namespaces(architecture: str, name: int, clone: int, unshare: int) -> None:
    program = confinement.program(architecture)
    assert _judge(program, name, unshare, 0) == EPERM
    assert _judge(program, name, clone, 0x10000000 | signal.SIGCHLD) == EPERM
    # As a C library forks, and as it makes threads.
    assert _judge(program, name, clone, 0x01200011) == ALLOWED
    assert _judge(program, name, clone, 0x003D0F00) == ALLOWED
    assert _judge(program, name, 435, 0) == ENOSYS
    assert _judge(program, 0x40000003, 1, 0) == EPERM


@pytest.mark.requirement("R80")
@given(st.integers(0, 600), st.integers(0, 0xFFFFFFFF))
def test_the_filter_always_comes_to_a_judgement(number: int, argument: int) -> None:
    """No jump leads astray."""
    for architecture, name in (("amd64", 0xC000003E), ("arm64", 0xC00000B7)):
        assert _judge(confinement.program(architecture), name, number, argument) in (
            ALLOWED,
            EPERM,
            ENOSYS,
            EAFNOSUPPORT,
        )


@pytest.mark.requirement("R92")
@pytest.mark.parametrize(
    ("machine", "architecture", "name", "calls"),
    [("x86_64", "amd64", 0xC000003E, (41, 53)), ("aarch64", "arm64", 0xC00000B7, (198, 199))],
)
@given(st.integers(0, 0xFFFFFFFF))
def test_filter_allows_four_socket_families_wherever_a_guest_serves(
    machine: str, architecture: str, name: int, calls: tuple[int, int], family: int
) -> None:
    """As the kernel reads the argument, also of a socket pair; no other convention's calls pass."""
    expected = ALLOWED if family in (1, 2, 10, 16) else EAFNOSUPPORT
    program = confinement.program(machine)
    assert [_judge(program, name, call, family) for call in calls] == [expected] * 2
    assert _judge(program, 0x40000003, 102, 1) == EPERM  # i386's socketcall
    assert program == confinement.program(architecture)
    assert confinement.program("riscv64") == b""


@pytest.mark.requirement("R55", "R80")
@pytest.mark.parametrize(("architecture", "column"), [(0xC000003E, 0), (0xC00000B7, 1)])
def test_what_a_guest_refuses_is_refused_to_companions_with_the_same_error(architecture: int, column: int) -> None:
    """A companion has no guest: its daemon's profile refuses by name what the guest's filter refuses by number."""
    program = confinement.program(("x86_64", "aarch64")[column])
    rules = [rule for rule in json.loads(seccomp.profile())["syscalls"] if "args" not in rule]
    errors = {name: rule["errnoRet"] for rule in rules for name in rule["names"]}
    tables = (filters.REFUSED, filters.ABSENT, confinement.REFUSED, confinement.ABSENT)
    numbers = {name: number[column] for table in tables for name, number in table.items()}
    assert {"mount", "unshare", "io_uring_setup", "clone3", "bpf"} <= numbers.keys()
    judged = {name: _judge(program, architecture, number, 0) for name, number in numbers.items()}
    assert judged == {name: 0x00050000 | errors[name] for name in numbers}
    # No number stands twice, as it does where one of a neighbour was copied; and nothing else is refused outright.
    assert len(set(numbers.values())) == len(numbers)
    assert {number for number in range(600) if _judge(program, architecture, number, 1) in (EPERM, ENOSYS)} == {
        *numbers.values()
    }


# Accounts -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R45")
def test_an_image_without_accounts_gets_the_user_and_a_root() -> None:
    account, passwd, group = additions.account_in("", "", "/bin/sh")
    assert (account.uid, account.gid, account.home) == (1000, 1000, "/home/agent")
    assert passwd.splitlines()[0].startswith("root:") and passwd.splitlines()[1].endswith(":/home/agent:/bin/sh")
    assert group == "agent:x:1000:\n"


@pytest.mark.requirement("R45")
def test_images_user_is_kept_and_no_id_is_reused() -> None:
    """The image's real home."""
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


@pytest.mark.requirement("R80")
@given(st.text(max_size=200), st.text(max_size=200))
def test_no_account_file_makes_the_user_root(passwd: str, group: str) -> None:
    account, written, _ = additions.account_in(passwd, group, "/bin/sh")
    assert account.uid > 0 and account.gid > 0 and account.home.startswith("/") and "agent:x:" in written


@pytest.mark.requirement("R45")
def test_the_first_process_has_a_line_of_its_own_so_that_podman_adds_none() -> None:
    """Once, and in no file that is not there."""
    held = additions.with_holder("root:x:0:0::/root:/bin/sh", "root:x:0:")
    assert held == (
        "root:x:0:0::/root:/bin/sh\npenstock-hold:x:65531:65531::/:/sbin/nologin\n",
        "root:x:0:\npenstock-hold:x:65531:\n",
    )
    assert additions.with_holder(*held) == held
    assert additions.with_holder("", "") == ("", "")


@pytest.mark.requirement("R45")
def test_what_podman_adds_to_an_image_is_none_of_a_sandboxs() -> None:
    """Its variable; another value is the image's own. Account and directory may have any characters."""
    labels = {"penstock.account": "a%20b:7:8:/home/a%20b:/bin/sh", "penstock.workdir": "/srv/%24x"}
    env = ["container=podman", "PATH=/bin", "A=container=podman"]
    image = {"Id": "sha256:1", "Architecture": "amd64", "Config": {"Labels": labels, "Env": env}}
    ready = described(image)
    assert ready.env == {"PATH": "/bin", "A": "container=podman"}
    assert (ready.account.name, ready.account.home, ready.workdir) == ("a b", "/home/a b", "/srv/$x")
    assert not ready.checks_health
    image["Config"] = {"Labels": labels, "Env": ["container=oci"], "Healthcheck": {"Test": ["CMD", "true"]}}
    assert described(image).env == {"container": "oci"} and described(image).checks_health


@pytest.mark.requirement("R45", "R63")
def test_images_user_is_found_by_name_or_number() -> None:
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


@pytest.mark.requirement("R45", "R55")
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
    assert additions.workdir_of(declared) == workdir


@pytest.mark.requirement("R80")
@given(st.text(alphabet="./abet", max_size=12))
def test_a_working_directory_is_always_one_of_its_own(declared: str) -> None:
    """Whatever an image declares."""
    workdir = additions.workdir_of(declared)
    assert workdir.startswith("/") and workdir != "/" and ".." not in workdir.split("/")


@pytest.mark.requirement("R44")
def test_handing_over_changes_only_the_owner() -> None:
    """What is his already, and what only root may make, stays as it is."""
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
    whole = b"".join(workdir_owner.handed_over([sink.getvalue()], "/srv/testbed", account))
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


@pytest.mark.requirement("R76")
def test_added_directories_are_taken_whole_and_our_own_paths_left_out() -> None:
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
    assert changes.plan(listed.kinds) == (["/workspace/new"], ["/workspace", "/workspace/file"], ["/workspace/gone"])


_NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@pytest.mark.requirement("R26")
@given(st.dictionaries(_NAMES, st.sampled_from([0, 1, 2]), max_size=20))
def test_each_change_is_listed_once(kinds: dict[str, int]) -> None:
    """Nothing is dropped silently."""
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


_Handle = Callable[[StreamReader, StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _daemon(tmp_path: Path, handle: _Handle) -> AsyncIterator[Daemon]:
    """A daemon that does what `handle` does with a connection."""
    path = tmp_path / "docker.sock"
    async with await asyncio.start_unix_server(handle, path):
        daemon = await Daemon.connect(f"unix://{path}")
        try:
            yield daemon
        finally:
            await daemon.aclose()


def _answering(answer: bytes, pieces: Sequence[int] = ()) -> _Handle:
    """Sends an answer, cut into pieces of these sizes, and the rest."""

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        start = 0
        for size in [*pieces, len(answer)]:
            writer.write(answer[start : start + size])
            await writer.drain()
            start += size
        writer.close()

    return handle


@pytest.mark.requirement("R26")
@pytest.mark.parametrize("pieces", [[], [1] * 40, [100, 3, 7, 1]])
async def test_objects_come_however_the_daemon_cuts_them(tmp_path: Path, pieces: list[int]) -> None:
    first, second = json.dumps({"a": "é" * 10}).encode() + b"\r\n", b'{"b": 2}\n{"c"'
    chunks = [first, second, b": 3}"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    async with _daemon(tmp_path, _answering(answer, pieces)) as daemon:
        assert [one async for one in daemon.events({})] == [{"a": "é" * 10}, {"b": 2}, {"c": 3}]


@pytest.mark.requirement("R8", "R80")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 404 Not Found\r\nContent-Length: 16\r\n\r\n{"message": "x"}', Missing),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nhmm", Refused),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", Unavailable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{", Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", Unavailable),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (3 << 20), Unavailable),
        (b"garbage\r\n\r\n", Unavailable),
        (b"", Unavailable),
    ],
    ids=["missing", "refused", "cut", "no chunk", "no object", "an endless line", "no HTTP", "nothing"],
)
async def test_a_daemon_that_breaks_off_or_refuses_is_a_typed_error(
    tmp_path: Path, answer: bytes, error: type[Exception]
) -> None:
    async with _daemon(tmp_path, _answering(answer)) as daemon:
        with pytest.raises(error):
            [one async for one in daemon.events({})]


async def test_output_of_the_next_command_continues_where_the_last_stopped(tmp_path: Path) -> None:
    """A command's last words are read while its output is still being heard, in the middle of a frame."""
    more = asyncio.Event()

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + struct.pack(">BxxxI", 2, 5) + b"la")
        await writer.drain()
        await more.wait()
        writer.write(b"st!" + struct.pack(">BxxxI", 1, 2) + b"ok")
        writer.close()

    async def heard(pipes: CommandPipes) -> bytes:
        return b"".join([piece async for piece in pipes.output()])

    async with _daemon(tmp_path, handle) as daemon, daemon.command("x") as pipes:
        first, second = asyncio.create_task(heard(pipes)), asyncio.create_task(heard(pipes))
        await eventually(lambda: pipes.errors == b"la", "a part of the frame")
        first.cancel()
        more.set()
        assert (await second, pipes.errors) == (b"ok", b"last!")


async def test_output_survives_a_reader_cancelled_inside_a_frame_header(tmp_path: Path) -> None:
    """The next reader has the part of the head that the first one took."""
    more = asyncio.Event()
    frame = struct.pack(">BxxxI", 1, 2) + b"ok"

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + frame + frame[:3])
        await more.wait()
        writer.write(frame[3:])
        writer.close()

    async with _daemon(tmp_path, handle) as daemon, daemon.command("x") as pipes:
        first = pipes.output()
        assert await anext(first) == b"ok"
        # It has what there is, and waits for the rest.
        waiting = asyncio.ensure_future(anext(first))
        await eventually(lambda: pipes.head == frame[:3], "a part of the head")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        more.set()
        assert [piece async for piece in pipes.output()] == [b"ok"]


@pytest.mark.requirement("R26")
async def test_a_commands_input_waits_for_a_daemon_that_does_not_read(tmp_path: Path) -> None:
    """Memory is bounded; and after its end nothing is taken."""
    begin, whole = asyncio.Event(), 32 << 20
    order: list[str] = []

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await begin.wait()
        order.append("the daemon reads")
        await reader.readexactly(whole)
        writer.close()

    async def write(pipes: CommandPipes) -> None:
        await pipes.write(bytes(whole))
        order.append("all is written")

    async with _daemon(tmp_path, handle) as daemon, daemon.command("x") as pipes:
        writing = asyncio.create_task(write(pipes))
        await asyncio.sleep(0)
        begin.set()
        await writing
        assert [piece async for piece in pipes.output()] == []
    assert order == ["the daemon reads", "all is written"]
    with pytest.raises(OSError):
        await pipes.write(b"late")


@pytest.mark.requirement("R8", "R48")
async def test_an_invalid_image_name_is_an_unknown_image(tmp_path: Path) -> None:
    """The SDK refuses some of the operator's itself: that is no daemon that does not answer, for which callers wait."""
    answer = b'HTTP/1.1 404 Not Found\r\nContent-Length: 16\r\nConnection: close\r\n\r\n{"message": "x"}'
    wrong = ("https://registry.example/image", "-image", "-image/of/mine")
    async with _daemon(tmp_path, _answering(answer)) as daemon:
        images = Images(daemon, cast(Prepared, None), 5.0, wrong)
        for name in wrong:
            with pytest.raises(NotFound) as unknown:
                await images.ready(name)
            assert unknown.value.reason == "IMAGE_UNKNOWN"


@pytest.mark.requirement("R48")
async def test_an_address_that_no_daemon_has_is_refused() -> None:
    with pytest.raises(FailedPrecondition):
        await Daemon.connect("gopher://somewhere")


@pytest.mark.requirement("R48")
async def test_a_daemon_by_tcp_and_tls_serves_calls_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both show the certificate of Docker's own variables, and check the daemon's."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem"]
    await asyncio.to_thread(subprocess.run, [*make, "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    body = b'{"OSType": "linux"}'
    handle = _answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests, below the SDK, prefers them to Docker's
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as server:
        daemon = await Daemon.connect(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await daemon.info() == {"OSType": "linux"}
        assert [one async for one in daemon.events({})] == [{"OSType": "linux"}]
        await daemon.aclose()


_SSH = """#!{python}
import json, os, socket, sys, threading
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
daemon = socket.socket(socket.AF_UNIX)
daemon.connect({path!r})
def forward():
    while data := os.read(0, 65536):
        daemon.sendall(data)
    daemon.shutdown(socket.SHUT_WR)
threading.Thread(target=forward, daemon=True).start()
while data := daemon.recv(65536):
    os.write(1, data)
"""


@pytest.mark.requirement("R48")
async def test_a_daemon_by_ssh_serves_calls_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both go through the ssh program, with its own configuration and no other library."""
    path, log = tmp_path / "docker.sock", tmp_path / "log"

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"status": "x"}' if b"/events" in head else b'{"OSType": "linux"}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read()
        writer.close()

    (tmp_path / "ssh").write_text(_SSH.format(python=sys.executable, log=str(log), path=str(path)))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with await asyncio.start_unix_server(handle, path):
        daemon = await Daemon.connect("ssh://me@far.example:2222")
        assert await daemon.info() == {"OSType": "linux"}
        assert [one async for one in daemon.events({})] == [{"status": "x"}]
        await daemon.aclose()
    remote = ["-l", "me", "--", "far.example", "docker", "system", "dial-stdio"]
    expected = ["-o", "BatchMode=yes", "-p", "2222", *remote]
    assert [json.loads(line) for line in log.read_text().splitlines()] == [expected] * 2


@pytest.mark.requirement("R44")
def test_the_added_layer_holds_absolute_places_of_roots(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(additions.packed([additions.File("/opt/x", b"content")]))) as packed:
        (member,) = packed.getmembers()
        assert (member.name.lstrip("/"), member.uid, member.mode) == ("opt/x", 0, 0o755)
