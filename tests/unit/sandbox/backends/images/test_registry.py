"""Errors of a registry show no login of the service."""

from __future__ import annotations

import asyncio

import pytest

from penstock_chassis.errors import Unavailable
from penstock_sandbox.backends.images import reference
from penstock_sandbox.backends.images.registry import Registry, RegistryOptions
from penstock_sandbox.egress import no_answer


async def _at_once(_seconds: float) -> None:
    """The pause of a test."""


@pytest.mark.requirement("R142", "R8")
async def test_a_proxy_that_refuses_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP client's error has the proxy's whole address, and any image of a made-up host leads there."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://operator:hunter2@127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "")
    registry = Registry(RegistryOptions(), pause=_at_once)
    try:
        with pytest.raises(Unavailable, match="cannot be reached through the service's proxy") as failed:
            await registry.manifest(reference.parse("registry.invalid/a/b:1"))
    finally:
        await registry.aclose()
        proxy.close()
    assert "hunter2" not in f"{failed.value} {failed.value.metadata} {failed.value.violations}"


def test_a_log_has_no_login() -> None:
    for address in ("http://u:p@h:1/x", "u:p@h:1", "'https://p@h'"):
        text = no_answer.for_log(ValueError(f"502, url={address}"))
        assert "p@" not in text and "h" in text
