"""What the OpenEnv server makes of a credential that is no text; nothing behind it is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest

from penstock.adapters.openenv.rollout_arguments import Defaults
from penstock.adapters.openenv.serving import Listen, serving
from penstock.client.connection import Penstock


async def asked(address: str, credential: bytes) -> bytes:
    """The server's whole answer to a request with these bytes as its credential."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(address).port)
    head = b"GET /metadata HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: "
    writer.write(head + credential + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.requirement("R5", "R8")
async def test_a_credential_that_is_no_text_is_refused() -> None:
    """A header may be any bytes: each gets the answer of a wrong token, and none is a fault of the server."""
    nothing = cast(Penstock, SimpleNamespace())
    async with serving(nothing, Listen(port=0, token="secret"), Defaults(agent="shell")) as address:
        assert b"200 OK" in await asked(address, b"Bearer secret")
        for credential in (b"Bearer \xff\xfe", b"Basic \xff", b"Basic /////w==", b"Basic no base64", b"\xff secret"):
            assert b"OPENENV_UNAUTHENTICATED" in await asked(address, credential), credential
