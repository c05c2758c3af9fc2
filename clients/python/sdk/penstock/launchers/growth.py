"""How many machines with a sandbox service a stack wants, by what its sandbox services have and admit."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from penstock.client.connection import Penstock, connect
from penstock.client.errors import PenstockError
from penstock.client.transport.endpoints import Endpoints, Tls
from penstock.client.types.sandboxes import NodeStatus

_OF_TEN: Final = 8
"""So many tenths of all places may be taken. The Helm chart scales sandbox services by the same share."""


def wanted(nodes: Sequence[NodeStatus], most: int) -> int:
    """Returns how many machines have room for the sandboxes that exist and those that wait, at most `most`."""
    if not nodes:
        return 1
    taken = sum(node.sandbox_count + node.waiting_count for node in nodes)
    places = sum(node.sandbox_count + node.room for node in nodes)
    if not places:  # the disk of each is low
        return min(len(nodes) + 1, most)
    return min(max(1, -(-10 * taken * len(nodes) // (_OF_TEN * places))), most)


class NodeReader:
    """Reads the state of sandbox services, over one connection to each."""

    def __init__(self, token: str, tls: Tls) -> None:
        """`token`: an operator's."""
        self._token = token
        self._tls = tls
        self._opened: dict[str, tuple[Penstock, AsyncExitStack]] = {}

    async def read(self, members: Mapping[str, str]) -> list[NodeStatus]:
        """Returns what those say that answer. `members`: addresses by name."""
        for address in self._opened.keys() - {*members.values()}:
            await self._opened.pop(address)[1].aclose()
        found = await asyncio.gather(*(self._one(address) for address in members.values()))
        return [status for status in found if status is not None]

    async def close(self) -> None:
        """Ends all connections."""
        await self.read({})

    async def _one(self, address: str) -> NodeStatus | None:
        try:
            if address not in self._opened:
                stack = AsyncExitStack()
                self._opened[address] = (await stack.enter_async_context(self._connection(address)), stack)
            return await self._opened[address][0].sandboxes.node_status()
        except PenstockError:
            return None

    def _connection(self, address: str) -> Penstock:
        only = Endpoints(sandbox=address, driver="", interception="", inference="", token=self._token, tls=self._tls)
        return connect(only)
