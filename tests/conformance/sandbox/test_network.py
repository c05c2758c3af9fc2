"""What a sandbox may reach: its one endpoint where it has one, and nothing else whatever it tries.

A backend that cannot close a sandbox's network offers no NONE, and claims nothing about what else than its endpoint a
sandbox reaches: there the tests of isolation prove that NONE is refused.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import Box, MakeBox, failure, one_endpoint
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running

from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition, InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="session")

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers what came, after the other side closed its half."""
    data = await reader.read(-1)
    writer.write(b"echo:" + data)
    await writer.drain()
    writer.close()


@asynccontextmanager
async def upstream(handler: Handler = _echo, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server on the host's loopback; yields its address."""
    server = await asyncio.start_server(handler, host, 0)
    async with server:
        name, port = server.sockets[0].getsockname()[:2]
        yield f"{name}:{port}"


class Endpoint:
    """A sandbox whose one endpoint leads to a server of the test's: made when the first test asks, for all that leave
    its policy and its processes alone."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._stack = AsyncExitStack()
        self._handler: Handler = _echo
        self._box: Box | None = None
        self.address = ""
        """Of the server."""

    async def answered(self, handler: Handler = _echo) -> Box:
        """The sandbox, whose next connections are the handler's."""
        self._handler = handler
        if self._box is None:
            self.address = await self._stack.enter_async_context(upstream(self._answer))
            spec = sb.SandboxSpec(network=one_endpoint(self.address), lease=Duration(seconds=3600))
            request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
            self._box = Box(self._service, (await self._service.sandboxes.CreateSandbox(request, timeout=180)).sandbox)
        return self._box

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._handler(reader, writer)

    async def aclose(self) -> None:
        """End both."""
        if self._box is not None:
            request = ss.DeleteSandboxRequest(sandbox_id=self._box.id)
            await self._service.sandboxes.DeleteSandbox(request, timeout=180)
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def endpoint(service: Running) -> AsyncIterator[Endpoint]:
    """For tests that do not change what a sandbox may reach."""
    made = Endpoint(service)
    yield made
    await made.aclose()


DIAL = "exec 3<>/dev/tcp/{host}/{port} || exit 9; "
TALK = """python3 -c '
import socket, sys
s = socket.create_connection(("127.0.0.1", 4000), 60)
s.sendall(sys.stdin.buffer.read()); s.shutdown(socket.SHUT_WR)
while d := s.recv(65536): sys.stdout.buffer.write(d)
'"""


@pytest.mark.requirement("R14", "R18")
@needs("one_endpoint")
async def test_the_one_endpoint_leads_to_its_upstream(endpoint: Endpoint) -> None:
    box = await endpoint.answered()
    assert (await box.run(shell=TALK, stdin=b"hello")).stdout == b"echo:hello"


@pytest.mark.requirement("R26")
@needs("one_endpoint")
async def test_megabytes_pass_the_endpoint_both_ways_and_half_closes_too(endpoint: Endpoint) -> None:
    box = await endpoint.answered()
    data = bytes(range(256)) * 8192
    result = await box.run(shell=TALK, stdin=data, output_limit=10_000_000)
    assert result.stdout == b"echo:" + data


@pytest.mark.requirement("R14")
@needs("one_endpoint")
async def test_a_unix_socket_can_be_the_upstream(make_box: MakeBox, service: Running) -> None:
    path = service.state_dir / "upstream.sock"
    server = await asyncio.start_unix_server(_echo, path)
    path.chmod(0o666)
    async with server:
        box = await make_box(network=one_endpoint(f"unix:{path}"))
        assert (await box.run(shell=TALK, stdin=b"x")).stdout == b"echo:x"


@pytest.mark.requirement("R27")
@needs("one_endpoint")
async def test_absent_upstream_is_a_broken_connection(make_box: MakeBox) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        box = await make_box(network=one_endpoint(f"127.0.0.1:{closed.getsockname()[1]}"))
        result = await box.run(shell=TALK, stdin=b"", timeout_s=30)
        assert result.exit.code == 1


LEAVE = """python3 -c '
import socket
s = socket.create_connection(("127.0.0.1", 4000), 60)
s.sendall(b"ask")
n = 0
while n < {count}: n += len(s.recv(min(60, {count} - n)))
'"""


@pytest.mark.requirement("R105")
@needs("one_endpoint")
@pytest.mark.parametrize("size", [6 << 10, 300 << 10])
async def test_agent_leaving_mid_read_resets_the_upstream(endpoint: Endpoint, size: int) -> None:
    """What was acknowledged on the way is not what was read; one that read all of it ends its connection."""
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(3)
        writer.write(b"x" * size)
        try:
            ends.put_nowait("more" if await reader.read(1) else "end")
        except ConnectionResetError:
            ends.put_nowait("reset")
        writer.transport.abort()

    box = await endpoint.answered(answer)
    for count, expected in ((60, "reset"), (size, "end"), (60, "reset")):
        await box.run(shell=LEAVE.format(count=count), timeout_s=30)
        assert await ends.get() == expected


@pytest.mark.requirement("R14")
@needs("one_endpoint", "network_none")
async def test_only_the_endpoint_can_be_reached(endpoint: Endpoint, service: Running) -> None:
    """No port of the host, its names, the metadata address, the control plane, the siblings."""
    async with upstream(host="0.0.0.0") as wide:
        box = await endpoint.answered()
        control = service.address.rpartition(":")[2]
        host_port, wide_port = endpoint.address.rpartition(":")[2], wide.rpartition(":")[2]
        for host, port in (
            ("127.0.0.1", host_port),
            ("127.0.0.1", wide_port),
            ("127.0.0.1", control),
            ("169.254.169.254", "80"),
            ("10.0.0.1", "80"),
            ("1.1.1.1", "443"),
            (_own_address(), wide_port),
            ("localhost", control),
            ("example.com", "80"),
        ):
            result = await box.run(shell=DIAL.format(host=host, port=port), timeout_s=30)
            assert result.exit.code == 9, (host, port)


@pytest.mark.requirement("R14")
@needs("one_endpoint", "network_none")
async def test_every_port_of_loopback_but_the_endpoint_is_closed(endpoint: Endpoint) -> None:
    scan = """
import socket
open_ports = []
for port in range(1, 65536):
    with socket.socket() as s:
        # A socket may be given the very port that it dials, and then it meets itself.
        if s.connect_ex(("127.0.0.1", port)) == 0 and s.getsockname() != s.getpeername():
            open_ports.append(port)
print(open_ports)
"""
    box = await endpoint.answered()
    assert (await box.run("python3", "-c", scan)).stdout == b"[4000]\n"


@pytest.mark.requirement("R14")
@needs("one_endpoint", "network_none")
async def test_neither_udp_nor_raw_nor_abstract_sockets_lead_out(endpoint: Endpoint) -> None:
    name = f"penstock-abstract-{os.getpid()}"  # of this process of the suite's
    probe = """
import socket, sys
def attempt(name, f):
    try:
        f()
    except OSError as e:
        print(name, "refused")
    else:
        print(name, "LED OUT")
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt("udp", lambda: udp.sendto(b"x", ("1.1.1.1", 53)))
attempt("dns", lambda: socket.getaddrinfo("example.com", 80))
attempt("udp6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b"x", ("2606:4700:4700::1111", 53)))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[1]))
"""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        box = await endpoint.answered()
        lines = (await box.run("python3", "-c", probe, name)).stdout.decode().splitlines()
    assert [line for line in lines if "refused" not in line] == []
    assert len(lines) == 6


@pytest.mark.requirement("R92")
@needs("network_none")
async def test_only_families_that_a_network_namespace_holds_have_sockets(make_box: MakeBox) -> None:
    """No way to the hypervisor or to other sandboxes; refused when the socket is made, not by who would answer."""
    probe = """
import errno, socket
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        for make in (socket.socket, socket.socketpair):
            try:
                made = make(family, kind)
            except OSError as error:
                if family == getattr(socket, "AF_VSOCK", 40):
                    print("vsock", errno.errorcode[error.errno])
            else:
                print("made", family)
"""
    box = await make_box()
    result = await box.run("python3", "-c", probe)
    assert result.exit.code == 0, result.stderr.decode()
    lines = set(result.stdout.decode().splitlines())
    allowed = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
    assert {line for line in lines if line.startswith("made ")} <= {f"made {int(family)}" for family in allowed}
    assert f"made {int(socket.AF_UNIX)}" in lines
    vsock = {line for line in lines if line.startswith("vsock ")}
    assert vsock and vsock <= {"vsock EPERM", "vsock EAFNOSUPPORT"}


@pytest.mark.requirement("R4", "R52")
@needs("one_endpoint", "network_none")
async def test_siblings_share_neither_ports_nor_names(make_box: MakeBox) -> None:
    async with upstream() as address:
        first, second = [await make_box(network=one_endpoint(address)) for _ in range(2)]
        await first.start("server", "python3", "-c", "import socket; s = socket.create_server(('', 5000)); s.accept()")
        result = await second.run(shell=DIAL.format(host="127.0.0.1", port=5000))
        assert result.exit.code == 9


@pytest.mark.requirement("R14")
@needs("network_none")
async def test_a_sandbox_without_network_has_loopback_only(box: Box) -> None:
    assert await box.out("grep -c : /proc/net/dev") == "1"
    assert (await box.run(shell=DIAL.format(host="127.0.0.1", port=4000))).exit.code == 9


@pytest.mark.requirement("R14", "R54")
@needs("one_endpoint")
async def test_an_upstream_that_the_operator_does_not_name_is_refused(service: Running) -> None:
    for address in ("169.254.169.254:80", "example.com:443", "127.0.0.2:7701", "unix:/run/docker.sock"):
        request = ss.CreateSandboxRequest(request_id=address, spec=sb.SandboxSpec(network=one_endpoint(address)))
        error = await failure(service.sandboxes.CreateSandbox(request))
        assert isinstance(error, FailedPrecondition) and error.reason == "UPSTREAM_NOT_ALLOWED"


@pytest.mark.requirement("R64")
@pytest.mark.parametrize(
    "policy",
    [one_endpoint("127.0.0.1:80", port=80), one_endpoint("127.0.0.1"), one_endpoint(""), one_endpoint("127.0.0.1:x")],
    ids=["privileged", "portless", "empty", "wordy"],
)
async def test_a_malformed_policy_is_refused_by_field(service: Running, policy: sb.NetworkPolicy) -> None:
    request = ss.CreateSandboxRequest(request_id=str(policy), spec=sb.SandboxSpec(network=policy))
    error = await failure(service.sandboxes.CreateSandbox(request))
    assert isinstance(error, InvalidArgument) and error.violations[0].field.startswith("spec.network")


@pytest.mark.requirement("R55")
async def test_policies_that_the_backend_lacks_are_refused_before_anything_starts(
    service: Running, capabilities: sb.Capabilities
) -> None:
    """Refused, never degraded."""
    offered = {
        sb.NETWORK_KIND_ALLOWLIST: sb.NetworkPolicy(allowlist=sb.Allowlist(hosts=["example.com"])),
        sb.NETWORK_KIND_OPEN: sb.NetworkPolicy(open=sb.OpenNetwork()),
    }
    for kind, policy in offered.items():
        if kind in capabilities.networks:
            continue
        request = ss.CreateSandboxRequest(request_id=f"kind-{kind}", spec=sb.SandboxSpec(network=policy))
        error = await failure(service.sandboxes.CreateSandbox(request))
        assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R54")
@needs("one_endpoint", "network_none")
async def test_a_policy_is_narrowed_at_once_and_never_widened(make_box: MakeBox) -> None:
    """Connections that the new policy forbids are cut."""
    connected = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read(-1)
        writer.close()

    async with upstream(hold) as address:
        box = await make_box(network=one_endpoint(address))
        await box.start("open", "bash", "-c", DIAL.format(host="127.0.0.1", port=4000) + "cat <&3; echo cut")
        await connected.wait()
        stub = box.service.sandboxes
        same = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=one_endpoint(address))
        await stub.SetNetworkPolicy(same, timeout=30)
        wider = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=one_endpoint(address, port=4001))
        assert (await failure(stub.SetNetworkPolicy(wider))).reason == "POLICY_WIDER"
        none = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=sb.NetworkPolicy(none=sb.NoNetwork()))
        await stub.SetNetworkPolicy(none, timeout=30)
        stdout, _, _ = await box.finish("open")
        assert stdout == b"cut\n"
        assert (await box.run(shell=DIAL.format(host="127.0.0.1", port=4000))).exit.code == 9
        again = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=one_endpoint(address))
        assert (await failure(stub.SetNetworkPolicy(again))).reason == "POLICY_WIDER"


def _own_address() -> str:
    """An address of this host that is not loopback, or one that is nobody's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "192.0.2.1"
        return str(probe.getsockname()[0])
