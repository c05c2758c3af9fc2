"""An event loop in a background thread, and wrappers that call asynchronous objects on it and wait."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

T = TypeVar("T")


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
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("This connection is closed")
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
        """Stops the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Standin:
    """Synchronous wrapper of an object of the asynchronous client."""

    classes: ClassVar[Mapping[type, type["Standin"]]] = {}
    """The wrapper of each class that has one; everything else is a value, and stays."""

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
        wrapper = self.classes.get(type(value))
        if wrapper is not None:
            return wrapper(value, self._loop)
        if isinstance(value, list):
            return [self._wrap(item) for item in value]
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


async def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method on the loop, whether it is a coroutine or not."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items)
