"""What a container's health check finds."""

import asyncio
from pathlib import Path

import pytest
import trustme

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.healthcheck import CA_VARIABLE, check, main
from penstock_chassis.server import Server, Service
from penstock_chassis.tls import ServerTls


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> ServerTls:
    leaf = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    return ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem")


def server(tls: ServerTls | None) -> Server:
    """A service without RPCs of its own; every service has a health service."""
    return Server(Service(registrations=[]), Authenticator({Role.OPERATOR: "op-token"}), tls=tls)


async def test_a_service_that_serves_is_healthy_without_a_token() -> None:
    """docs/interfaces.md: health answers without a token."""
    async with server(None) as running:
        assert await asyncio.to_thread(check, running.address, None, 60.0) == ""


@pytest.mark.requirement("R9")
async def test_over_tls_the_server_is_verified(
    tls: ServerTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of another authority is not healthy, it is somebody else."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    async with server(tls) as running:
        address = f"localhost:{running.address.rpartition(':')[2]}"
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "ca.pem"))
        assert await asyncio.to_thread(main, ["--timeout", "60", address]) == 0
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "other.pem"))
        assert await asyncio.to_thread(main, ["--timeout", "60", address]) == 1
        assert "UNAVAILABLE" in capsys.readouterr().err
        monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "none.pem"))
        assert await asyncio.to_thread(main, ["--timeout", "60", address]) == 1
        assert "none.pem" in capsys.readouterr().err


async def test_a_service_that_has_stopped_is_not_healthy() -> None:
    """A health check ends with a reason, not with a trace."""
    async with server(None) as running:
        address = running.address
    assert "UNAVAILABLE" in await asyncio.to_thread(check, address, None, 60.0)
