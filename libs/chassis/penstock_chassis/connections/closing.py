"""What ends with a channel: its calls fail as they do where nothing listens.

grpc.aio ends the calls of a channel that closes with CancelledError. Their tasks would end as if their owners had
cancelled them, and no error would be seen: a task group does not notice a child that was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Self, TypeVar

import grpc

T = TypeVar("T")


class Closing:
    """Whether a channel is closed; its calls ask. Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        """Raises grpc.aio.AioRpcError, UNAVAILABLE, if the channel is closed."""
        if self.is_closed:
            raise closed()

    async def outcome(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of an operation of a call.

        Raises:
            grpc.aio.AioRpcError: the call's error; UNAVAILABLE if the channel was closed under it.
            asyncio.CancelledError: the task was cancelled meanwhile, or the call was on an open channel.
        """
        before = cancellations()
        try:
            return await operation()
        except asyncio.CancelledError as error:
            if self.is_closed and cancellations() <= before:
                raise closed() from error
            raise


class ClosableCall:
    """A call with a stream, of a channel that may be closed. `call` is None if it was closed before the call began."""

    __slots__ = ("_call", "_closing")

    def __init__(self, call: Any, closing: Closing) -> None:
        self._call = call
        self._closing = closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._begun(), name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._closing.outcome(self._begun).__await__()

    async def write(self, request: Any) -> None:
        """Sends a message. Raises as Closing.outcome."""
        await self._closing.outcome(lambda: self._begun().write(request))

    async def done_writing(self) -> None:
        """Ends the requests. Raises as Closing.outcome."""
        await self._closing.outcome(lambda: self._begun().done_writing())

    def cancel(self) -> bool:
        """Cancels the call; returns whether it was in progress."""
        return self._call is not None and bool(self._call.cancel())

    def _begun(self) -> Any:
        if self._call is None:
            raise closed()
        return self._call


class ClosableStream(ClosableCall):
    """A call whose answer is a stream."""

    __slots__ = ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._closing.outcome(lambda: anext(aiter(self._begun())))

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last. Raises as Closing.outcome."""
        return await self._closing.outcome(lambda: self._begun().read())


def cancellations() -> int:
    """How often the current task has been asked to end: more than before means that a CancelledError is its own.

    They are compared, since a task that cleans up after its cancellation keeps its number.
    """
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def closed() -> grpc.aio.AioRpcError:
    """The error of a call on a closed channel."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="The channel was closed.")
