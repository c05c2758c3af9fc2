"""Who watches a transfer, and what is given up when nobody goes on with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock_inference.engines.base import Engine, PauseMode, UpdatePhases
from penstock_inference.weights import transfers
from penstock_inference.weights.transfers import Transfers


class Taking:
    """An engine that takes tensors until it is told to go on, and remembers how transfers ended."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.taking = 0
        self.both = asyncio.Event()
        self.ended: list[bool] = []

    def info(self) -> Any:
        return SimpleNamespace(capabilities=SimpleNamespace(transfer_backends=("any",)), policy_version=1)

    async def init_transfer(self, backend: str, options: Any) -> None:
        raise AssertionError("not asked")

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        self.go_on.clear()

    async def transfer_tensors(self, descriptor: Any) -> None:
        self.taking += 1
        if self.taking == 2:
            self.both.set()
        await self.go_on.wait()

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        self.ended.append(commit)
        return UpdatePhases(0.0, 0.0)


@pytest.mark.requirement("R44", "R146")
async def test_concurrent_transfer_parts_leave_no_guard_that_ends_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T1. What is watched is the transfer that is open, and nothing but it is given up."""
    slept: list[asyncio.Event] = []
    watching = asyncio.Event()

    async def sleep(_: float) -> None:
        slept.append(asyncio.Event())
        watching.set()
        await slept[-1].wait()

    engine = Taking()
    place = Transfers(cast("Engine", engine))
    first = await place.start("one", 1, PauseMode.KEEP, 1.0)
    both = [asyncio.ensure_future(place.transfer(first, "{}")) for _ in range(2)]
    await engine.both.wait()
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        engine.go_on.set()
        await asyncio.gather(*both)
        await place.finish(first, commit=True)
        second = await place.start("two", 2, PauseMode.KEEP, 1.0)
        await watching.wait()
        for wake in slept[:-1]:
            wake.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.ended == [True]
        await place.finish(second, commit=True)
    assert engine.ended == [True, True]
    await place.aclose()


class Slow(Taking):
    """One whose starts and ends take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()
        self.started = 0

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        self.started += 1
        self.entered.set()
        await self.go_on.wait()

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        self.entered.set()
        await self.go_on.wait()
        return await super().finish_transfer(commit)


@pytest.mark.requirement("R44", "R146")
async def test_abandoned_end_continues_and_its_result_reaches_the_next_caller() -> None:
    """The version is in force; the answer that was lost is there for the repeat, at once and later."""
    engine = Slow()
    engine.go_on.set()
    place = Transfers(cast("Engine", engine))
    transfer = await place.start("one", 1, PauseMode.KEEP, 1.0)
    engine.go_on.clear()
    engine.entered.clear()
    left = asyncio.ensure_future(place.finish(transfer, commit=True))
    await engine.entered.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    again = asyncio.ensure_future(place.finish(transfer, commit=True))
    await asyncio.sleep(0)
    engine.go_on.set()
    assert (await again).policy_version == 1
    assert await place.finish(transfer, commit=True) == await again
    assert engine.ended == [True]
    await place.aclose()


@pytest.mark.requirement("R44")
async def test_the_same_start_twice_at_once_is_one_transfer() -> None:
    """The repeat of a request whose first caller still waits for the engine to stand still."""
    engine = Slow()
    place = Transfers(cast("Engine", engine))
    both = [asyncio.ensure_future(place.start("one", 1, PauseMode.KEEP, 1.0)) for _ in range(2)]
    await engine.entered.wait()
    engine.go_on.set()
    first, second = await asyncio.gather(*both)
    assert first == second and engine.started == 1
    await place.aclose()
