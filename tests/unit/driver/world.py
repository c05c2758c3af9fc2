"""A small world for the driver's domain: sandboxes that are directories with real processes, and a gate that is HTTP.

These stand at the driver's own ports (`penstock_driver.domain.ports`), so that the real state machine starts the
real shell agent without the other services. Nothing here isolates anything; what isolation promises is tested with
the sandbox service. Every sandbox and process is counted, so that a test can assert that nothing was left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from tests.support.waiting import eventually

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.auth import acts_in
from penstock_chassis.errors import FailedPrecondition, NotFound, PenstockError
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.agents.specs import Dialect, Toolbox
from penstock_driver.domain.ports import (
    BackendFacts,
    CallEnded,
    Command,
    CommandReport,
    CommandResult,
    Exit,
    ExitReason,
    GateClosing,
    GateOpening,
    ModelRequest,
    OpenRequest,
    Output,
    PathKind,
    PreparedSnapshot,
    PreparedToolbox,
    ResultContent,
    SandboxFacts,
    SandboxTerms,
    SnapshotSpec,
    SnapshotStep,
)


@dataclass
class Box:
    """One sandbox: a directory and its processes."""

    root: Path
    labels: Mapping[str, str]
    processes: dict[str, tuple[asyncio.subprocess.Process, asyncio.Task[Exit], list[Output | None]]] = field(
        default_factory=dict
    )
    ran: dict[str, int] = field(default_factory=dict)
    """Process ids of what `run` ran."""
    killed: set[str] = field(default_factory=set)
    """Processes that were killed while they ran, as the sandbox service tells it."""
    kill_all_after: set[str] = field(default_factory=set)
    """Processes whose end is to be that of all others."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    scratch: list[Path] = field(default_factory=list)
    """Directories for rewards, which are the machine's /tmp here: a box is no sandbox."""

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def workdir(self) -> Path:
        return self.root / "workspace"


class Directories:
    """`ports.Sandboxes` on plain directories. `fail` maps a method's name to what its next calls
    raise, None being success; `holds` what is set when a call of a method has come, which then never ends."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, Path] = {}
        self.wanted: list[SnapshotSpec] = []
        self.looked_at: list[SandboxTerms] = []
        """The terms of each sandbox that is no fork."""
        self.calls: list[str] = []
        self.repeatable: list[bool] = []
        self.allowlists: list[sandbox_pb2.Allowlist | None] = []
        """Of each fork, whether it was to be repeatable."""
        self.joined: list[str] = []
        """Of each fork, the sandbox that it joined."""
        self.fail: dict[str, list[PenstockError | None]] = {}
        self.holds: dict[str, asyncio.Event] = {}
        self.installation: list[str] = []
        self.facts = BackendFacts("local", True, "", True, True, True, False, True, True, True, egress_hosts=("*",))
        self.lost: set[str] = set()
        self.freezes = True
        self.frozen: set[str] = set()
        self.kills_after = False
        """Whether it does what `kill_all_after` and `result_file` ask for, which an earlier version ignores."""
        self.takes_files = False
        """Whether `start` and `run` write files, which an earlier version ignores."""
        self.from_within = False
        """Whether what is lost was ended from within."""

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if reached := self.holds.get(name):
            reached.set()
            await asyncio.get_running_loop().create_future()
        if self.fail.get(name) and (error := self.fail[name].pop(0)):
            raise error

    def _new(self, labels: Mapping[str, str]) -> tuple[str, Box]:
        sandbox_id = f"s{len(self.calls)}-{os.urandom(4).hex()}"
        box = Box(self.base / sandbox_id, labels)
        box.home.mkdir(parents=True)
        box.workdir.mkdir()
        self.boxes[sandbox_id] = box
        return sandbox_id, box

    async def backends(self) -> Sequence[BackendFacts]:
        await self._called("backends")
        return [self.facts]

    async def prepare_toolbox(
        self, name: str, toolbox: Toolbox, backend: str, tell: Callable[[str], None]
    ) -> PreparedToolbox:
        for line in self.installation:
            tell(line)
        await self._called("prepare_toolbox")
        root = self.base / f"toolbox-{name}"
        for file in toolbox.files:
            path = root / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(0o755)
        return PreparedToolbox(f"t-{name}", str(root))

    async def prepare_snapshot(self, spec: SnapshotSpec) -> AsyncIterator[SnapshotStep]:
        await self._called("prepare_snapshot")
        self.wanted.append(spec)
        sandbox_id, box = self._new({})
        try:
            await self.write_files(sandbox_id, spec.files)
            for index, command in enumerate(spec.setup):
                result = await self.run(sandbox_id, f"setup-{index}", command, 1 << 20)
                yield CommandReport(index, result)
                if not result.exit.ok:
                    raise FailedPrecondition("setup failed", reason="SETUP_FAILED")
        finally:
            del self.boxes[sandbox_id]
        snapshot_id = f"n-{len(self.snapshots)}"
        self.snapshots[snapshot_id] = box.root
        yield PreparedSnapshot(snapshot_id, sandbox_pb2.FORK_KIND_FILESYSTEM)

    async def create(self, terms: SandboxTerms, lease_s: float, labels: Mapping[str, str]) -> SandboxFacts:
        await self._called("create")
        self.looked_at.append(terms)
        sandbox_id, box = self._new(labels)
        return SandboxFacts(sandbox_id, str(box.home), str(box.workdir), takes_files=self.takes_files)

    async def fork(
        self,
        snapshot_id: str,
        *,
        request_id: str,
        port: int,
        upstream: str,
        lease_s: float,
        labels: Mapping[str, str],
        repeatable: bool = False,
        allowlist: sandbox_pb2.Allowlist | None = None,
        joins: str = "",
    ) -> SandboxFacts:
        await self._called("fork")
        self.repeatable.append(repeatable)
        self.allowlists.append(allowlist)
        self.joined.append(joins)
        if snapshot_id not in self.snapshots:
            raise NotFound("no such snapshot", reason="SNAPSHOT_UNKNOWN")
        sandbox_id, box = self._new(labels)
        shutil.copytree(self.snapshots[snapshot_id], box.root, dirs_exist_ok=True, symlinks=True)
        return SandboxFacts(sandbox_id, str(box.home), str(box.workdir), takes_files=self.takes_files)

    def _path(self, sandbox_id: str, path: str) -> Path:
        return self.boxes[sandbox_id].workdir / path

    async def write_files(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        await self._called("write_files")
        self._write(sandbox_id, files)

    def _bring(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        if self.takes_files:
            self._write(sandbox_id, files)

    def _write(self, sandbox_id: str, files: Sequence[FileToWrite]) -> None:
        for file in files:
            path = self._path(sandbox_id, file.path)
            if path.parent.name.startswith("penstock-"):
                self.boxes[sandbox_id].scratch.append(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(file.mode)

    async def put_layer(self, sandbox_id: str, path: str, tar: BinaryIO) -> None:
        await self._called("put_layer")
        try:
            self._make_directory(Path(path))
            with tarfile.open(fileobj=tar, mode="r:") as layer:
                for member in layer:
                    self._unpack(Path(path), layer, member)
        except OSError as error:
            raise FailedPrecondition(str(error), reason="PUT_FAILED") from error

    def _make_directory(self, path: Path) -> None:
        """Make a directory and its parents; in the boxes, whatever else is in the way goes, links too."""
        for part in (*reversed(path.parents), path):
            if self.base in part.parents and (part.is_symlink() or not part.is_dir()):
                _remove(part)
            part.mkdir(exist_ok=True)

    def _unpack(self, root: Path, layer: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Put one member over what is there."""
        path = root / member.name
        self._make_directory(path.parent)
        if path.name.startswith(".wh."):
            _remove(path.with_name(path.name.removeprefix(".wh.")))
            return
        if not (member.isdir() and path.is_dir() and not path.is_symlink()):
            _remove(path)
        if member.issym():
            path.symlink_to(member.linkname)
            return
        if member.isdir():
            path.mkdir(exist_ok=True)
        else:
            content = layer.extractfile(member)
            assert content is not None, "a hard link, which no test here has"
            path.write_bytes(content.read())
        path.chmod(member.mode)

    async def read_tree(self, sandbox_id: str, path: str, sink: BinaryIO, max_bytes: int) -> None:
        await self._called("read_tree")
        with tarfile.open(fileobj=sink, mode="w") as archive:
            there = Path(path)
            if there.is_dir() and not there.is_symlink():
                for item in sorted(there.iterdir()):
                    archive.add(item, item.name)
            else:
                archive.add(there, there.name)

    async def diff(self, sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        """A path means another place in each box: what one changed cannot be brought to another."""
        await self._called("diff")
        raise FailedPrecondition("boxes have no diff", reason="CAPABILITY_MISSING")

    async def kind(self, sandbox_id: str, path: str) -> PathKind | None:
        await self._called("kind")
        return _kind(Path(path)) if os.path.lexists(path) else None

    async def entries(self, sandbox_id: str, path: str, most: int) -> Mapping[str, PathKind]:
        await self._called("entries")
        return {item.name: _kind(item) for item in Path(path).iterdir()}

    async def read_file(self, sandbox_id: str, path: str, max_bytes: int) -> tuple[bytes, int]:
        await self._called("read_file")
        there = self._path(sandbox_id, path)
        if there.is_symlink() or there.is_dir():
            raise FailedPrecondition("not a file", reason="NOT_A_FILE")
        if not there.exists():
            raise NotFound("no such file", reason="FILE_NOT_FOUND")
        return there.read_bytes()[:max_bytes], there.stat().st_size

    async def _spawn(self, box: Box, command: Command, stdin: int) -> asyncio.subprocess.Process:
        argv = command.argv or ("/bin/sh", "-c", command.shell)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(box.home), "SECRET_BASE": "",
        }  # fmt: skip
        return await asyncio.create_subprocess_exec(
            *argv, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=box.workdir / command.cwd, env={**environment, **command.env, **command.secret_env},
            start_new_session=True,
        )  # fmt: skip

    async def start(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        stdin: bytes | None,
        *,
        output_ends: tuple[int, int] | None = None,
        kill_all_after: bool = False,
        files: Sequence[FileToWrite] = (),
    ) -> None:
        await self._called("start")
        self._bring(sandbox_id, files)
        if sandbox_id not in self.boxes:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")
        box = self.boxes[sandbox_id]
        if process_id in box.processes:
            return
        if kill_all_after and self.kills_after:
            box.kill_all_after.add(process_id)
        pipe = asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL
        process = await self._spawn(box, command, pipe)
        items: list[Output | None] = []
        if stdin is not None and process.stdin:
            process.stdin.write(stdin)
            process.stdin.close()

        async def pump(stream: asyncio.StreamReader, is_stderr: bool) -> None:
            while data := await stream.read(65536):
                items.append(Output(data, is_stderr))
                box.news.set()

        async def see() -> Exit:
            assert process.stdout
            assert process.stderr
            timed_out = False
            try:
                async with asyncio.timeout(command.timeout_s):
                    await asyncio.gather(pump(process.stdout, False), pump(process.stderr, True), process.wait())
            except TimeoutError:
                timed_out = True
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            items.append(None)
            box.news.set()
            return _exit(process.returncode, timed_out=timed_out)

        box.processes[process_id] = (process, asyncio.ensure_future(see()), items)

    async def send_stdin(self, sandbox_id: str, process_id: str, stdin: bytes) -> None:
        """All of it was sent as the process was started."""
        await self._called("send_stdin")
        if process_id not in self.boxes[sandbox_id].processes:
            raise NotFound("no such process", reason="PROCESS_UNKNOWN")

    async def pause(self, sandbox_id: str, lease_s: float) -> bool:
        await self._called("pause")
        if sandbox_id not in self.boxes:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")
        if self.freezes:
            self.frozen.add(sandbox_id)
            self._signal(sandbox_id, signal.SIGSTOP)
        return self.freezes

    async def resume(self, sandbox_id: str, lease_s: float) -> None:
        await self._called("resume")
        if sandbox_id not in self.boxes:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")
        self.frozen.discard(sandbox_id)
        self._signal(sandbox_id, signal.SIGCONT)

    def _signal(self, sandbox_id: str, number: signal.Signals) -> None:
        for process, _, _ in self.boxes[sandbox_id].processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    async def rejoin(self, sandbox_id: str, lease_s: float) -> None:
        await self._called("rejoin")
        if sandbox_id not in self.boxes:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")

    async def renew(self, sandbox_id: str, lease_s: float) -> None:
        await self._called("renew")
        if sandbox_id not in self.boxes:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN")

    async def labelled(self, labels: Mapping[str, str]) -> Sequence[str]:
        await self._called("labelled")
        return [key for key, box in self.boxes.items() if labels.items() <= box.labels.items()]

    async def watch(self, sandbox_id: str, process_id: str) -> AsyncGenerator[Output | Exit, None]:
        await self._called("watch")
        box = self.boxes[sandbox_id]
        if process_id not in box.processes:
            raise NotFound("no such process", reason="PROCESS_UNKNOWN")
        _, task, items = box.processes[process_id]
        at = 0
        while True:
            box.news.clear()
            while at < len(items):
                item = items[at]
                at += 1
                if item is None:
                    end = Exit(ExitReason.SANDBOX_LOST) if sandbox_id in self.lost else await task
                    killed = end.reason is ExitReason.SIGNALED and process_id in box.killed
                    end = replace(end, reason=ExitReason.KILLED) if killed else end
                    if process_id in box.kill_all_after and end.reason is not ExitReason.SANDBOX_LOST:
                        self._kill_all(box)
                        end = replace(end, all_killed=True)
                    yield end
                    return
                yield item
            await box.news.wait()

    async def kill(self, sandbox_id: str, process_id: str, *, everything: bool = False) -> None:
        await self._called("kill")
        box = self.boxes[sandbox_id]
        if everything:
            self._kill_all(box)
        if process_id in box.ran:
            with suppress(ProcessLookupError):
                os.killpg(box.ran[process_id], signal.SIGKILL)
            await eventually(lambda: not _lives(box.ran[process_id]), "the end of what was killed")
            return
        process, task, _ = box.processes[process_id]
        if not task.done():
            box.killed.add(process_id)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([task])

    async def run(
        self,
        sandbox_id: str,
        process_id: str,
        command: Command,
        output_limit: int,
        *,
        kill_all_after: bool = False,
        result_file: tuple[str, int] | None = None,
        files: Sequence[FileToWrite] = (),
    ) -> CommandResult:
        await self._called("run")
        self._bring(sandbox_id, files)
        box = self.boxes[sandbox_id]
        try:
            process = await self._spawn(box, command, asyncio.subprocess.DEVNULL)
        except OSError as error:
            return CommandResult(Exit(ExitReason.START_FAILED, message=str(error)), b"", b"")
        box.ran[process_id] = process.pid
        try:
            async with asyncio.timeout(command.timeout_s):
                stdout, stderr = await process.communicate()
        except (TimeoutError, asyncio.CancelledError) as end:
            with suppress(ProcessLookupError):  # it may have ended at its limit
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if isinstance(end, asyncio.CancelledError):  # nobody asks for it any more, and its sandbox is deleted
                raise
            return CommandResult(Exit(ExitReason.TIMED_OUT), b"", b"")
        ended = CommandResult(_exit(process.returncode), stdout[:output_limit], stderr[:output_limit])
        if not (self.kills_after and kill_all_after):
            return ended
        self._kill_all(box)
        ended = replace(ended, exit=replace(ended.exit, all_killed=True))
        left = None if result_file is None else self._path(sandbox_id, result_file[0])
        if result_file is None or left is None or left.is_symlink() or not left.is_file():
            return ended
        return replace(ended, result_file=ResultContent(left.read_bytes()[: result_file[1]], left.stat().st_size))

    def _kill_all(self, box: Box) -> None:
        for group in [*box.ran.values(), *(process.pid for process, _, _ in box.processes.values())]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    async def delete(self, sandbox_id: str) -> None:
        await self._called("delete")
        box = self.boxes.pop(sandbox_id, None)
        if box is None:
            return
        for directory in box.scratch:
            shutil.rmtree(directory, ignore_errors=True)
        for process, task, _ in box.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([task])
        shutil.rmtree(box.root)

    async def ended_inside(self, sandbox_id: str) -> bool:
        await self._called("ended_inside")
        assert sandbox_id in self.boxes
        return self.from_within

    async def delete_labelled(self, labels: Mapping[str, str], *, beside: str = "") -> Sequence[str]:
        await self._called("delete_labelled")
        found = [key for key, box in self.boxes.items() if labels.items() <= box.labels.items()]
        for sandbox_id in found:
            await self.delete(sandbox_id)
        return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _kind(path: Path) -> PathKind:
    if path.is_symlink():
        return PathKind.SYMLINK
    return PathKind.DIRECTORY if path.is_dir() else PathKind.FILE if path.is_file() else PathKind.OTHER


def _exit(code: int | None, *, timed_out: bool = False) -> Exit:
    assert code is not None
    if timed_out:
        return Exit(ExitReason.TIMED_OUT, duration_s=1.0)
    return Exit(ExitReason.EXITED, code=code) if code >= 0 else Exit(ExitReason.SIGNALED, signal=-code)


def say(text: str) -> dict[str, Any]:
    """An assistant message without tool calls."""
    return {"role": "assistant", "content": text}


def bash(command: str) -> dict[str, Any]:
    """An assistant message that calls the bash tool."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


Script = Callable[[list[dict[str, Any]]], dict[str, Any] | int]
"""From a request's messages to the answer's message, or to an HTTP status without a body."""


class HttpGate:
    """`ports.Gate` with an HTTP endpoint that answers by a script.

    `hold` makes the calls that `holds` picks wait until it is set.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.opened: dict[str, OpenRequest] = {}
        self.held: set[str] = set()
        self.closed: dict[str, str] = {}
        self.closed_in: dict[str, set[str | None]] = {}
        """By rollout: the namespaces in which it was closed."""
        self.requested: list[str] = []
        self.deleted: list[str] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.called = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.holds: Callable[[dict[str, Any]], bool] = lambda body: True
        self.closing = GateClosing()
        self.judges: list[tuple[ModelRequest, dict[str, str]]] = []
        """Those that were opened, with what was closed by then."""
        self.judge_closed = False
        self.judging = GateClosing()
        """What became of a judge's calls."""
        self.users: list[ModelRequest] = []
        self.asked: list[dict[str, Any]] = []
        """What the user's model was asked, a repeat once."""
        self.user_reached: asyncio.Event | None = None
        """Set when the user's model is asked, which then never answers."""
        self.user: Callable[[dict[str, Any]], str] = lambda body: "[END]"
        self.host_tools: tuple[str, ...] = ()
        self.interruptions = 0
        self.call_ends: asyncio.Queue[CallEnded] = asyncio.Queue()
        self.missed: list[CallEnded] = []
        self.recorded: list[trajectory_pb2.Call] = []
        self.captured: dict[str, list[trajectory_pb2.Call]] = {}
        """What the gate has of rollouts, by their ids."""
        self.fail: dict[str, list[PenstockError]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()

    @property
    def port(self) -> int:
        assert self._server
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append((head[0].split(" ")[1], headers, body))
                self.called.set()
                if self.hold and self.holds(body):
                    await self.hold.wait()
                answer = self.script(body["messages"])
                status = answer if isinstance(answer, int) else 200
                data = b"" if isinstance(answer, int) else json.dumps({"choices": [{"message": answer}]}).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        writer.close()

    def _failing(self, name: str) -> None:
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    async def check(
        self,
        terms: rollout_gate_service_pb2.OpenRolloutRequest,
        *,
        rollout_id: str,
        group_id: str | None,
        labels: Mapping[str, str],
    ) -> Sequence[str]:
        self._failing("check")
        return self.host_tools

    async def open(self, spec: OpenRequest) -> GateOpening:
        self._failing("open")
        self.opened[spec.rollout_id] = spec
        self.requested.append(spec.request_id)
        paths = {Dialect.CHAT_COMPLETIONS: f"/rollout/{spec.rollout_id}/v1"}
        return GateOpening(
            f"127.0.0.1:{self.port}", paths, "sk-test '$(leak)", "tiny", self.host_tools, "/rollout/x/mcp"
        )

    async def open_judge(self, opening: ModelRequest) -> GateOpening | None:
        self._failing("open_judge")
        self.judges.append((opening, dict(self.closed)))
        if self.judge_closed:
            return None
        paths = {Dialect.CHAT_COMPLETIONS: "/rollout/judge/v1"}
        return GateOpening(f"127.0.0.1:{self.port}", paths, "sk-judge", "wise")

    async def open_user(self, opening: ModelRequest) -> GateOpening | None:
        self._failing("open_user")
        self.users.append(opening)
        return GateOpening("", {}, "sk-user", "person")

    async def ask_user(self, rollout_id: str, body: bytes, timeout_s: float) -> str:
        self._failing("ask_user")
        asked = json.loads(body)
        if asked not in self.asked:
            self.asked.append(asked)
        if self.user_reached is not None:
            self.user_reached.set()
            await asyncio.get_running_loop().create_future()
        return self.user(asked)

    async def answered(self, rollout_id: str) -> GateClosing:
        self._failing("answered")
        return self.judging

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        self._failing("close")
        self.closed.setdefault(rollout_id, reason)
        self.closed_in.setdefault(rollout_id, set()).add(acts_in())
        return self.closing

    async def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        while True:
            yield await self.call_ends.get()

    async def has(self, rollout_id: str) -> bool:
        return rollout_id in self.opened

    async def hold_calls(self, rollout_id: str, *, held: bool) -> None:
        self._failing("hold_calls")
        (self.held.add if held else self.held.discard)(rollout_id)

    async def ended_calls(self, rollout_id: str) -> Sequence[CallEnded]:
        return [ended for ended in self.missed if ended.rollout_id == rollout_id]

    async def delete(self, rollout_id: str) -> None:
        self.deleted.append(rollout_id)

    async def load_recording(self, part: rollout_gate_service_pb2.LoadRecordingRequest) -> int:
        self._failing("load_recording")
        self.recorded += part.calls
        return len(self.recorded)

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        raise NotImplementedError  # of drivers that export

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        return ()

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        return ()

    async def tool_results(self, rollout_id: str, *, gate: str) -> AsyncIterator[trajectory_pb2.HostToolCall]:
        if rollout_id not in self.captured:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        results: list[trajectory_pb2.HostToolCall] = []
        for call in results:
            yield call

    async def capture(
        self, rollout_id: str, *, gate: str = "", include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        if rollout_id not in self.captured:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        yield trajectory_pb2.Trajectory(calls=self.captured[rollout_id])


def _lives(group: int) -> bool:
    """Whether a process of the group still runs: a kill is over some time after the call."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
