"""For tests: a real server on a free port, which starts in about 2 ms, and a loop whose clock moves without waiting."""

import asyncio
import selectors
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from penstock_chassis.auth import Authenticator, Owned, Role, Token
from penstock_chassis.channel import connect
from penstock_chassis.server import Registration, Server, Service

T = TypeVar("T")


@asynccontextmanager
async def serve(
    *registrations: Registration,
    roles: Mapping[str, Iterable[Role]] | None = None,
    tokens: Mapping[Role, str] | None = None,
    more: Iterable[Token] = (),
    owned: Mapping[str, Owned] | None = None,
) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """Serves the servicers as `run` would, with health, reflection, interceptor and error table.

    Args:
        registrations: servicers with their generated `add_..._to_server`.
        roles: the roles that may call each method beside the operator.
        tokens: the tokens of the roles; None treats every caller as operator.
        more: tokens of other namespaces.
        owned: whose the resources are that requests name.

    Yields:
        The address, and a channel to it that carries the operator's token where there is one.
    """
    server = Server(
        Service(registrations=registrations, roles=roles or {}, owned=owned or {}),
        Authenticator(tokens or {}, more=more, anonymous=tokens is None),
        stop_s=0.0,
    )
    async with server, connect(server.address, (tokens or {}).get(Role.OPERATOR)) as channel:
        yield server.address, channel


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, run on a loop whose clock begins at 0 and moves when nothing else can run.

    Delays and timeouts pass at once and exactly. Not for work that waits for threads, sockets or processes.
    """
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers advance its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self.now


class _NoWait(selectors.DefaultSelector):
    """Moves the loop's clock instead of waiting."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._clock = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing can happen any more: the work waits forever")
        ready = super().select(0)
        if not ready:
            self._clock.now += timeout
        return ready
