"""One service for each variant, and one sandbox that is emptied before each test; a fresh one where a test needs it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.needs import narrowest
from tests.conformance.sandbox.services import SERVICES, Running, start
from tests.support.docker import dockerd

from penstock.sandbox.v1 import file_service_pb2 as fs
from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.channel import error_from_rpc, upload
from penstock_chassis.errors import PenstockError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that uses a service is run on each that is not on demand, or on those that `--backend` names."""
    if "service" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        names = metafunc.config.getoption("--backend") or [
            name for name in SERVICES if full or not SERVICES[name].on_demand
        ]
        unknown = [name for name in names if name not in SERVICES]
        if unknown:
            raise pytest.UsageError(f"--backend: there is no {', '.join(unknown)}; there are {', '.join(SERVICES)}")
        metafunc.parametrize("service", names, indirect=True, scope="package")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what a service leaves out; the run's end says which and why (`tests/conftest.py`)."""
    left_out = set[pytest.Item]()
    for item in items:
        call = getattr(item, "callspec", None)
        name = call.params.get("service") if call is not None else None
        named = bool(config.getoption("--backend")) or config.getoption("--full")
        if (
            isinstance(name, str)
            and name in SERVICES
            and not SERVICES[name].runs(getattr(item, "originalname", ""), named=named)
        ):
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """A running service, which ends with the suite and leaves nothing with an engine."""
    with dockerd.nothing_left():
        async with start(request.param) as running:
            yield running


@dataclass
class Box:
    """A sandbox, and short ways to use it."""

    service: Running
    sandbox: sb.Sandbox

    @property
    def id(self) -> str:
        return self.sandbox.sandbox_id

    async def run(
        self,
        *argv: str,
        shell: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        cwd: str = "",
        timeout_s: float | None = None,
        output_limit: int | None = None,
        kill_all_after: bool = False,
        result_file: str = "",
        files: Mapping[str, bytes] | None = None,
    ) -> ps.RunResult:
        """Run a small command."""
        request = ps.RunRequest(
            sandbox_id=self.id,
            command=command(*argv, shell=shell, env=env, secret_env=secret_env, cwd=cwd, timeout_s=timeout_s),
            stdin=stdin,
            output_limit_bytes=output_limit,
            kill_all_after=kill_all_after,
            files=[ps.InitialFile(path=path, content=content) for path, content in (files or {}).items()],
        )
        if result_file:
            request.result_file.path, request.result_file.max_bytes = result_file, 4
        return (await self.service.processes.Run(request, timeout=120)).result

    async def out(self, shell: str, **options: Any) -> str:
        """The output of a shell text that must succeed."""
        result = await self.run(shell=shell, **options)
        assert result.exit.reason == ps.EXIT_REASON_EXITED and result.exit.code == 0, result
        return result.stdout.decode().strip()

    async def start(self, process_id: str, *argv: str, shell: str | None = None, **options: Any) -> ps.Process:
        """Start a process."""
        names = ("stdin", "pty", "output_limit_bytes", "kill_all_after", "files")
        given = {key: options.pop(key) for key in names if key in options}
        request = ps.StartProcessRequest(
            sandbox_id=self.id, process_id=process_id, command=command(*argv, shell=shell, **options), **given
        )
        return (await self.service.processes.StartProcess(request, timeout=120)).process

    def watch(self, process_id: str, stdout: int = 0, stderr: int = 0) -> Any:
        """Watch a process."""
        request = ps.WatchProcessRequest(
            sandbox_id=self.id, process_id=process_id, stdout_offset=stdout, stderr_offset=stderr
        )
        return self.service.processes.WatchProcess(request, timeout=120)

    async def finish(self, process_id: str, stdout: int = 0, stderr: int = 0) -> tuple[bytes, bytes, ps.Exit]:
        """Everything that a process writes from the offsets on, and its exit."""
        outputs = {ps.OUTPUT_STREAM_STDOUT: bytearray(), ps.OUTPUT_STREAM_STDERR: bytearray()}
        offsets = {ps.OUTPUT_STREAM_STDOUT: stdout, ps.OUTPUT_STREAM_STDERR: stderr}
        ended: ps.Exit | None = None
        async for event in self.watch(process_id, stdout, stderr):
            assert ended is None, "nothing follows the exit"
            if event.HasField("chunk"):
                assert event.chunk.offset == offsets[event.chunk.stream] + len(outputs[event.chunk.stream])
                outputs[event.chunk.stream] += event.chunk.data
            elif event.HasField("exit"):
                ended = event.exit
        assert ended is not None
        return bytes(outputs[ps.OUTPUT_STREAM_STDOUT]), bytes(outputs[ps.OUTPUT_STREAM_STDERR]), ended

    async def kill(self, process_id: str) -> ps.Exit:
        """Kill a process's tree."""
        request = ps.KillProcessRequest(sandbox_id=self.id, process_id=process_id)
        return (await self.service.processes.KillProcess(request, timeout=120)).exit

    async def write_stdin(self, process_id: str, *frames: bytes | None, offset: int = 0) -> int:
        """Write frames to a process's input; None is the end."""

        async def requests() -> AsyncIterator[ps.WriteStdinRequest]:
            start = ps.WriteStdinRequest.StdinStart(sandbox_id=self.id, process_id=process_id, offset=offset)
            yield ps.WriteStdinRequest(start=start)
            for frame in frames:
                if frame is None:
                    yield ps.WriteStdinRequest(end=ps.WriteStdinRequest.StdinEnd())
                else:
                    yield ps.WriteStdinRequest(data=frame)

        answer = await upload(self.service.processes.WriteStdin, requests, timeout=120)
        return cast(int, answer.offset)

    async def write(
        self, path: str, content: bytes, mode: int | None = None, sha256: bytes = b"", end: bool = True
    ) -> fs.WriteFileResponse:
        """Write a file."""

        async def requests() -> AsyncIterator[fs.WriteFileRequest]:
            yield fs.WriteFileRequest(
                start=fs.WriteFileRequest.WriteFileStart(sandbox_id=self.id, path=path, mode=mode)
            )
            for begin in range(0, len(content), 256 * 1024):
                yield fs.WriteFileRequest(chunk=content[begin : begin + 256 * 1024])
            if end:
                yield fs.WriteFileRequest(end=fs.WriteFileRequest.WriteFileEnd(sha256=sha256))

        return cast(fs.WriteFileResponse, await upload(self.service.files.WriteFile, requests, timeout=120))

    async def read(self, path: str, **options: Any) -> tuple[bytes, bytes]:
        """A file's content and the digest that came with it."""
        content, digest = bytearray(), b""
        request = fs.ReadFileRequest(sandbox_id=self.id, path=path, **options)
        async for event in self.service.files.ReadFile(request, timeout=120):
            content += event.chunk
            digest = event.sha256
        return bytes(content), digest

    async def write_tree(self, path: str, archive: bytes, *, layer: bool = False) -> fs.WriteTreeResponse:
        """Unpack a tar."""

        async def requests() -> AsyncIterator[fs.WriteTreeRequest]:
            start = fs.WriteTreeRequest.WriteTreeStart(sandbox_id=self.id, path=path, layer=layer)
            yield fs.WriteTreeRequest(start=start)
            for begin in range(0, len(archive), 256 * 1024):
                yield fs.WriteTreeRequest(tar_chunk=archive[begin : begin + 256 * 1024])
            yield fs.WriteTreeRequest(end=fs.WriteTreeRequest.WriteTreeEnd())

        return cast(fs.WriteTreeResponse, await upload(self.service.files.WriteTree, requests, timeout=120))


def command(
    *argv: str,
    shell: str | None = None,
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, str] | None = None,
    cwd: str = "",
    timeout_s: float | None = None,
) -> ps.Command:
    """A command from its parts."""
    made = ps.Command(env=env, secret_env=secret_env, cwd=cwd)
    if shell is not None:
        made.shell = shell
    else:
        made.argv.args.extend(argv)
    if timeout_s is not None:
        made.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return made


def one_endpoint(upstream: str, port: int = 4000) -> sb.NetworkPolicy:
    """A policy with one way out."""
    return sb.NetworkPolicy(one_endpoint=sb.OneEndpoint(local_port=port, upstream=upstream))


async def failure(awaitable: Any) -> PenstockError:
    """The typed error of a call that must fail."""
    try:
        if hasattr(awaitable, "__aiter__"):
            async for _ in awaitable:
                pass
        else:
            await awaitable
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the call did not fail")


MakeBox = Callable[..., Any]
_EMPTY = "chmod -R u+rwX . && find . -mindepth 1 -delete"


@pytest_asyncio.fixture(loop_scope="session")
async def make_box(service: Running, capabilities: sb.Capabilities) -> AsyncIterator[MakeBox]:
    """Makes sandboxes: `await make_box(network=..., resources=..., ...)`; they are deleted after the test."""
    made: list[str] = []

    async def make(**spec: Any) -> Box:
        spec.setdefault("network", narrowest(capabilities))
        request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
        sandbox = (await service.sandboxes.CreateSandbox(request, timeout=180)).sandbox
        made.append(sandbox.sandbox_id)
        return Box(service, sandbox)

    yield make
    for sandbox_id in made:
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=sandbox_id), timeout=180)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh_box(make_box: MakeBox) -> Box:
    """A fresh sandbox without network, for tests of a whole sandbox or that leave something outside `box`'s workdir."""
    made: Box = await make_box()
    return made


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def standing(service: Running) -> AsyncIterator[Box]:
    """The sandbox of `box`, which lives as long as a slow run of the suite."""
    spec = sb.SandboxSpec(network=narrowest(await claimed(service)), lease=Duration(seconds=3600))
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
    sandbox = (await service.sandboxes.CreateSandbox(request, timeout=180)).sandbox
    yield Box(service, sandbox)
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=sandbox.sandbox_id), timeout=180)


@pytest_asyncio.fixture(loop_scope="session")
async def box(standing: Box) -> Box:
    """A sandbox without network where nothing runs, with an empty working directory.

    Making one costs most backends more than what a test does in it, so tests share it. Ids of processes are not reused.
    """
    await standing.out(_EMPTY, kill_all_after=True)
    return standing


@pytest_asyncio.fixture(loop_scope="session")
async def capabilities(service: Running) -> sb.Capabilities:
    """What the service's default backend claims."""
    return await claimed(service)


async def claimed(service: Running) -> sb.Capabilities:
    """What a service's default backend claims; it must be there."""
    answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=120)
    (backend,) = [backend for backend in answer.backends if backend.is_default]
    assert backend.available, f"this machine cannot run the suite: {backend.unavailable_reason}"
    capabilities: sb.Capabilities = backend.capabilities
    return capabilities
