"""Companions on a real engine: what they share with their sandbox, how they start and fail, and when they go."""

from __future__ import annotations

import asyncio
import io
import json
import platform
import secrets
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.docker import dockerd
from tests.support.docker.backend import REACHES, backend, create, diff, run
from tests.support.waiting import eventually_async

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_sandbox.backends.docker.companions import container_name
from penstock_sandbox.domain.model import Companion, HealthCheck, Resources, SandboxSpec

pytestmark = pytest.mark.asyncio

SERVE = """
mkdir /dev/shm/www && cd /dev/shm/www && echo "$GREETING" > index.html || exit 1
busybox cat /proc/net/dev > devices
busybox grep -E "^(Cap|NoNewPrivs|Uid)" /proc/self/status > status
exec busybox httpd -f -p 8080 -h .
"""
HEALTHY = HealthCheck(("/bin/busybox", "wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8080/"), interval_s=0.05)
FETCH = "import sys, urllib.request\nprint(urllib.request.urlopen(sys.argv[1]).read().decode(), end='')"


def shell(name: str, program: str, *, image: str = dockerd.TINY, **fields: Any) -> Companion:
    """A companion that runs a program of the shell, as nobody."""
    start = {"entrypoint": ("/bin/sh", "-c"), "command": (program,), "user": "65534"}
    return Companion(name, image, **{**start, **fields})


def web(**fields: Any) -> Companion:
    """A web server."""
    return shell("web", SERVE, **{"env": {"GREETING": "hello"}, "health_check": HEALTHY, **fields})


@pytest.mark.requirement("R13", "R54", "R55")
@pytest.mark.parametrize("reach", REACHES)
async def test_companions_share_the_network_of_their_sandbox_and_nothing_else(tmp_path: Path, reach: str) -> None:
    """Reached by their names. They have no interface but loopback, no privilege, and files and processes apart."""
    limits = Resources(memory_bytes=64 << 20, pids=50, cpu=0.5)
    server = web(aliases=("my_web", "store.example"), resources=limits)
    # It ends, and the creation fails, unless the server is healthy by now.
    second = shell("second", "busybox wget -q -O /dev/null http://127.0.0.1:8080/ && exec sleep 1000", after=("web",))
    async with backend(tmp_path, reach) as opened:
        assert opened.capabilities.companions
        handle = await create(opened, companions=(server, second))
        for name in ("web", "my_web", "store.example", "second", "sandbox"):
            code, text = await run(handle, "python3", "-c", FETCH, f"http://{name}:8080/")
            assert (code, text) == (0, "hello\n"), name
        code, text = await run(handle, "python3", "-c", FETCH, "http://web:8080/devices")
        assert [line.split(":")[0].strip() for line in text.splitlines() if ":" in line] == ["lo"]
        code, text = await run(handle, "python3", "-c", FETCH, "http://web:8080/status")
        seen = dict(line.split(":\t") for line in text.splitlines())
        assert {seen[name] for name in seen if name.startswith("Cap")} == {"0" * 16}
        assert (seen["NoNewPrivs"], set(seen["Uid"].split())) == ("1", {"65534"})
        code, text = await run(handle, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls /dev/shm; touch mine")
        assert code == 0 and "httpd" not in text and "www" not in text
        changed, deleted = await diff(handle)
        assert "workspace/mine" in changed and not [path for path in changed if "www" in path] and not deleted
        api = dockerd.engine().api
        (found,) = [one for one in api.containers() if one["Names"][0].endswith("-with-web")]
        host = api.inspect_container(found["Id"])["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["NanoCpus"]) == (64 << 20, 50, 500_000_000)
        assert (host["CapDrop"], host["CapAdd"], host["Binds"]) == (["ALL"], None, None)
        await handle.destroy()


FAILURES = [
    (web(command=("echo broken >&2; exit 3",)), "COMPANION_FAILED", "exit code 3; its last lines:\nbroken"),
    (
        web(command=(r"printf '\033]0;x\007\000\342\200\256mirrored\n'; exit 1",)),
        "COMPANION_FAILED",
        "its last lines:\n\ufffd]0;x\ufffd\ufffd\ufffdmirrored",
    ),
    (
        shell("web", "yes | busybox head -n 5000; exec sleep 1000", health_check=HealthCheck(("/no",), 0.01, 0.1, 1)),
        "COMPANION_FAILED",
        "it is not healthy after 0.11 s",
    ),
    (web(entrypoint=("/absent",)), "COMPANION_FAILED", "it cannot be started"),
    (web(user=""), "CAPABILITY_MISSING", "is root"),
    (web(user="00:65534"), "CAPABILITY_MISSING", "is root"),
    (web(user="nobody"), "USER_UNKNOWN", "has no user 'nobody'"),
    (web(user="65531"), "USER_RESERVED", "65531"),
    (Companion("db", "penstock-test/other:1"), "IMAGE_NOT_ALLOWED", "penstock-test/other:1"),
]


@pytest.mark.requirement("R43", "R49")
async def test_a_companion_that_fails_fails_the_creation_and_leaves_nothing(tmp_path: Path) -> None:
    """With the reason, and the end of what it wrote."""
    async with backend(tmp_path, allowed_images=(dockerd.TINY,)) as opened:
        for companion, reason, named in FAILURES:
            with pytest.raises((FailedPrecondition, InvalidArgument)) as failed:
                await create(opened, companions=(shell("fine", "exec sleep 1000"), companion))
            assert failed.value.reason == reason and named in failed.value.message
            assert len(failed.value.message) < 3000
            assert not [one for one in dockerd.engine().remains() if "-with-" in one]


ROOT = shell(
    "root",
    "busybox chown 7:7 /bin/echo && busybox grep CapBnd /proc/self/status > /dev/shm/status && exec sleep 1000",
    user="",
    # It may change owners and users, and nothing of the network.
    health_check=HealthCheck(("/bin/busybox", "grep", "00000000000004fb", "/dev/shm/status"), 0.05),
)


@pytest.mark.requirement("R49", "R50")
@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_companions_that_wait_end_with_the_creation(tmp_path: Path, end: str) -> None:
    """A caller that leaves, and a sandbox that is lost meanwhile, wait for no health."""
    never = shell("web", "exec sleep 1000", health_check=HealthCheck(("/bin/busybox", "false")))
    async with backend(tmp_path) as opened:
        creating = asyncio.create_task(create(opened, companions=(never,)))

        async def running() -> bool:
            return any("-with-web" in one for one in dockerd.engine().remains())

        await eventually_async(running, "the companion is there")
        if end == "cancelled":
            creating.cancel()
        else:
            (found,) = dockerd.engine().api.containers(filters={"label": ["penstock.kind=sandbox"]})
            await asyncio.to_thread(dockerd.engine().api.kill, found["Id"])
        with pytest.raises(asyncio.CancelledError if end == "cancelled" else Unavailable):
            await creating
        assert not [one for one in dockerd.engine().remains() if "-with-" in one]


@pytest.mark.requirement("R58", "R87", "R90")
async def test_forks_start_their_own_companions_and_outlive_them(tmp_path: Path) -> None:
    """Setup has none, so nothing that it did to them can be lost; a companion that dies takes nobody with it.

    Where the operator allows root, one may be root, with what entry points need and no more.
    """
    async with backend(tmp_path, allow_root=True) as opened:
        prepared = await create(opened, companions=(web(),), to_be_sealed=True)
        code, _ = await run(prepared, "sh", "-c", "echo kept > kept && getent hosts web")
        assert code == 2, "the name is unknown"
        layer = await opened.seal(prepared, f"ss-{secrets.token_hex(16)}")
        forks = [await create(opened, companions=(web(), ROOT), snapshot_id=layer.id) for _ in range(2)]
        for fork in forks:
            code, text = await run(fork, "python3", "-c", FETCH, "http://web:8080/")
            assert (code, text) == (0, "hello\n")
        first, second = forks
        api = dockerd.engine().api
        await asyncio.to_thread(api.kill, container_name(_id(opened, first), "web"))

        async def refused() -> bool:
            code, text = await run(first, "sh", "-c", f"cat kept; exec python3 -c '{_TRY}'")
            assert code == 0 and text.startswith("kept\n")
            return text.endswith("refused\n")

        await eventually_async(refused, "the dead companion's port is closed")
        assert (await run(second, "python3", "-c", FETCH, "http://web:8080/"))[1] == "hello\n"
        for fork in forks:
            await fork.destroy()
        await opened.remove_layer(layer.id)


_TRY = """
import socket
try:
    socket.create_connection(("web", 8080)).close()
except ConnectionRefusedError:
    print("refused")
"""


def _id(opened: Any, handle: Any) -> str:
    box = opened._boxes.of(handle)
    assert box is not None
    return str(box.name.removeprefix("penstock-"))


def image_with(name: str, passwd: tarfile.TarInfo | str, group: str = "") -> str:
    """An image of TINY with account files."""
    with tarfile.open(fileobj=(whole := io.BytesIO()), mode="w") as archive:
        if isinstance(passwd, tarfile.TarInfo):
            archive.addfile(passwd)
        for path, text in (("etc/passwd", passwd), ("etc/group", group)):
            if isinstance(text, str):
                member = tarfile.TarInfo(path)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    api = dockerd.engine().api
    made = api.create_container(dockerd.TINY, ["-"])["Id"]
    api.put_archive(made, "/", whole.getvalue())
    api.commit(made, f"penstock-test/{name}", "1")
    api.remove_container(made)
    return f"penstock-test/{name}:1"


@pytest.mark.requirement("R54", "R55")
async def test_a_companion_has_the_ids_of_its_user_and_never_roots_unasked(tmp_path: Path) -> None:
    """The engine takes an id of 2^32, and one with a vertical tab, for 0."""
    accounts = "db:x:999:998::/:\nbig:x:4294967296:5::/:\nodd:x:1000\x0b:5::/:\n"
    async with backend(tmp_path) as opened:
        image = await asyncio.to_thread(image_with, "accounts", accounts, "db:x:998:\ncerts:x:101:db\n")
        listed = "busybox id -u; busybox id -g; busybox id -G; exec sleep 1000"
        seen = "test \"$(busybox id -u) $(busybox id -G)\" = '999 998 101'"
        check = HealthCheck(("/bin/busybox", "sh", "-c", seen), 0.1, 5.0, 3)
        handle = await create(opened, companions=(shell("x", listed, image=image, user="db", health_check=check),))
        await handle.destroy()
        for user in ("big", "odd"):
            with pytest.raises(InvalidArgument) as refused:
                await create(opened, companions=(shell("x", listed, image=image, user=user),))
            assert refused.value.reason == "USER_UNKNOWN"


@pytest.mark.requirement("R49", "R50", "R54")
async def test_no_pipe_in_place_of_the_accounts_keeps_the_engine_waiting(tmp_path: Path) -> None:
    """Such a container can neither be started nor removed: of an image, and of a snapshot whose setup made it."""
    pipe = tarfile.TarInfo("etc/passwd")
    pipe.type = tarfile.FIFOTYPE
    async with backend(tmp_path, allow_root=True) as opened:
        image = await asyncio.to_thread(image_with, "pipe", pipe)
        for spec in ({"companions": (shell("x", "true", image=image),)}, {"image": image, "user": "1000"}):
            with pytest.raises(FailedPrecondition) as refused:
                await create(opened, **spec)
            assert "/etc/passwd is not a plain file" in refused.value.message
        prepared = await create(opened, user="root", to_be_sealed=True)
        assert await run(prepared, "sh", "-c", "rm /etc/group && mkfifo /etc/group") == (0, "")
        with pytest.raises(FailedPrecondition) as refused:
            await opened.seal(prepared, "ss-pipe")
        assert refused.value.reason == "IMAGE_UNUSABLE" and "/etc/group" in refused.value.message


PROBE = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno(), "") if libc.syscall(*arguments) < 0 else "done"
def open_socket(family):
    try:
        return socket.socket(family, socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW).close() or "done"
    except OSError as error:
        return errno.errorcode[error.errno]
numbers = %r
seen = {name: call(number, *[ctypes.c_long(one) for one in arguments]) for name, number, arguments in numbers}
seen |= {f"family {family}": open_socket(family) for family in (1, 2, 10, 16, 17, 38, 40, 44)}
"""
# On x86-64 and arm64, with arguments that do nothing where a call is allowed.
CALLS = [
    ("io_setup", (206, 0), (0, 0)), ("io_uring_setup", (425, 425), (0, 0)), ("clone3", (435, 435), (0, 0)),
    ("add_key", (248, 217), (0, 0, 0, 0, 0)), ("keyctl", (250, 219), (0, -3, 1)), ("bpf", (321, 280), (-1, 0, 0)),
    ("userfaultfd", (323, 282), (-1,)), ("unshare", (272, 97), (0x10000000,)), ("mount", (165, 40), (0, 0, 0, 0, 0)),
    ("open_tree", (428, 428), (-1, 0, 0)), ("kcmp", (312, 272), (0, 0, 0, 0, 0)), ("setns", (308, 268), (-1, 0)),
    ("clone", (56, 220), (0x10000000, 0, 0, 0, 0)), ("fanotify_init", (300, 262), (0, 0)),
]  # fmt: skip
SHOW = """
class Shown(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(seen).encode())
http.server.HTTPServer(("127.0.0.1", 8080), Shown).serve_forever()
"""
TAKES_OVER = """
import http.server, json
seen = {}
for path in ("/etc/hosts", "/etc/resolv.conf", "/etc/hostname"):
    try:
        open(path, "w").write("127.0.0.9 judge.example")
        seen[path] = "written"
    except OSError as error:
        seen[path] = error.strerror
"""


@pytest.mark.requirement("R13", "R55")
async def test_a_companions_system_calls_are_those_of_a_sandbox(tmp_path: Path) -> None:
    """Neither vsock, which no namespace keeps apart, nor what the kernel counts for the whole machine."""
    at = 0 if platform.machine() == "x86_64" else 1
    probe = PROBE % [(name, numbers[at], arguments) for name, numbers, arguments in CALLS]
    server = ("python3", "-c", f"import http.server\n{probe}\n{SHOW}")
    check = HealthCheck(("python3", "-c", FETCH, "http://127.0.0.1:8080/"), 0.2, 20.0, 3)
    companion = Companion("x", dockerd.BASE, entrypoint=server, user="65534", health_check=check)
    async with backend(tmp_path) as opened:
        handle = await create(opened, companions=(companion,))
        _, beside = await run(handle, "python3", "-c", FETCH, "http://x:8080/")
        code, inside = await run(handle, "python3", "-c", f"{probe}\nprint(json.dumps(seen))")
        assert code == 0
        seen = json.loads(beside)
        assert seen == json.loads(inside)
        assert [name for name, result in seen.items() if result == "done"] == [
            f"family {one}" for one in (1, 2, 10, 16)
        ]
        await handle.destroy()


@pytest.mark.requirement("R55")
async def test_nobody_who_is_root_beside_a_companion_changes_a_name(tmp_path: Path) -> None:
    """Neither in the hosts file, which all containers of a sandbox share, nor as the name server of the sandbox."""
    server = ("python3", "-c", f"{TAKES_OVER}\n{SHOW}")
    check = HealthCheck(("python3", "-c", FETCH, "http://127.0.0.1:8080/"), 0.2, 20.0, 3)
    companion = Companion("x", dockerd.BASE, entrypoint=server, user="root", health_check=check)
    async with backend(tmp_path, allow_root=True) as opened:
        handle_id = f"sb-{secrets.token_hex(16)}"
        spec = SandboxSpec(companions=(companion,), user="root")
        handle = await opened.create(handle_id, spec, (), lambda _: None)
        _, text = await run(handle, "python3", "-c", FETCH, "http://x:8080/")
        assert set(json.loads(text).values()) == {"Read-only file system"}
        joins = SandboxSpec(joins=handle_id, user="root")
        joined = await opened.create(f"sb-{secrets.token_hex(16)}", joins, (), lambda _: None)
        for beside in (handle, joined):
            _, text = await run(beside, "python3", "-c", f"{TAKES_OVER}\nprint(json.dumps(seen))")
            assert set(json.loads(text).values()) == {"Read-only file system"}
        await joined.destroy()
        assert await run(handle, "getent", "hosts", "x") == (0, "127.0.0.1       x\n")
        _, text = await run(handle, "cat", "/etc/resolv.conf")
        (server_line,) = [line for line in text.splitlines() if line.startswith("nameserver")]
        assert not server_line.startswith("nameserver 127.")
        await handle.destroy()


@pytest.mark.requirement("R49", "R50")
async def test_no_pipe_that_a_companion_makes_keeps_the_engine_waiting(tmp_path: Path) -> None:
    """A health check that looks for its user in a pipe would never begin, and hold the container."""
    program = "busybox mv /etc /moved; busybox rm -f /etc/passwd; busybox mkfifo /etc/passwd && exec sleep 1000; exit 3"
    waits = HealthCheck(("/bin/busybox", "false"), 0.1, 1.0, 5)
    async with backend(tmp_path, allow_root=True) as opened:
        with pytest.raises(FailedPrecondition) as failed:
            await create(opened, companions=(shell("x", program, user="root", health_check=waits),))
        assert failed.value.reason == "COMPANION_FAILED" and "exit code 3" in failed.value.message


@pytest.mark.requirement("R49", "R90")
@pytest.mark.parametrize("reach", REACHES)
async def test_a_sandbox_joins_the_companions_of_another_and_ends_with_it(tmp_path: Path, reach: str) -> None:
    """It reaches them as they are, by their names, and has nothing else of the other: no file, no process."""
    async with backend(tmp_path, reach) as opened:
        other_id = f"sb-{secrets.token_hex(16)}"
        other = await opened.create(other_id, SandboxSpec(companions=(web(),)), (), lambda _: None)
        change = "echo changed > /dev/shm/www/index.html"
        await asyncio.to_thread(_in_companion, container_name(other_id, "web"), change)
        assert (await run(other, "sh", "-c", "touch mine; sleep 1000 >/dev/null 2>&1 &"))[0] == 0
        lost = asyncio.get_running_loop().create_future()
        joined = await opened.create(f"sb-{secrets.token_hex(16)}", SandboxSpec(joins=other_id), (), lost.set_result)
        assert await run(joined, "python3", "-c", FETCH, "http://web:8080/") == (0, "changed\n")
        code, text = await run(joined, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls; cat /proc/net/dev")
        assert code == 0 and not {"1000", "httpd", "mine", "eth0:"} & set(text.split()), text
        await other.destroy()
        assert await lost == "SANDBOX_VANISHED"
        await joined.destroy()
        with pytest.raises(FailedPrecondition) as refused:
            await create(opened, joins=other_id)
        assert refused.value.reason == "SANDBOX_LOST"


def _in_companion(name: str, program: str) -> None:
    api = dockerd.engine().api
    api.exec_start(api.exec_create(name, ["/bin/sh", "-c", program])["Id"])
