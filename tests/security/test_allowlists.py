"""What a sandbox with an allow-list reaches: its proxy and its endpoint, and through the proxy what is listed alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.sandbox.services import Running
from tests.conformance.sandbox.test_network import DIAL, TALK, _own_address, upstream
from tests.integration.sandbox.egress.test_egress import allowlist, box_of, serving
from tests.support.endpoints.egress_upstream import LOGIN, TOKEN, Indexes, running

from penstock.sandbox.v1 import sandbox_pb2 as sb

PROXY, ENDPOINT = 3128, 4000
SCAN = """
import socket
found = []
for port in range(1, 65536):
    with socket.socket() as s:
        # A socket may be given the very port that it dials, and then it meets itself.
        if s.connect_ex(("127.0.0.1", port)) == 0 and s.getsockname() != s.getpeername():
            found.append(port)
print(found)
"""
DATAGRAMS = """
import socket
def attempt(name, f):
    try:
        f()
    except OSError:
        return
    print(name, "LED OUT")
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt("udp", lambda: udp.sendto(b"x", ("1.1.1.1", 53)))
attempt("dns", lambda: socket.getaddrinfo("example.com", 80))
attempt("udp6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b"x", ("2606:4700:4700::1111", 53)))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
"""
ASK = """
import sys, urllib.error, urllib.request
try:
    proxied = urllib.request.build_opener(urllib.request.ProxyHandler({"http": "http://127.0.0.1:3128"}))
    answer = proxied.open(sys.argv[1])
    print(answer.status, answer.read())
except urllib.error.HTTPError as error:
    print(error.code, error.headers["Penstock-Egress-Error"])
"""
MANY = """
import socket
held, cut = [], 0
for _ in range(400):
    s = socket.create_connection(("127.0.0.1", 3128), 20)
    held.append(s)
for s in held[300:]:
    try:
        s.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        cut += s.recv(1) == b""
    except OSError:
        cut += 1
for s in held:
    s.close()
print("bounded" if cut == 100 else cut)
"""


@pytest_asyncio.fixture(loop_scope="session")
async def indexes(tmp_path: Path) -> AsyncIterator[Indexes]:
    async with running(tmp_path) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session", params=["local", "docker"])
async def service(request: pytest.FixtureRequest, tmp_path: Path, indexes: Indexes) -> AsyncIterator[Running]:
    """One whose operator lists hosts, and no private address."""
    tmp_path.chmod(0o755)
    async with serving(tmp_path / "service", indexes, request.param, egress_private_addresses="[]") as started:
        yield started


@pytest.mark.requirement("R141", "R14")
async def test_a_sandbox_with_an_allowlist_connects_to_its_proxy_and_endpoint_alone(
    service: Running, indexes: Indexes
) -> None:
    async with upstream() as address, upstream(host="0.0.0.0") as wide:
        one = sb.OneEndpoint(local_port=ENDPOINT, upstream=address)
        box = await box_of(service, allowlist(indexes, one_endpoint=one))
        assert await box.out(f"python3 -c '{SCAN}'", timeout_s=120) == str([PROXY, ENDPOINT])
        assert await box.out(f"python3 -c '{DATAGRAMS}'") == ""
        control, wide_port = service.address.rpartition(":")[2], wide.rpartition(":")[2]
        for host, port in (
            ("127.0.0.1", indexes.plain_port),
            ("127.0.0.1", wide_port),
            ("127.0.0.1", control),
            ("169.254.169.254", "80"),
            ("10.0.0.1", "80"),
            ("1.1.1.1", "443"),
            (_own_address(), wide_port),
            ("example.com", "80"),
        ):
            result = await box.run(shell=DIAL.format(host=host, port=port), timeout_s=30)
            assert result.exit.code == 9, (host, port)
        assert (await box.run(shell=TALK, stdin=b"hello")).stdout == b"echo:hello"


@pytest.mark.requirement("R141", "R14")
async def test_the_proxy_reaches_no_private_address_that_the_operator_does_not_list(
    service: Running, indexes: Indexes
) -> None:
    """Whatever names and addresses the task lists: its own machine, its neighbours, the cloud's metadata."""
    control = int(service.address.rpartition(":")[2])
    box = await box_of(service, allowlist(indexes, hosts=["localhost", "127.0.0.0/8", "169.254.0.0/16"], ports=[]))
    listed = await box_of(
        service, allowlist(indexes, hosts=["localhost", "127.0.0.1"], ports=[indexes.plain_port, control])
    )

    def ask(url: str) -> str:
        return f"python3 - {url} <<'END'\n{ASK}END"

    for url in ("http://localhost/", "http://127.0.0.1/", "http://169.254.169.254/latest/meta-data/"):
        assert await box.out(ask(url)) == "403 ADDRESS_NOT_ALLOWED"
    for url in (indexes.plain_url, f"http://127.0.0.1:{control}", f"http://localhost:{control}"):
        assert await listed.out(ask(f"{url}/")) == "403 ADDRESS_NOT_ALLOWED"
    for url in (f"http://{_own_address()}/", "http://10.0.0.1/", "http://[::1]/", "http://example.com/"):
        assert await box.out(ask(url)) == "403 HOST_NOT_ALLOWED"
    assert not indexes.asked


@pytest.mark.requirement("R141")
async def test_connections_to_the_proxy_are_bounded_and_siblings_go_on(service: Running, indexes: Indexes) -> None:
    greedy, sibling = [await box_of(service, allowlist(indexes)) for _ in range(2)]
    assert await greedy.out(f"python3 -c '{MANY}'", timeout_s=120) == "bounded"
    ask = f"python3 - {indexes.plain_url}/ <<'END'\n{ASK}END"
    assert await sibling.out(ask) == "403 ADDRESS_NOT_ALLOWED"


@pytest.mark.requirement("R141", "R12")
async def test_nothing_of_the_proxy_but_its_certificate_is_in_a_sandbox(service: Running, indexes: Indexes) -> None:
    box = await box_of(service, allowlist(indexes))
    assert await box.out("ls -A /opt/penstock/egress") == "ca.pem"
    assert await box.out("grep -c PRIVATE /opt/penstock/egress/ca.pem || true") == "0"
    await box.out("! touch /opt/penstock/egress/x 2>/dev/null && ! echo > /opt/penstock/egress/ca.pem 2>/dev/null")
    seen = await box.out("env; find / -xdev -name proxy.sock 2>/dev/null; cat /proc/net/unix")
    assert "proxy.sock" not in seen and LOGIN not in seen and TOKEN not in seen
    proxy = service.state_dir / "state" / "egress"
    assert proxy.stat().st_mode & 0o077 == 0
    (key,) = await asyncio.to_thread(lambda: [file for file in proxy.iterdir() if file.name == "authority.pem"])
    assert key.stat().st_mode & 0o077 == 0
