"""Certificates outside of their time, on a real server that asks its clients for one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.server import Server, Service
from penstock_chassis.tls import ClientTls, ServerTls

DAY = timedelta(days=1)
NOW = datetime.now(UTC)
TIMES = {"now": (NOW - DAY, NOW + DAY), "past": (NOW - 2 * DAY, NOW - DAY), "future": (NOW + DAY, NOW + 2 * DAY)}


def issue(authority: trustme.CA, folder: Path, name: str, when: str) -> tuple[Path, Path]:
    """A certificate of that time, and its key."""
    begins, ends = TIMES[when]
    issued = authority.issue_cert(name, not_before=begins, not_after=ends)
    issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    issued.private_key_pem.write_to_path(folder / f"{name}.key")
    return folder / f"{name}.pem", folder / f"{name}.key"


@pytest.mark.requirement("R9")
@pytest.mark.parametrize(
    ("server", "client", "is_served"),
    [
        ("now", "now", True),
        ("now", "past", False),
        ("now", "future", False),
        ("past", "now", False),
        ("future", "now", False),
    ],
)
async def test_a_certificate_outside_of_its_time_opens_no_connection(
    registration: Any, tmp_path: Path, server: str, client: str, is_served: bool
) -> None:
    """The client's and the server's, whatever token comes with it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    cert, key = issue(authority, tmp_path, "localhost", server)
    served = Server(
        Service(registrations=[registration]),
        Authenticator({Role.OPERATOR: "op-token"}),
        host="localhost",
        tls=ServerTls(cert, key, tmp_path / "ca.pem"),
        stop_s=0,
    )
    tls = ClientTls(tmp_path / "ca.pem", *issue(authority, tmp_path, "client", client))
    async with served, connect(served.address, "op-token", tls) as channel:
        untyped: Any = channel
        call = untyped.unary_unary("/penstock.test.v1.EchoService/UnaryUnary")(b"x", timeout=60)
        if is_served:
            assert await call == b"x"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
