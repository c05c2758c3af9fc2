"""The far end of a sandbox's one endpoint: plain, over TLS, or a socket's path."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from penstock_sandbox.backends.host.upstream import connect, reset
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy
from penstock_sandbox.sandboxes.policy import network_problems


def policy(upstream: str, ca: str = "") -> NetworkPolicy:
    """A policy of one endpoint."""
    return NetworkPolicy(NetworkKind.ONE_ENDPOINT, 7780, upstream, upstream_ca=ca)


@asynccontextmanager
async def echo(tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """A server that answers a line with the same; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def asked(target: NetworkPolicy) -> bytes:
    """What the upstream answers."""
    reader, writer = await connect(target)
    try:
        writer.write(b"hello\n")
        return await reader.readline()
    finally:
        writer.transport.abort()


@pytest.mark.requirement("R9", "R14")
async def test_an_upstream_over_tls_is_verified_by_the_operators_ca(tmp_path: Path) -> None:
    """A sandbox speaks plainly to its own loopback; beyond the machine it is TLS, to the right one."""
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    async with echo(context) as port:
        address = f"tls:127.0.0.1:{port}"
        assert await asked(policy(address, str(tmp_path / "ca.pem"))) == b"hello\n"
        for other in (str(tmp_path / "stranger.pem"), "", str(tmp_path / "absent.pem")):
            with pytest.raises(OSError):
                await connect(policy(address, other))
        assert await asked(policy(address, str(tmp_path / "ca.pem"))) == b"hello\n"


@pytest.mark.requirement("R9", "R14")
async def test_an_upstream_with_a_name_has_that_name_s_certificate(tmp_path: Path) -> None:
    """For replicas, which have one certificate and addresses that no certificate has."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("gate").configure_cert(context)
    async with echo(context) as port:
        assert await asked(policy(f"tls:gate@127.0.0.1:{port}", str(tmp_path / "ca.pem"))) == b"hello\n"
        for other in ("", "gates@"):
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(policy(f"tls:{other}127.0.0.1:{port}", str(tmp_path / "ca.pem")))


async def test_an_upstream_without_the_tls_prefix_is_not_encrypted(tmp_path: Path) -> None:
    """On one machine the way to the ingress is loopback."""
    async with echo(None) as port:
        assert await asked(policy(f"127.0.0.1:{port}", str(tmp_path / "absent.pem"))) == b"hello\n"


@pytest.mark.parametrize(
    "upstream", ["gate:1", "tls:gate:7780", "tls:[::1]:7780", "tls:gate@[::1]:7780", "unix:/run/gate"]
)
def test_an_upstream_is_one_of_four_forms(upstream: str) -> None:
    """protos: OneEndpoint.upstream."""
    assert network_problems(policy(upstream)) == []


@pytest.mark.requirement("R54")
@pytest.mark.parametrize(
    "upstream",
    [
        *("", "gate", "tls:", "tls:gate", "tls::1", "tls:unix:/run/gate", "unix:run", "gate:0"),
        *("gate@127.0.0.1:7780", "tls:@127.0.0.1:7780", "tls:gate@:7780"),
    ],
)
def test_another_form_is_refused_by_the_field_s_name(upstream: str) -> None:
    """INVALID_ARGUMENT naming the field."""
    assert [problem.field for problem in network_problems(policy(upstream))] == ["spec.network.one_endpoint.upstream"]


def test_two_policies_are_the_same_whatever_the_operator_verifies_by() -> None:
    """A caller who sends the policy in force again changes nothing (POLICY_WIDER compares policies)."""
    assert policy("tls:gate:1", "/ca.pem") == policy("tls:gate:1")


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_that_is_lost_already_can_be_reset(tmp_path: Path, tls: bool) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    async with echo(context if tls else None) as port:
        address = f"tls:127.0.0.1:{port}" if tls else f"127.0.0.1:{port}"
        _, writer = await connect(policy(address, str(tmp_path / "ca.pem")))
        writer.transport.abort()
        await asyncio.wait({asyncio.ensure_future(writer.wait_closed())})
        reset(writer)
