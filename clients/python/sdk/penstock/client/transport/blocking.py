"""An event loop in a background thread, and wrappers that call asynchronous objects on it and wait."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

T = TypeVar("T")

_CLOSED: Final = "This connection is closed"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Nothing is begun once the loop is asked to end: nobody would report that it never came to run.
        # Reentrant: a signal's handler may close the loop.
        self._lock = threading.RLock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="penstock-sync", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; wait for its result in another thread than the loop's. `close` cancels it.

        Raises:
            RuntimeError: the loop is closed, or this is its own thread.
        """
        with self._beginning(coroutine):
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine and returns its result; an interrupt of the waiting thread cancels it, and is raised
        once it has ended.

        Raises:
            RuntimeError: the loop is closed, also meanwhile, or this is its own thread.
        """
        tasks: list[asyncio.Task[Any]] = []
        ended = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: ended.set())

        with self._beginning(coroutine):
            self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            with suppress(RuntimeError):  # the loop has ended, and the coroutine with it
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # `start` came before
            ended.wait()  # who cleans up next finds nothing that still runs
            raise
        if tasks[0].cancelled():
            raise RuntimeError(_CLOSED)
        return tasks[0].result()

    def close(self) -> None:
        """Cancels what runs, which raises in the threads that wait for it, and ends the thread. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        """Runs the loop, and ends it as `asyncio.run` does."""
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    @contextmanager
    def _beginning(self, coroutine: Coroutine[Any, Any, Any]) -> Iterator[None]:
        """A block that may give the coroutine to the loop. Raises as `submit`."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("penstock.client.sync cannot be used from its own event loop")
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise RuntimeError(_CLOSED)
            yield


async def _cancel_all() -> None:
    """Cancels all other tasks of the loop and waits for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


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
