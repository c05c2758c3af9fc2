"""Who watches a transfer, and what is given up when nobody goes on with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock_inference import transfers
from penstock_inference.engines.base import Engine, PauseMode, UpdatePhases
from penstock_inference.transfers import Transfers


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


async def test_two_parts_of_a_transfer_at_once_leave_no_guard_that_gives_up_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R44, R146: T1. What is watched is the transfer that is open, and nothing but it is given up."""
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
