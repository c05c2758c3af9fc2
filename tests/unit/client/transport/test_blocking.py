"""Waiting for an event loop of another thread: how such a wait is interrupted, and how it ends with the loop."""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from tests.support.waiting import GUARD_S, eventually
from tests.unit.client.conftest import TOKEN, Fakes, Gate

from penstock.client import sync
from penstock.client.transport.blocking import Loop, Standin
from penstock.client.transport.rpc import Backoff


class Live:
    """An object that gives nothing, until it is cancelled; its clean-up takes a while."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.cleaned_up = False
        self.interrupt: threading.Thread | None = None
        """Which thread gets SIGINT while it waits."""

    async def calls(self) -> AsyncGenerator[int, None]:
        """Yields nothing."""
        try:
            if (thread := self.interrupt) is not None and thread.ident is not None:
                ident = thread.ident
                await eventually(lambda: sys._current_frames()[ident].f_code.co_name == "wait", "the thread waits")
                signal.pthread_kill(ident, signal.SIGINT)
            self.waits.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            self.cleaned_up = True

    async def result(self) -> None:
        """Waits for ever."""
        self.waits.set()
        await asyncio.Event().wait()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.mark.requirement("R32")
def test_an_interrupted_loop_raises_the_interrupt_once_it_is_cleaned_up(loop: Loop) -> None:
    """Ctrl-C in the loop of the module's docstring."""
    live = Live()
    live.interrupt = threading.current_thread()
    with pytest.raises(KeyboardInterrupt):
        for _ in Standin(live, loop).calls():
            raise AssertionError("there is no call")
    assert live.cleaned_up


@pytest.mark.requirement("R32")
@pytest.mark.parametrize("method", ["calls", "result"])
def test_a_closed_connection_ends_the_waits_of_all_threads(method: str) -> None:
    """Else they would wait for ever, and keep the interpreter from its end."""
    loop, live = Loop(), Live()
    raised: list[BaseException] = []

    def waiting() -> None:
        try:
            for _ in getattr(Standin(live, loop), method)() or ():
                raise AssertionError("there is no call")
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread
            raised.append(error)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    assert live.waits.wait(GUARD_S)
    loop.close()
    thread.join(GUARD_S)
    (error,) = raised
    assert isinstance(error, RuntimeError) and "closed" in str(error)
    assert live.cleaned_up == (method == "calls")
    with pytest.raises(RuntimeError, match="closed"):
        Standin(live, loop).result()


@pytest.mark.requirement("R32")
async def test_a_closed_connection_ends_a_loop_over_calls(
    fakes: Fakes, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer's thread, whose session ends with it."""
    monkeypatch.setattr(Backoff, "next", lambda *_: 3600.0)  # the session does not connect again while it is closed
    has_a_call = threading.Event()

    async def gate(stream: Gate) -> None:
        await stream.hello()
        await stream.calls("c1")
        assert await stream.read() is None

    fakes.converse(gate)
    target = dict.fromkeys(("sandbox", "driver", "interception", "inference"), address)
    ps = sync.connect(target, TOKEN)

    def trainer() -> None:
        with ps.intercept() as session:
            for _ in session.calls():
                has_a_call.set()

    training = asyncio.create_task(asyncio.to_thread(trainer))
    assert await asyncio.to_thread(has_a_call.wait, GUARD_S)
    await asyncio.to_thread(ps.close)
    with pytest.raises(RuntimeError, match="closed"):
        await training
