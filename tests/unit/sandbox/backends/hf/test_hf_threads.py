"""The threads that blocking SDKs run in: who asked is answered, whatever an SDK does, and cancelled by nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from penstock_sandbox.backends.hf.client import Remote
from penstock_sandbox.backends.hf.pipes import Feed, PipeEnded, SplitPipe
from penstock_sandbox.backends.hf.threads import Threads

pytestmark = pytest.mark.asyncio

STRAYS = [asyncio.CancelledError, StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest_asyncio.fixture
async def threads() -> AsyncIterator[Threads]:
    """For two streams."""
    made = Threads(2)
    yield made
    made.close()


@pytest.mark.requirement("R8", "R32")
@pytest.mark.parametrize("stray", STRAYS)
async def test_sdk_exceptions_cancel_and_end_nothing_here(threads: Threads, stray: type[BaseException]) -> None:
    """It is told as a failure of the call, at once."""

    def call() -> None:
        raise stray

    for kind in (threads.ask, threads.create):
        with pytest.raises(RuntimeError, match=stray.__name__):
            await kind(call)
    assert await threads.ask(lambda: "the thread lives") == "the thread lives"


@pytest.mark.requirement("R43")
@pytest.mark.parametrize("stray", STRAYS)
async def test_a_stream_that_ends_in_any_way_ends_its_pipe(threads: Threads, stray: type[BaseException]) -> None:
    """Nobody waits for what will not come any more."""

    def stream(argv: list[str], feed: Feed, complain: Feed) -> int | None:
        feed("123\nfirst")
        raise stray

    # The pipe is never sent to and ends by itself: of its sandbox nothing is asked.
    pipe = await SplitPipe.open(cast(Remote, None), ["attendant"], stream, threads)
    heard = []
    with pytest.raises(PipeEnded, match=stray.__name__):
        async for piece in pipe.received():
            heard.append(piece)  # noqa: PERF401 - what came before the end is wanted
    assert heard == [b"first"]
    await pipe.aclose()


@pytest.mark.requirement("R32")
async def test_cancelled_caller_does_not_wait_for_the_sdk(threads: Threads) -> None:
    """What the thread still does is nobody's, and the next call has a thread."""
    begun, go_on = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait()

    asking = asyncio.create_task(threads.ask(call))
    await asyncio.to_thread(begun.wait)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await threads.ask(lambda: "answered") == "answered"
    go_on.set()
