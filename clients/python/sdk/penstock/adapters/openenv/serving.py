"""Listening: the address, its certificate and its token, until the program is cancelled."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from penstock.adapters.openenv.app import application
from penstock.adapters.openenv.rollout_arguments import Defaults
from penstock.adapters.openenv.sessions import Sessions
from penstock.client.connection import Penstock
from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The listening address and its credentials.

    Raises:
        ConfigurationError: `OPENENV_LISTEN`, a wide address without a token and TLS, a blank token, or half a
            certificate (R3, R9).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None and (not self.token.strip() or self.token != self.token.strip()):
            raise _refused("the token is blank, or has whitespace around it")
        if (self.cert is None) != (self.key is None):
            raise _refused("set a certificate and its key together")
        if not is_loopback(self.host) and (self.token is None or self.cert is None):
            raise _refused(f"{self.host} is reachable from other machines: set a token and a certificate")

    def tls(self) -> ssl.SSLContext | None:
        """Returns the server's TLS context."""
        if self.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise _refused(f"the certificate cannot be used: {error}") from None
        return context


@asynccontextmanager
async def serving(
    ps: Penstock, listen: Listen, defaults: Defaults, *, max_sessions: int = 4, idle_s: float = 3600.0
) -> AsyncIterator[str]:
    """Runs the server while open; yields its address. On exit every session and rollout is ended.

    Raises:
        ConfigurationError: `OPENENV_LISTEN`, the address is in use or the certificate is invalid.
    """
    tls = listen.tls()
    sessions = Sessions(ps, defaults, most=max_sessions, idle_s=idle_s)
    runner = web.AppRunner(application(sessions, listen.token), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise _refused(f"{listen.host}:{listen.port}: {error.strerror or error}") from None
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        yield f"{'https' if tls else 'http'}://{shown}:{port}"
    finally:
        await runner.cleanup()


def _refused(message: str) -> ConfigurationError:
    return ConfigurationError(message, reason="OPENENV_LISTEN")
