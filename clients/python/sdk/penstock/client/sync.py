"""The client without `await`: the same names, driven by one event loop in a background thread.

    with connect() as ps:
        group = ps.groups.create(task, "shell", 8)
        for call in group.calls():
            call.deliver(ps.inference.generate(call.prompt_token_ids, call.sampling))
        for rollout in group.results():
            print(rollout.reward)

Each asynchronous object has a wrapper here with the same names: coroutines become blocking calls, asynchronous
iterators iterate, asynchronous blocks are `with` blocks. Values (tasks, completions, trajectories) are the very same.
Thread-safe.
"""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from penstock.client import connection
from penstock.client.agents import AgentsClient
from penstock.client.connection import Penstock
from penstock.client.inference.client import InferenceClient
from penstock.client.inference.weights import WeightTransfer
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.session import InterceptSession
from penstock.client.rollouts.client import GroupsClient, RolloutsClient
from penstock.client.rollouts.handles import GroupHandle, RolloutHandle
from penstock.client.sandboxes.client import SandboxesClient
from penstock.client.sandboxes.handle import Fork, SandboxHandle
from penstock.client.terminals import TerminalHandle, TerminalsClient
from penstock.client.transport.endpoints import Target, Tls

T = TypeVar("T")

_LIVE: Final = (
    Penstock,
    RolloutsClient,
    GroupsClient,
    InferenceClient,
    SandboxesClient,
    AgentsClient,
    TerminalsClient,
    RolloutHandle,
    GroupHandle,
    SandboxHandle,
    TerminalHandle,
    Fork,
    InterceptSession,
    ModelCall,
    WeightTransfer,
)
"""Objects that use a service, and so get a wrapper; everything else is a value."""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-sync", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; wait for its result in another thread than the loop's."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("penstock.client.sync cannot be used from its own event loop")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine and returns its result; an interrupt of the waiting thread cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Standin:
    """Synchronous wrapper of an object of the asynchronous client."""

    def __init__(self, target: Any, loop: Loop) -> None:
        self._target = target
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._target)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._target) if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._target, name)
        if not inspect.ismethod(value):
            return self._wrap(value)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._wrap(self._loop.run(_called(value, args, kwargs)))

        method.__name__, method.__doc__ = name, value.__doc__
        return method

    def __enter__(self) -> Self:
        self._loop.run(self._target.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._target.__aexit__(kind, error, trace))

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, _LIVE):
            return Standin(value, self._loop)
        if inspect.isasyncgen(value):
            return self._iterate(value)
        return value

    def _iterate(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    item = self._loop.run(_next(items))
                except StopAsyncIteration:
                    return
                yield self._wrap(item)
        finally:
            self._loop.run(items.aclose())


class SyncPenstock(Standin):
    """Returned by `connect`: owns the event loop, which ends with the block."""

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except BaseException:
            self._loop.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._loop.close()


def connect(target: Target | None = None, token: str | None = None, *, tls: Tls | None = None) -> SyncPenstock:
    """As `penstock.client.connect`, for `with`."""
    return SyncPenstock(connection.connect(target, token, tls=tls), Loop())


async def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method on the loop, whether it is a coroutine or not."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items)
