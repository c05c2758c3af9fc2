"""Sandboxes that an attendant serves, over pipes that break at any moment, and with an agent that wishes it ill."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import random
import secrets
import signal
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.sandbox.attendants import Attended, Cuts, Heard, TwoWays, beside
from tests.support.waiting import eventually, eventually_async

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from penstock_sandbox.backends.guest_client import program
from penstock_sandbox.backends.guest_client.pipe import Armoured, Opener, Pipe, StreamPipe
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.domain.model import Command, NetworkKind, NetworkPolicy, PtySize, SandboxSpec
from penstock_sandbox.domain.model import Stream as Output
from penstock_sandbox.guest import frames
from penstock_sandbox.processes import manager
from penstock_sandbox.processes.manager import Processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTENT = random.Random(1).randbytes(3_000_000)
"""More than any window."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[LocalBackend]:
    """Where the sandboxes come from."""
    with tempfile.TemporaryDirectory(prefix="penstock-attended-") as folder:
        Path(folder).chmod(0o755)
        backend = LocalBackend(LocalOptions(Path(folder) / "local"))
        await backend.open()
        assert backend.available, backend.unavailable_reason
        yield backend
        await backend.aclose()


@pytest.fixture(scope="module")
def folder() -> str:
    """A short path: a socket's name has 108 bytes."""
    return tempfile.mkdtemp(prefix="penstock-at-")


async def write(sandbox: GuestSandbox, path: str, content: bytes) -> None:
    async with sandbox.open_write(path, 0o644) as writer:
        for start in range(0, len(content), 256 * 1024):
            await writer.write(content[start : start + 256 * 1024])
        await writer.commit()


async def write_at_once(sandbox: GuestSandbox, path: str, content: bytes) -> None:
    async with sandbox.open_write(path, 0o644) as writer:
        await writer.write(content)
        await writer.commit()


async def read(sandbox: GuestSandbox, path: str) -> bytes:
    content = bytearray()
    async with sandbox.open_read(path, follow_symlink=False) as (_, reader):
        while data := await reader.read(len(content), 256 * 1024):
            content += data
    return bytes(content)


# Pipes that break ----------------------------------------------------------------------------------------------------


def cutting(*amounts: int | None) -> tuple[list[Cuts], object]:
    made: list[Cuts] = []

    def wrap(opener: Opener, _: Path) -> Opener:
        made.append(Cuts(opener, amounts))
        return made[0]

    return made, wrap


AMOUNTS = [3000, 1, 1017, 18, 700_000, 70_001, 17, 300_000, 1_000_003]


@pytest.mark.requirement("R26")
async def test_output_comes_whole_over_pipes_that_break_anywhere(local: LocalBackend, folder: str) -> None:
    """A cut pipe loses and doubles nothing."""
    cuts, wrap = cutting(*AMOUNTS, None)
    async with beside(local, Path(folder), wrap) as one:  # type: ignore[arg-type]
        await one.sandbox.open()
        _, heard = await one.start("/bin/sh", "-c", "seq 400000; seq 1000 >&2; exit 7")
        assert (await heard.end()).code == 7
        assert heard.out == b"".join(b"%d\n" % number for number in range(1, 400_001))
        assert len(cuts[0].pipes) > 5
        assert not one.lost


@pytest.mark.requirement("R44")
async def test_files_go_in_and_come_out_whole_over_pipes_that_break_anywhere(local: LocalBackend, folder: str) -> None:
    cuts, wrap = cutting(*AMOUNTS, *AMOUNTS, None)
    async with beside(local, Path(folder), wrap) as one:  # type: ignore[arg-type]
        await one.sandbox.open()
        await write(one.sandbox, "/workspace/file", CONTENT)
        assert (await one.out("sha256sum file")).split()[0] == hashlib.sha256(CONTENT).hexdigest()
        assert await read(one.sandbox, "/workspace/file") == CONTENT
        assert await one.out("ls -A") == "file"
        assert len(cuts[0].pipes) > 10


@pytest.mark.requirement("R26", "R67")
async def test_input_arrives_once_and_in_order_over_pipes_that_break(local: LocalBackend, folder: str) -> None:
    _, wrap = cutting(*AMOUNTS, None)
    async with beside(local, Path(folder), wrap) as one:  # type: ignore[arg-type]
        await one.sandbox.open()
        handle, heard = await one.start("/usr/bin/sha256sum", stdin=True)
        await handle.write_stdin(CONTENT)
        await handle.close_stdin()
        await heard.end()
        assert heard.out.split()[0].decode() == hashlib.sha256(CONTENT).hexdigest()


CALL = """
import socket, sys, hashlib
s = socket.create_connection(("127.0.0.1", 4000))
s.sendall(b"q" * 1500000)
s.shutdown(socket.SHUT_WR)
h = hashlib.sha256()
while d := s.recv(65536):
    h.update(d)
print(h.hexdigest())
"""


@pytest.mark.requirement("R26", "R34")
async def test_a_model_call_does_not_notice_that_the_pipe_under_it_breaks(local: LocalBackend, folder: str) -> None:
    """The agent sees one call, the upstream too."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(-1))
        writer.write(CONTENT)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        upstream = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        cuts, wrap = cutting(*AMOUNTS, *AMOUNTS, None)
        async with beside(local, Path(folder), wrap) as one:  # type: ignore[arg-type]
            await one.sandbox.open(NetworkPolicy(NetworkKind.ONE_ENDPOINT, 4000, upstream))
            assert await one.out(f"python3 -c '{CALL}'") == hashlib.sha256(CONTENT).hexdigest()
            assert [len(question) for question in asked] == [1_500_000]
            assert len(cuts[0].pipes) > 10


@pytest.mark.requirement("R26")
async def test_a_process_runs_on_while_nobody_is_attached(local: LocalBackend, folder: str) -> None:
    """A broken stream loses neither a process nor a byte."""
    cuts, wrap = cutting(None)
    async with beside(local, Path(folder), wrap) as one:  # type: ignore[arg-type]
        await one.sandbox.open()
        handle, heard = await one.start("/bin/bash", "-c", "echo one; read x; echo $x; exit 3", stdin=True)
        await heard.until(lambda: heard.out == b"one\n")
        await cuts[0].cut()
        await handle.write_stdin(b"two\n")
        assert (await heard.end()).code == 3
        assert heard.out == b"one\ntwo\n"
        assert len(cuts[0].pipes) == 2


@pytest.mark.requirement("R26")
async def test_a_channel_of_single_deliveries_is_a_pipe_too(local: LocalBackend, folder: str) -> None:
    """``put`` and ``attach --output-only``, as where input cannot be streamed."""
    opened: list[TwoWays] = []

    def wrap(_: Opener, socket: Path) -> Opener:
        async def both() -> Pipe:
            opened.append(await TwoWays.open([f"{folder}/attendant.py", "--socket", str(socket)]))
            return Armoured(opened[-1])

        return both

    async with beside(local, Path(folder), wrap) as one:
        await one.sandbox.open()
        await write(one.sandbox, "/workspace/small", b"content")
        assert opened[0].puts <= 3, "a small file is one delivery"
        assert await one.out("cat small") == "content"
        await write(one.sandbox, "/workspace/file", CONTENT)
        assert await read(one.sandbox, "/workspace/file") == CONTENT
        assert len(opened) == 1


@pytest.mark.requirement("R53")
async def test_guest_within_the_sandbox_is_reached_by_a_program_run_in_it(local: LocalBackend) -> None:
    """All that a backend needs is to run programs."""
    backing = await local.create("within", SandboxSpec(), (), lambda _: None)
    assert isinstance(backing, LocalSandbox)
    async with backing.open_write("/home/agent/attendant.py", 0o644) as writer:
        await writer.write(program.text().encode())
        await writer.commit()
    command = ["python3", "/home/agent/attendant.py"]
    socket = ["--socket", "/home/agent/.attendant/socket"]

    async def run(*argv: str, stdin: bool = False) -> tuple[object, Heard]:
        heard = Heard()
        return await backing.start(argv, backing.default_env, backing.workdir, heard, stdin=stdin, pty=None), heard

    _, serving = await run(*command, "serve", *socket, "--confine")
    assert (await serving.end()).code == 0, serving.outputs

    async def attach() -> Pipe:
        handle, heard = await run(*command, "attach", *socket, "--armour", stdin=True)
        return Armoured(_Run(handle, heard))

    lost: list[str] = []
    sandbox = GuestSandbox(
        "within",
        attach,
        ProcessDefaults(backing.home, backing.workdir, backing.user, backing.default_env),
        BackendHooks(lost.append, backing.destroy),
    )
    greeting = await sandbox.open()
    assert greeting.pty and not greeting.user_switch
    one = Attended(sandbox, backing, Path())
    await write(sandbox, "/workspace/file", CONTENT)
    assert (await one.out("sha256sum < file")).split()[0] == hashlib.sha256(CONTENT).hexdigest()
    handle, heard = await one.start("/bin/bash", "-c", "(setsid sleep 4931 &); echo up; sleep 4932")
    await heard.until(lambda: heard.out == b"up\n")
    await handle.kill()
    assert await one.out("pgrep -c sleep || true") == "0"
    handle, heard = await one.start("/bin/bash", "-c", "stty size; read x; stty size", pty=PtySize(11, 22))
    await heard.until(lambda: b"11 22" in heard.out)
    await handle.resize(PtySize(33, 44))
    await handle.write_stdin(b"\n")
    await heard.end()
    assert b"33 44" in heard.out
    await sandbox.destroy()
    assert not lost


class _Run:
    """A pipe over a process of the sandbox that is reached in another way."""

    def __init__(self, handle: object, heard: Heard) -> None:
        self._handle = handle
        self._heard = heard

    async def send(self, data: bytes) -> None:
        await self._handle.write_stdin(data)  # type: ignore[attr-defined]

    async def received(self) -> AsyncIterator[bytes]:
        while not (self._heard.was_lost or self._heard.exit):
            await self._heard.until(lambda: bool(self._heard.out) or self._heard.was_lost)
            data = self._heard.out
            self._heard.outputs[Output.STDOUT].clear()
            yield data

    async def aclose(self) -> None:
        return


@pytest.mark.requirement("R44")
async def test_unwritable_content_is_refused_whatever_its_size(local: LocalBackend, folder: str) -> None:
    """Bytes that were sent ahead of a refusal are waited for by nobody."""
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        for content in (b"", CONTENT):
            with pytest.raises(PermissionDenied):
                await write_at_once(one.sandbox, "/usr/file", content)
        await one.out("mkdir taken")
        with pytest.raises(FailedPrecondition):
            await write_at_once(one.sandbox, "/workspace/taken", CONTENT)
        with tempfile.TemporaryFile() as archive:
            archive.write(CONTENT)
            archive.flush()
            with pytest.raises(InvalidArgument):
                await one.sandbox.write_tree("/workspace/tree", archive.fileno())


MANY_ENTRIES = 10_000
"""Of an archive: unpacking them takes much longer than a cancellation, unless this process has to wait for its turn."""


@pytest.mark.requirement("R44")
async def test_a_cancelled_write_of_a_tree_stops_unpacking(
    local: LocalBackend, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for by nobody any more does not go on beside the next request."""
    replies: list[asyncio.Future[frames.Message]] = []

    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        link = one.sandbox._link
        ask = link.ask

        def overheard(op: str, **fields: object) -> asyncio.Future[frames.Message]:
            reply = ask(op, **fields)
            if op != "write_tree":
                return reply
            replies.append(reply)
            # The cancelled caller no longer hears the reply, but this test does.
            return asyncio.shield(reply)

        monkeypatch.setattr(link, "ask", overheard)
        for entries in (MANY_ENTRIES << doubled for doubled in range(5)):
            tree = f"/workspace/tree-of-{entries}"
            with tempfile.TemporaryFile() as archive:
                _pack(archive.fileno(), entries)
                writing = asyncio.create_task(one.sandbox.write_tree(tree, archive.fileno()))

                async def begun(tree: str = tree) -> bool:
                    try:
                        await one.sandbox.stat(f"{tree}/0")
                    except NotFound:
                        return False
                    return True

                await eventually_async(begun, "the first file is unpacked")
                writing.cancel()
                await asyncio.wait([writing])
            if not writing.cancelled():
                assert writing.result() == (entries, 0)
            elif (await replies[-1]).get("errno") == errno.EINTR:
                break
            # All of it was unpacked before the cancellation was heard.
        else:
            raise AssertionError("no unpacking was stopped")
        with pytest.raises(NotFound):
            await one.sandbox.stat(f"{tree}/{entries - 1}")
        with tempfile.TemporaryFile() as archive:
            _pack(archive.fileno(), 3)
            assert await one.sandbox.write_tree("/workspace/next", archive.fileno()) == (3, 0)
        assert await one.out("ls next") == "0\n1\n2"


def _pack(archive: int, entries: int) -> None:
    """Writes a tar of empty files, named by number."""
    with os.fdopen(os.dup(archive), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(entries):
            tar.addfile(tarfile.TarInfo(str(number)), io.BytesIO())


# Kills of everything -------------------------------------------------------------------------------------------------


LEAVES = "setsid sleep %d >/dev/null 2>&1 & until grep -qx sleep /proc/$!/comm; do :; done"


@pytest.mark.requirement("R40", "R60")
async def test_kill_of_everything_reaches_what_forgotten_processes_left(
    local: LocalBackend, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service keeps the latest processes only; what an older one left running is killed all the same."""
    monkeypatch.setattr(manager, "_KEPT", 1)
    monkeypatch.setattr(manager, "_BATCH", 1)
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        processes = Processes(one.sandbox, {}, tmp_path)
        await processes.run(Command(shell=LEAVES % 4961), b"", 1000, "oldest")
        for _ in range(4):
            await processes.run(Command(argv=("/bin/true",)), b"", 1000)
        assert "oldest" not in [process.spec.id for process in processes.all()]
        assert await one.out("pgrep -c sleep") == "1"
        last = await processes.run(Command(argv=("/bin/true",)), b"", 1000, kill_all_after=True)
        assert last.exit.all_killed
        assert await one.out("pgrep -c sleep || true") == "0"
        assert not one.lost


@pytest.mark.requirement("R60", "R80")
@pytest.mark.parametrize("forgotten", ["before", "after"])
async def test_kill_of_everything_does_not_claim_a_tree_whose_supervisor_was_killed(
    local: LocalBackend, folder: str, forgotten: str
) -> None:
    """Its leftovers are nobody's any more, so the sandbox ends, whether the process was forgotten by then or not."""
    # No other run on this machine sleeps as long: only this one's supervisor is killed.
    seconds = 10**6 + secrets.randbelow(10**9)
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        handle, heard = await one.start("/bin/bash", "-c", LEAVES % seconds)
        await heard.end()
        if forgotten == "before":
            await handle.aclose()
        os.kill(_parent_of(b"sleep\0%d\0" % seconds), signal.SIGKILL)
        if forgotten == "after":
            await handle.aclose()
        assert await one.sandbox.kill_everything()
        assert one.lost == ["TREE_SURVIVED"]


def _parent_of(command_line: bytes) -> int:
    """The parent, in this process's namespace, of the only process with a command line."""
    (found,) = [entry for entry in Path("/proc").iterdir() if _command_line(entry) == command_line]
    return int((found / "stat").read_bytes().rpartition(b")")[2].split()[1])


def _command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""  # no process, or it ended meanwhile


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R43")
async def test_dead_guest_loses_its_sandbox_at_once(local: LocalBackend, folder: str) -> None:
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        _, heard = await one.start("/bin/sleep", "4941")
        os.kill(_listener(one.socket), signal.SIGKILL)
        await heard.until(lambda: heard.was_lost)
        assert one.lost == ["ATTENDANT_KILLED"]
        with pytest.raises(FailedPrecondition) as caught:
            await one.out("true")
        assert caught.value.reason == "SANDBOX_LOST"
        await one.sandbox.destroy()
        assert one.lost == ["ATTENDANT_KILLED"], "told once"


@pytest.mark.requirement("R41", "R43")
async def test_unreachable_guest_is_given_up_after_a_while(local: LocalBackend, folder: str) -> None:
    reachable = [True]

    def wrap(opener: Opener, _: Path) -> Opener:
        async def sometimes() -> Pipe:
            if not reachable[0]:
                raise OSError("no route")
            return await opener()

        return Cuts(sometimes, [None])

    async with beside(local, Path(folder), wrap) as one:
        await one.sandbox.open()
        _, heard = await one.start("/bin/sleep", "4942")
        one.sandbox._link._lost_after_s = 0.3  # not before: opening has the same limit
        reachable[0] = False
        await one.sandbox._link._opener.cut()  # type: ignore[attr-defined]
        await heard.until(lambda: heard.was_lost)
        assert one.lost == ["ATTENDANT_UNREACHABLE"]


@pytest.mark.requirement("R43")
async def test_sandbox_gone_at_the_backend_is_lost_at_once(local: LocalBackend, folder: str) -> None:
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        _, heard = await one.start("/bin/sleep", "4943")
        starting = asyncio.create_task(one.out("sleep 4944"))
        await eventually(lambda: len(one.sandbox._processes) == 2, "the second process is on its way")
        one.sandbox.lose("PROVIDER_SAYS_SO")
        await heard.until(lambda: heard.was_lost)
        assert one.lost == ["PROVIDER_SAYS_SO"]
        with pytest.raises((FailedPrecondition, AssertionError)):
            await starting


@pytest.mark.requirement("R50")
async def test_another_service_finds_a_clean_table(local: LocalBackend, folder: str) -> None:
    """What ran for the one before is killed."""
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        _, heard = await one.start("/bin/bash", "-c", "(setsid sleep 4951 &); echo up; sleep 4952")
        await heard.until(lambda: heard.out == b"up\n")
        await one.sandbox._link.aclose()
        from penstock_sandbox.backends.guest_client.pipe import unix_socket

        lost: list[str] = []
        second = GuestSandbox(
            "second",
            unix_socket(str(one.socket)),
            ProcessDefaults(one.backing.home, one.backing.workdir, one.backing.user, one.backing.default_env),
            BackendHooks(lost.append, one.backing.destroy),
        )
        await second.open()
        gone = "for i in $(seq 1000); do pgrep sleep >/dev/null || exit 0; done; exit 1"
        await Attended(second, one.backing, one.socket).out(gone)
        await second.destroy()


def _listener(path: Path) -> int:
    """The process that listens at a Unix socket."""
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if str(path).encode() in line and name == "attendant":
            return int(entry.name)
    raise AssertionError("nobody listens")


# Hostile parties -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R14", "R40")
async def test_agent_cannot_find_signal_or_read_its_guest_and_supervisors(local: LocalBackend, folder: str) -> None:
    """The attendant is not in the agent's process namespace, and the supervisors are another user's."""
    probe = """
        for p in /proc/[0-9]*; do
          read -r name < $p/comm || continue
          case $name in
            attendant) echo "sees the attendant";;
            supervisor)
              found=yes
              kill -0 ${p#/proc/} 2>/dev/null && echo "may signal a supervisor"
              for secret in environ mem maps root/etc/passwd fd/0; do
                [ -r $p/$secret ] && head -c1 $p/$secret >/dev/null 2>&1 && echo "reads $secret"
              done;;
          esac
        done
        echo "supervisors: $found"
    """
    async with beside(local, Path(folder)) as one:
        greeting = await one.sandbox.open()
        said = (await one.out(probe)).splitlines()
        if greeting.user_switch:
            assert said == ["supervisors: yes"]
        else:
            # An ordinary user's supervisors are its own user's; tracing and reading them is closed all the same.
            assert set(said) <= {"supervisors: yes", "may signal a supervisor"}


@pytest.mark.requirement("R55")
async def test_processes_beside_which_nothing_stands_have_no_privilege(local: LocalBackend, folder: str) -> None:
    """What enters a sandbox from outside brings no right along."""
    async with beside(local, Path(folder)) as one:
        await one.sandbox.open()
        status = dict(
            line.split(":\t", 1) for line in (await one.out("cat /proc/self/status")).splitlines() if ":\t" in line
        )
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert status["NoNewPrivs"] == "1"
        assert (await one.out("id -u; id -G")).split() == ["1000", "1000"]
        assert await one.out("ls /proc/self/fd | wc -l") == "4", "three, and the listing's own"


@pytest.mark.requirement("R80")
async def test_peer_that_is_no_guest_is_given_up() -> None:
    """What comes from a sandbox is not trusted."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode(frames.READY, 0, 0, b'{"version":1,"instance":"x","attachment":7}'))

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def connect() -> Pipe:
        return StreamPipe(*await asyncio.open_connection("127.0.0.1", port))

    async def destroy() -> None:
        return

    async with server:
        sandbox = GuestSandbox(
            "lies",
            connect,
            ProcessDefaults("/", "/", "agent", {}),
            BackendHooks(lambda _: None, destroy),
        )
        with pytest.raises(LinkLost) as caught:
            await sandbox.open()
        assert caught.value.reason == "ATTENDANT_MISBEHAVED"
        await sandbox.destroy()
