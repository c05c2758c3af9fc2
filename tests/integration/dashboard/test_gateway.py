"""The dashboard's door to the services: gRPC-Web in, gRPC out, over a real gRPC server that answers bytes."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import limits
from typer.testing import CliRunner

import penstock.driver.v1.agent_service_pb2
import penstock.driver.v1.rollout_service_pb2
import penstock.driver.v1.run_service_pb2
import penstock.inference.v1.inference_service_pb2
import penstock.interception.v1.intercept_service_pb2
import penstock.interception.v1.rollout_gate_service_pb2
import penstock.ops.v1.operations_service_pb2
import penstock.sandbox.v1.sandbox_service_pb2
from penstock.cli.main import app
from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES, Endpoints, Tls
from penstock.dashboard.framing import BadFrame, data_frame, message_of, timeout_of, trailers_frame
from penstock.dashboard.gateway import Bounds
from penstock.dashboard.methods import ALLOWED
from penstock.dashboard.serving import Dashboard, Place, serve
from penstock_chassis.operations import ROLES as OPERATIONS_ROLES
from penstock_driver.app import ROLES as DRIVER_ROLES
from penstock_inference.app import ROLES as INFERENCE_ROLES
from penstock_interception.app import ROLES as GATE_ROLES
from penstock_sandbox.app import ROLES as SANDBOX_ROLES

LIST = "penstock.driver.v1.RolloutService/ListRollouts"
WATCH = "penstock.driver.v1.RolloutService/WatchRollouts"
TOKEN = "the-token"

Behaviour = Callable[[bytes, Any], Any]


@dataclass
class Backend(grpc.GenericRpcHandler):
    """A gRPC server of bytes: what it was asked with, and what it answers."""

    unary: Callable[[bytes, Any], Awaitable[bytes]] | None = None
    stream: Callable[[bytes, Any], AsyncIterator[bytes]] | None = None
    seen: list[tuple[str, Mapping[str, Any], bytes]] = field(default_factory=list)

    def service(self, handler_call_details: Any) -> Any:
        """By the kind of behaviour that the test gave; nothing else is served."""
        method, metadata = handler_call_details.method, dict(handler_call_details.invocation_metadata)
        unary, stream = self.unary, self.stream
        if method.endswith("/ListRollouts") and unary is not None:

            async def answer(request: bytes, context: Any) -> bytes:
                self.seen.append((method, metadata, request))
                return await unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer)
        if method.endswith("/WatchRollouts") and stream is not None:

            async def answers(request: bytes, context: Any) -> AsyncIterator[bytes]:
                self.seen.append((method, metadata, request))
                async for message in stream(request, context):
                    yield message

            return grpc.unary_stream_rpc_method_handler(answers)
        if method.endswith("/GetStatus") and unary is not None:
            return grpc.unary_unary_rpc_method_handler(unary)
        return None


@dataclass
class World:
    """A backend, the dashboard before it, and a browser's way to ask."""

    backend: Backend
    dashboard: Dashboard
    http: aiohttp.ClientSession

    @property
    def http_port(self) -> int:
        """Of the dashboard."""
        return urlsplit(self.dashboard.address).port or 0

    def post(self, method: str, message: bytes = b"", **headers: str) -> Any:
        """One call, as a page makes it."""
        sent = {"content-type": "application/grpc-web+proto", "authorization": f"Bearer {TOKEN}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {name: value for name, value in sent.items() if value}
        return self.http.post(f"{self.dashboard.address}rpc/{method}", data=data_frame(message), headers=kept)

    async def call(self, method: str, message: bytes = b"", **headers: str) -> tuple[list[bytes], dict[str, str]]:
        """Messages and trailers of a call's answer."""
        async with self.post(method, message, **headers) as response:
            assert response.status == 200
            return frames_of(await response.read())


def frames_of(body: bytes) -> tuple[list[bytes], dict[str, str]]:
    """What a body holds; the trailers are its last frame."""
    messages: list[bytes] = []
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        content, body = body[5 : 5 + length], body[5 + length :]
        if flags & 0x80:
            assert not body
            lines = [line.partition(": ") for line in content.decode().split("\r\n")[:-1]]
            return messages, {key: value for key, _, value in lines}
        messages.append(content)
    raise AssertionError("no trailers")


def details_of(trailers: Mapping[str, str]) -> bytes:
    """The details as the service sent them."""
    told = trailers["grpc-status-details-bin"]
    return base64.b64decode(told + "=" * (-len(told) % 4))


def status_of(trailers: Mapping[str, str]) -> tuple[str, str]:
    """The code, and the reason of the ErrorInfo."""
    status = status_pb2.Status.FromString(details_of(trailers))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return grpc.StatusCode[_NAMES[trailers["grpc-status"]]].name, info.reason


_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}


@asynccontextmanager
async def world(tmp_path: Path, backend: Backend, place: Place | None = None, **options: Any) -> AsyncIterator[World]:
    """Everything, on free ports."""
    (tmp_path / "page" / "assets").mkdir(parents=True)
    (tmp_path / "page" / "index.html").write_text("<!doctype html><title>page</title>")
    (tmp_path / "page" / "assets" / "a-1.js").write_text("export {}")
    async with AsyncExitStack() as stack:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((backend,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        address = f"127.0.0.1:{port}"
        endpoints = Endpoints(driver=address, sandbox=address, interception=address, inference="")
        dashboard = await stack.enter_async_context(
            serve(endpoints, place or Place(port=0), static=tmp_path / "page", **options)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield World(backend, dashboard, http)


async def test_a_call_passes_byte_for_byte_with_the_callers_own_token(tmp_path: Path) -> None:
    """The page has no API of its own: the service sees its message and its token, and the page the service's answer."""

    async def echo(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x-told", "it"), ("x-data-bin", b"\x00\xff")))
        return request * 2

    async with world(tmp_path, Backend(unary=echo)) as here:
        sent = bytes(range(256)) * 300
        messages, trailers = await here.call(LIST, sent, x_request_id="q7", cookie="a=b")
        [(method, metadata, request)] = here.backend.seen
    assert messages == [sent * 2]
    assert (trailers["grpc-status"], trailers["x-told"], trailers["x-data-bin"]) == ("0", "it", "AP8")
    assert (method, request) == (f"/{LIST}", sent)
    assert (metadata["authorization"], metadata["x-request-id"]) == (f"Bearer {TOKEN}", "q7")
    assert "cookie" not in metadata


async def test_error_keeps_its_code_message_and_details(tmp_path: Path) -> None:
    """A page can say what the service said, fields included (contracts: ErrorInfo on every error)."""

    async def refuse(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("grpc-status-details-bin", b"details"),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "there is no »such« rollout\n50 %")
        raise AssertionError("abort raises")

    async with world(tmp_path, Backend(unary=refuse)) as here:
        messages, trailers = await here.call(LIST)
    assert messages == []
    assert trailers["grpc-status"] == "5"
    assert unquote(trailers["grpc-message"]) == "there is no »such« rollout\n50 %"
    assert details_of(trailers) == b"details"


async def test_a_stream_is_passed_on_message_by_message(tmp_path: Path) -> None:
    """What happens is seen when it happens, not when the stream ends."""
    go_on = asyncio.Event()

    async def two(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await go_on.wait()
        yield b"second"

    async with world(tmp_path, Backend(stream=two)) as here, here.post(WATCH) as response:
        first = await response.content.readexactly(len(data_frame(b"first")))
        assert first == data_frame(b"first")
        go_on.set()
        messages, trailers = frames_of(await response.read())
    assert (messages, trailers["grpc-status"]) == ([b"second"], "0")


@pytest.mark.requirement("R97")
async def test_a_page_asks_each_service_for_its_status_by_a_header(tmp_path: Path) -> None:
    """All services serve the same method; one that is not there, or has no such name, is refused."""

    async def status(_request: bytes, _context: Any) -> bytes:
        return b"fine"

    method = "penstock.ops.v1.OperationsService/GetStatus"
    async with world(tmp_path, Backend(unary=status)) as w:
        for service in ("driver", "sandbox", "interception"):
            messages, trailers = await w.call(method, penstock_service=service)
            assert (messages, trailers["grpc-status"]) == ([b"fine"], "0")
        for service, reason in (
            ("inference", "SERVICE_ABSENT"),
            ("elsewhere", "GRPC_WEB_MALFORMED"),
            ("", "GRPC_WEB_MALFORMED"),
        ):
            _, trailers = await w.call(method, penstock_service=service)
            assert status_of(trailers)[1] == reason


async def test_a_page_that_goes_cancels_its_call(tmp_path: Path) -> None:
    """Nobody works for a tab that was closed."""
    ended = asyncio.Event()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with world(tmp_path, Backend(stream=endless)) as here:
        async with here.post(WATCH) as response:
            await response.content.readexactly(10)
        await asyncio.wait_for(ended.wait(), 60)


async def test_a_page_that_does_not_read_holds_the_service_back(tmp_path: Path) -> None:
    """Back-pressure from the browser to the service: a tab that sleeps costs a bounded part of a stream."""
    sent = 0
    stuck = asyncio.Event()

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(4000):
            write = asyncio.ensure_future(context.write(b"x" * 65_536))
            done, _ = await asyncio.wait([write], timeout=1.0)
            if not done:
                stuck.set()
            await write
            sent += 1
        yield b"done"

    async with world(tmp_path, Backend(stream=flood)) as here, here.post(WATCH) as response:
        await asyncio.wait_for(stuck.wait(), 60)
        assert sent < 4000
        await response.content.readexactly(5)


@pytest.mark.requirement("R27")
async def test_a_deadline_holds_where_the_service_does_not(tmp_path: Path) -> None:
    """Nobody waits for ever on a service that hangs; the service sees the deadline too."""
    left: list[float] = []

    async def hang(request: bytes, context: Any) -> bytes:
        left.append(context.time_remaining())
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with world(tmp_path, Backend(unary=hang)) as here:
        for limit in limits(0.3):
            _, trailers = await here.call(LIST, grpc_timeout=f"{limit * 1000:.0f}m")
            assert trailers["grpc-status"] == "4"
            if left:
                break  # else the deadline came before the service was reached
    assert left[0] < limit * 1.5


@pytest.mark.requirement("R5")
@pytest.mark.parametrize(
    ("method", "headers", "told"),
    [
        ("penstock.sandbox.v1.ProcessService/Run", {}, ("PERMISSION_DENIED", "DASHBOARD_METHOD")),
        ("penstock.interception.v1.RolloutGateService/IssueToken", {}, ("PERMISSION_DENIED", "DASHBOARD_METHOD")),
        ("penstock.driver.v1.RolloutService/DeleteRollout", {}, ("PERMISSION_DENIED", "DASHBOARD_METHOD")),
        (
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            {},
            ("PERMISSION_DENIED", "DASHBOARD_METHOD"),
        ),
        (LIST, {"authorization": ""}, ("UNAUTHENTICATED", "CREDENTIAL_MISSING")),
        (LIST, {"authorization": "Bearer x\ty"}, ("UNAUTHENTICATED", "CREDENTIAL_INVALID")),
        (LIST, {"content_type": "application/json"}, ("INVALID_ARGUMENT", "GRPC_WEB_MALFORMED")),
        (LIST, {"grpc_timeout": "soon"}, ("INVALID_ARGUMENT", "GRPC_WEB_MALFORMED")),
        ("penstock.inference.v1.InferenceService/GetInfo", {}, ("UNAVAILABLE", "SERVICE_ABSENT")),
    ],
)
async def test_forbidden_methods_are_refused_by_name(
    tmp_path: Path, method: str, headers: dict[str, str], told: tuple[str, str]
) -> None:
    """A page that was taken over reaches neither commands nor files, tokens or deletions."""
    async with world(tmp_path, Backend()) as here:
        messages, trailers = await here.call(method, b"", **headers)
    assert messages == []
    assert status_of(trailers) == told
    assert here.backend.seen == []


async def test_dead_service_is_unavailable_and_recovers(tmp_path: Path) -> None:
    """Bad input: a service that is away is an answer in words; once it is back, the same dashboard serves it."""

    async def answer(request: bytes, context: Any) -> bytes:
        return b"here"

    async with world(tmp_path, Backend(unary=answer)) as here:
        address = f"127.0.0.1:{(port := unused_port())}"
        endpoints = Endpoints(driver=address, sandbox=address, interception=address, inference="")
        async with serve(endpoints, Place(port=0), static=tmp_path / "page") as dashboard:
            beside = World(here.backend, dashboard, here.http)
            _, trailers = await beside.call(LIST)
            assert trailers["grpc-status"] == "14"
            again = grpc.aio.server()
            again.add_generic_rpc_handlers((here.backend,))
            assert again.add_insecure_port(address) == port
            await again.start()
            messages: list[bytes] = []
            while trailers["grpc-status"] == "14":
                messages, trailers = await beside.call(LIST)
            await again.stop(None)
    assert messages == [b"here"]


@pytest.mark.requirement("R13")
async def test_calls_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    """A page cannot fill the dashboard's memory, nor take all of its connections to the services."""

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.get_running_loop().create_future()

    async with world(tmp_path, Backend(stream=endless), bounds=Bounds(calls=1)) as here, here.post(WATCH) as response:
        await response.content.readexactly(10)
        _, trailers = await here.call(LIST)
        assert status_of(trailers) == ("RESOURCE_EXHAUSTED", "DASHBOARD_BUSY")
    async with world(tmp_path / "second", Backend()) as here:
        _, trailers = await here.call(LIST, bytes(9 << 20))
        assert status_of(trailers) == ("RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE")


@asynccontextmanager
async def one_who_sends_no_body(here: World) -> AsyncIterator[asyncio.StreamReader]:
    """A request whose body is announced and does not come; the dashboard waits for it when the block begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.http_port)
    try:
        writer.write(
            f"POST /rpc/{LIST} HTTP/1.1\r\nhost: 127.0.0.1:{here.http_port}\r\nauthorization: x\r\n"
            "content-type: application/grpc-web+proto\r\ncontent-length: 80000\r\nexpect: 100-continue\r\n\r\n".encode()
        )
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()


@pytest.mark.requirement("R13")
async def test_request_without_a_body_gets_a_place(tmp_path: Path) -> None:
    """Requests that are still coming are calls too: strangers cannot open more of them than there are places."""
    bounds = Bounds(calls=1, read_s=600)
    async with world(tmp_path, Backend(), bounds=bounds) as here, one_who_sends_no_body(here):
        _, trailers = await here.call(LIST)
    assert status_of(trailers) == ("RESOURCE_EXHAUSTED", "DASHBOARD_BUSY")


@pytest.mark.requirement("R27")
async def test_a_request_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    """Its place is free again, and whoever is only slow is told."""
    async with (
        world(tmp_path, Backend(), bounds=Bounds(read_s=0.01)) as here,
        one_who_sends_no_body(here) as reader,
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        _, trailers = frames_of(await reader.readexactly(int(length.partition(b": ")[2])))
    assert status_of(trailers) == ("DEADLINE_EXCEEDED", "REQUEST_SLOW")


@pytest.mark.requirement("R13")
async def test_all_requests_together_have_so_many_bytes(tmp_path: Path) -> None:
    """What is held of them is bounded over all calls, and free again when a call ends."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def held(request: bytes, context: Any) -> bytes:
        asked.set()
        await go_on.wait()
        return b"done"

    async with world(tmp_path, Backend(unary=held), bounds=Bounds(held_bytes=1 << 20)) as here:
        large = bytes(600 << 10)
        first = asyncio.ensure_future(here.call(LIST, large))
        await asked.wait()
        _, trailers = await here.call(LIST, large)
        assert status_of(trailers) == ("RESOURCE_EXHAUSTED", "DASHBOARD_BUSY")
        go_on.set()
        assert (await first)[0] == (await here.call(LIST, large))[0] == [b"done"]


@pytest.mark.requirement("R9")
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:7790"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
    ],
)
async def test_another_sites_page_is_refused_whatever_it_asks(tmp_path: Path, headers: dict[str, str]) -> None:
    """DNS rebinding and foreign origins end at the door, for the page and for calls alike."""
    async with world(tmp_path, Backend()) as here:
        for method, path in (("GET", ""), ("GET", "health"), ("POST", f"rpc/{LIST}")):
            async with here.http.request(method, here.dashboard.address + path, headers=headers) as response:
                assert response.status in (400, 421), path
    assert here.backend.seen == []


@pytest.mark.requirement("R9")
def test_the_names_in_the_environment_are_taken_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `PENSTOCK_DASHBOARD_NAMES` says is what browsers may ask under, with any port and in any case."""
    listening: list[Any] = []

    async def listened(_endpoints: object, _show_token: bool, listen: tuple[Any, ...], _as_json: bool) -> int:
        listening.extend(listen)
        return 0

    async def looked_at() -> dict[str, int]:
        async with world(tmp_path, Backend(), Place(*listening)) as here:
            found = {}
            for host in (
                "192.0.2.7:7790",
                "Dash.Example",
                "localhost:1",
                "other.example",
                "dash.example.else",
            ):
                headers = {"host": host, "origin": f"http://{host}"}
                async with here.http.get(here.dashboard.address, headers=headers) as response:
                    found[host] = response.status
            return found

    monkeypatch.setattr("penstock.cli.commands.dashboard._serve", listened)
    named = {"PENSTOCK_DASHBOARD_NAMES": "192.0.2.7 dash.example"}
    done = CliRunner().invoke(app, ["dashboard", "--port", "0"], env=named)
    assert done.exit_code == 0, done.output
    assert asyncio.run(looked_at()) == {
        "192.0.2.7:7790": 200,
        "Dash.Example": 200,
        "localhost:1": 200,
        "other.example": 421,
        "dash.example.else": 421,
    }


@pytest.mark.requirement("R9")
@pytest.mark.parametrize("hosts", [["evil@localhost"], ["localhost", "localhost"], ["localhost", "evil.example"], []])
async def test_a_host_that_no_browser_would_send_is_none_of_the_dashboard(tmp_path: Path, hosts: list[str]) -> None:
    """Two of them, none, or one with a user before it."""
    async with world(tmp_path, Backend()) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.http_port)
        lines = ["GET / HTTP/1.1", *(f"host: {host}" for host in hosts), "connection: close", "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await reader.read()).split()[1] in (b"400", b"421")
        writer.close()


@pytest.mark.requirement("R9")
async def test_every_answer_forbids_the_browser_to_run_anything_else(tmp_path: Path) -> None:
    """What an agent wrote is shown by a page that may run its own scripts only, and load nothing from elsewhere."""
    async with world(tmp_path, Backend()) as here:
        for path, status in (("", 200), ("assets/a-1.js", 200), ("nothing", 404), ("../../etc/passwd", 404)):
            async with here.http.get(f"{here.dashboard.address}{path}") as response:
                assert response.status == status
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["x-content-type-options"] == "nosniff"
                assert response.headers["referrer-policy"] == "no-referrer"
                tag = response.headers.get("etag")
            if tag:
                async with here.http.get(f"{here.dashboard.address}{path}", headers={"if-none-match": tag}) as response:
                    assert response.status == 304


@pytest.mark.requirement("R9")
def test_beyond_this_machine_it_is_served_with_a_certificate_only() -> None:
    """The page's token travels with each call; in clear it stays on the machine."""
    with pytest.raises(ConfigurationError) as caught:
        Place("0.0.0.0")
    assert caught.value.reason == "DASHBOARD_TLS"


@pytest.mark.requirement("R9")
async def test_no_pages_token_travels_in_clear_beyond_this_machine(tmp_path: Path) -> None:
    """The services' side of the dashboard too, though it has no token of its own; none of them is spared."""
    (tmp_path / "index.html").write_text("<!doctype html>")
    for service in SERVICES:
        elsewhere = replace(Endpoints(tls=None), **{service: "driver.example:7702"})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"driver\.example") as caught:
            async with serve(elsewhere, Place(port=0), static=tmp_path):
                pass
        assert caught.value.reason == "TOKEN_IN_CLEAR"
    async with serve(Endpoints(driver="driver.example:7702", tls=Tls()), Place(port=0), static=tmp_path):
        pass


async def test_a_gateway_without_a_built_page_says_how_to_build_it(tmp_path: Path) -> None:
    """An editable installation has no page until `make dashboard`."""
    with pytest.raises(ConfigurationError, match="make dashboard") as caught:
        async with serve(Endpoints(), Place(port=0), static=tmp_path):
            pass
    assert caught.value.reason == "DASHBOARD_NOT_BUILT"


def test_allowed_methods_exist_and_stream_as_in_the_protos() -> None:
    """The list of methods has no misspelling: each is one of its service's, unary or a server stream."""
    files = [
        penstock.driver.v1.agent_service_pb2,
        penstock.driver.v1.rollout_service_pb2,
        penstock.driver.v1.run_service_pb2,
        penstock.inference.v1.inference_service_pb2,
        penstock.interception.v1.intercept_service_pb2,
        penstock.interception.v1.rollout_gate_service_pb2,
        penstock.ops.v1.operations_service_pb2,
        penstock.sandbox.v1.sandbox_service_pb2,
    ]
    known = {
        f"{service.full_name}/{method.name}": method
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    for name, method in ALLOWED.items():
        assert known[name].server_streaming == method.streaming, name
        assert not known[name].client_streaming, name
        assert name.startswith(f"penstock.{method.service or 'ops'}.v1.")


@pytest.mark.requirement("R5")
def test_an_observers_token_shows_all_that_a_page_reads_and_starts_nothing() -> None:
    """The page reads only what its token allows, and a role that only reads is enough to look at everything."""
    roles = {**OPERATIONS_ROLES, **DRIVER_ROLES, **GATE_ROLES, **SANDBOX_ROLES, **INFERENCE_ROLES}

    def may_observe(name: str) -> bool:
        return "observer" in roles.get(name, roles.get(name.partition("/")[0], ()))

    closed = {name.partition("/")[2] for name in ALLOWED if not may_observe(name)}
    changing = {"CreateRollout", "CreateGroup", "BranchRollout", "CancelRollout", "CancelGroup"}
    assert closed == changing | {"CheckSource", "DiffSandbox"}


@pytest.mark.requirement("R33")
@given(st.binary(max_size=64))
def test_any_body_is_one_message_or_refused(body: bytes) -> None:
    """What is no gRPC-Web is refused as that; what is, comes out as it went in."""
    try:
        message = message_of(body)
    except BadFrame:
        return
    assert data_frame(message) == body


@pytest.mark.requirement("R80")
@given(st.binary(max_size=64), st.text(max_size=40), st.text(max_size=20))
def test_error_text_cannot_break_out_of_the_trailers(message: bytes, said: str, value: str) -> None:
    """What a service says, line breaks included, stays one value of one line."""
    messages, trailers = frames_of(
        data_frame(message) + trailers_frame(5, said, [("x-value", value), ("BAD KEY", "x")])
    )
    assert messages == [message]
    assert set(trailers) <= {"grpc-status", "grpc-message", "x-value"}
    assert unquote(trailers["grpc-message"]) == said


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("1H", 3600.0), ("2S", 2.0), ("1500m", 1.5), ("7u", 7e-6), ("00000001n", 1e-9)],
)
def test_a_timeout_is_read_as_grpc_writes_it(header: str | None, seconds: float | None) -> None:
    """The page's deadline is the service's."""
    found = timeout_of(header)
    assert found == (None if seconds is None else pytest.approx(seconds))
