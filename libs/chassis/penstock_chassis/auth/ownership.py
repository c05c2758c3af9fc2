"""Which requests name a resource by its id, and whose that resource is.

A service declares this for each such method. The server's interceptor then answers for a resource of another namespace
exactly as for one that does not exist (R107), before the method's handler runs.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from penstock_chassis.auth.callers import Caller
from penstock_chassis.errors import PenstockError


@dataclass(frozen=True, slots=True)
class Owned:
    """The resources that a method's requests name.

    Attributes:
        ids: returns the ids in a request; empty ones name nothing.
        namespace_of: returns a resource's namespace; None if there is no such resource.
        unknown: the error for an id of which there is no resource, or the method's response if it is idempotent, as
            deletions are; a method with such a response has one request and one response.
    """

    ids: Callable[[Any], Iterable[str]]
    namespace_of: Callable[[str], Awaitable[str | None]]
    unknown: Callable[[str], PenstockError | Message]

    async def check(self, request: Any, caller: Caller) -> Message | None:
        """Returns the response for an unknown id, or raises its error, if the request names what is not the caller's.

        None if everything that it names is the caller's, or does not exist.
        """
        if caller.namespace is None:
            return None
        for resource_id in self.ids(request):
            if resource_id:
                namespace = await self.namespace_of(resource_id)
                if namespace is not None and namespace != caller.namespace:
                    answer = self.unknown(resource_id)
                    if isinstance(answer, PenstockError):
                        raise answer
                    return answer
        return None

    async def checked(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        """Yields the requests of a stream, each checked."""
        async for request in requests:
            await self.check(request, caller)
            yield request


def named(*fields: str) -> Callable[[Any], Iterable[str]]:
    """Returns a function that reads these fields of a request; a repeated field has any number of ids."""

    def ids(request: Any) -> Iterable[str]:
        for field in fields:
            value = getattr(request, field)
            yield from (value,) if isinstance(value, str) else value

    return ids
