"""The service inside a test, and the way out of a local sandbox by itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from penstock_chassis.auth import Role, Token
from penstock_chassis.testing import serve
from penstock_sandbox.app import App, open_app, servicers
from penstock_sandbox.backends.local.endpoint import Endpoint
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy
from penstock_sandbox.settings import SandboxSettings
from penstock_sandbox.status import Health


@dataclass(frozen=True, slots=True)
class OpenSandboxes:
    """A running sandbox service."""

    address: str
    channel: grpc.aio.Channel
    """Carries the operator's token where there is one."""
    app: App
    """Its domain objects."""
    health: Health


@asynccontextmanager
async def open_sandboxes(
    state_dir: Path, *, tokens: Mapping[Role, str] | None = None, more: Iterable[Token] = (), **settings: Any
) -> AsyncIterator[OpenSandboxes]:
    """Opens every installed backend and serves them on a free port, as the service's own process does.

    Closing it ends every sandbox.

    Args:
        state_dir: where the service may write; users of sandboxes must be able to enter it (mode 0755).
        tokens: the tokens of the roles; None treats every caller as operator.
        more: tokens of other namespaces.
        settings: further settings by name, such as ``max_sandboxes=3``.

    Raises:
        FailedPrecondition: `BACKEND_UNAVAILABLE`, the default backend is not installed.
    """
    async with open_app(SandboxSettings(state_dir=state_dir, anonymous=True, **settings)) as app:
        health = Health(app.sandboxes, app.snapshots)
        with health.reported():
            service = servicers(app, health)
            async with serve(
                *service.registrations, roles=service.roles, tokens=tokens, more=more, owned=service.owned
            ) as (address, channel):
                yield OpenSandboxes(address, channel, app, health)


@asynccontextmanager
async def open_endpoint(upstream: str) -> AsyncIterator[tuple[str, int]]:
    """Opens a listener on this machine that leads to ``upstream`` as a local sandbox's one endpoint does.

    Args:
        upstream: host:port, tls:host:port or unix:/path.

    Yields:
        The listener's host and port. Closing it ends its connections.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        endpoint = Endpoint("testing", listener, NetworkPolicy(NetworkKind.ONE_ENDPOINT, port, upstream))
        endpoint.open()
        try:
            yield host, port
        finally:
            await endpoint.aclose()
