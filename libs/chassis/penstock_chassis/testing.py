"""A real server on a free port inside a test: it starts in about 2 ms, so each test has its own."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import grpc

from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.server import Registration, Server, Service


@asynccontextmanager
async def serve(
    *registrations: Registration,
    roles: Mapping[str, Iterable[Role]] | None = None,
    tokens: Mapping[Role, str] | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """Serves the servicers as `run` would, health, reflection, interceptor and error table included.

    Args:
        registrations: servicers with their generated `add_..._to_server`.
        roles: who may call what beside the operator.
        tokens: the tokens of the roles; None serves everyone as operator.

    Yields:
        The address, and a channel to it that carries the operator's token where there is one.
    """
    server = Server(
        Service(registrations=registrations, roles=roles or {}),
        Authenticator(tokens or {}, anonymous=tokens is None),
        drain_s=0.0,
    )
    async with server, connect(server.address, (tokens or {}).get(Role.OPERATOR)) as channel:
        yield server.address, channel
