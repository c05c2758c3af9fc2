"""The process of one machine in a Ray cluster: an actor that supervises a service.

It is made without an order, because Ray keeps the arguments of an actor's creation for its restarts and shows them: the
stack sends the order, with its token and key, in a call, again after each restart.
"""

import asyncio
import logging

from penstock.launchers.node import NodeService
from penstock.launchers.orders import Order, load_members

_log = logging.getLogger("penstock.stack")


class NodeActor:
    """An actor's class; `ray.remote` makes it one."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None
        self._service: NodeService | None = None

    async def host(self) -> str:
        """Returns the address of the machine."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    async def run(self, order: bytes) -> str:
        """Starts the service of an order, in place of an earlier one; returns the `host:port` where others reach it.

        Raises:
            StackFailed: it cannot be started.
            ConfigurationError: the machine lacks what it needs.
        """
        await self.stop()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._serve(Order.loads(order), await self.host(), ready))
        self._work.add_done_callback(lambda work: _pass_on(work, ready))
        return await ready

    async def take(self, members: bytes) -> None:
        """Hands on which services the stack has now."""
        if self._service is not None:
            self._service.take(load_members(members))

    async def failure(self) -> str:
        """Waits until the service has died too often; returns how."""
        if self._work is None:
            return "it was never started"
        await asyncio.wait([self._work])
        if self._work.cancelled():
            return "it was stopped"
        return str(self._work.exception() or "it ended")

    async def stop(self) -> None:
        """Stops the service and removes its state. Idempotent."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def _serve(self, order: Order, host: str, ready: "asyncio.Future[str]") -> None:
        self._service = NodeService(order, host, lambda restart: _log.warning("%s", restart))
        async with self._service as running:
            ready.set_result(running.where)
            await running.wait()


def _pass_on(work: "asyncio.Task[None]", ready: "asyncio.Future[str]") -> None:
    """Ends the wait for a service that has failed before it was ready."""
    if ready.done():
        return
    if not work.cancelled() and (error := work.exception()) is not None:
        ready.set_exception(error)
    else:
        ready.cancel()
