"""Which requests name a resource by its id, and whose that resource is.

A service declares this for each such method. Before the method's handler runs, the interceptor replaces an id of
another namespace by one of nothing, and in the handler's error puts it back. So the caller cannot see a difference
between what belongs to others and what does not exist (R107), also where a request is wrong in another way.
"""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from penstock_chassis.auth.callers import Caller
from penstock_chassis.errors import PenstockError, Violation


@dataclass(frozen=True, slots=True)
class Owned:
    """The resources that a method's requests name.

    Attributes:
        fields: names of the request's fields with ids, text or repeated text; an empty id names nothing. A dotted name
            is of a field in a message.
        namespace_of: returns a resource's namespace; None if there is no such resource.
    """

    fields: tuple[str, ...]
    namespace_of: Callable[[str], Awaitable[str | None]]


class Hidden:
    """The ids of one call that were replaced, for a caller of one namespace."""

    __slots__ = ("_caller", "_owned", "_replaced")

    def __init__(self, owned: Owned, caller: Caller) -> None:
        self._owned = owned
        self._caller = caller
        self._replaced: dict[str, str] = {}

    async def hide(self, request: Any) -> Any:
        """Replaces, in the request, the ids of resources of other namespaces."""
        for field in self._owned.fields:
            *path, name = field.split(".")
            message = request
            for step in path:
                if not message.HasField(step):
                    break
                message = getattr(message, step)
            else:
                value = getattr(message, name)
                if isinstance(value, str):
                    if value and (other := await self._of_nothing(value)):
                        setattr(message, name, other)
                else:
                    for index, item in enumerate(value):
                        if item and (other := await self._of_nothing(item)):
                            value[index] = other
        return request

    async def hide_each(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Does the same for each request of a stream."""
        async for request in requests:
            yield await self.hide(request)

    def shown(self, error: BaseException) -> BaseException:
        """Returns the handler's error with the ids that the caller sent."""
        if not self._replaced or not isinstance(error, PenstockError):
            return error
        return type(error)(
            self._put_back(error.message),
            reason=error.reason,
            metadata={key: self._put_back(value) for key, value in error.metadata.items()},
            violations=[
                Violation(self._put_back(one.field), self._put_back(one.description)) for one in error.violations
            ],
            retry_after_s=error.retry_after_s,
        )

    async def _of_nothing(self, resource_id: str) -> str:
        """Returns an id of nothing that looks like this one; empty if the caller may use this one."""
        # One for each resource, however often a request names it.
        if (known := self._replaced.get(resource_id)) is not None:
            return known
        namespace = await self._owned.namespace_of(resource_id)
        if namespace is None or self._caller.may_reach(namespace):
            return ""
        other = resource_id[: min(len(resource_id) // 2, 64)] + secrets.token_hex(16)
        self._replaced[resource_id] = other
        return other

    def _put_back(self, text: str) -> str:
        for resource_id, other in self._replaced.items():
            text = text.replace(other, resource_id)
        return text
