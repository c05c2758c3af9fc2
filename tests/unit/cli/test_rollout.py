"""`penstock rollout` and `penstock branch` from the creation of rollouts to their end, however that comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import orjson
import pytest
from tests.support.waiting import eventually
from tests.unit.analysis.test_prices import attempt_of
from tests.unit.cli.test_group_progress import LOST, event

from penstock.analysis.prices import Price, Prices
from penstock.cli.commands.rollout import _run, see_through
from penstock.cli.terminal.console import CLOSED
from penstock.client import (
    AgentChoice,
    FailedPrecondition,
    Mode,
    Penstock,
    RolloutOptions,
    Task,
    Trajectory,
    Unavailable,
)
from penstock.client.rollouts.handles import RolloutHandle
from penstock.client.types.results import AttemptFailed, CallFinished, Ended, EventPayload, Outcome, RolloutEvent
from penstock.client.wire.results import trajectory as from_proto

PRICES: Final = Prices({"*": Price(prompt=1_000_000, completion=0)})
"""Each call of `attempt_of` costs 10."""


class Handle:
    """Rollouts that have these events; then `then` is awaited."""

    def __init__(self, *events: tuple[str, EventPayload], then: Callable[[], Awaitable[None]] | None = None) -> None:
        self._events = events
        self._then = then
        self.cancelled = 0

    async def events(self) -> AsyncGenerator[RolloutEvent, None]:
        for rollout_id, payload in self._events:
            yield event(rollout_id, payload)
        if self._then is not None:
            await self._then()

    async def cancel(self, reason: str) -> None:
        assert reason == "interrupted"
        self.cancelled += 1


class Services:
    """The driver's trajectories: empty ones, but for those that are given; with `is_slow` the first read never ends."""

    def __init__(self, *, is_slow: bool = False, **found: Trajectory | Exception) -> None:
        self._found = found
        self._is_slow = is_slow
        self.read = asyncio.Event()
        self.rollouts = self
        self.endpoints = SimpleNamespace(dashboard="")

    async def trajectory(self, rollout_id: str, *, bodies: bool) -> Trajectory:
        assert bodies
        is_first = not self.read.is_set()
        self.read.set()
        if self._is_slow and is_first:
            await asyncio.Event().wait()
        found = self._found.get(rollout_id, from_proto(attempt_of()))
        if isinstance(found, Exception):
            raise found
        return found


async def seen(ps: Services, handle: Handle, folder: Path, n: int = 2, *, as_json: bool = True) -> int:
    return await see_through(
        cast(Penstock, ps), cast(RolloutHandle, handle), n, folder, as_json, "group: g", prices=PRICES
    )


def lines(printed: str) -> dict[str, dict[str, Any]]:
    """The last line of each rollout."""
    found = [line for line in map(orjson.loads, printed.splitlines()) if "completed" in line]
    return {line["rollout_id"]: line for line in found}


@pytest.mark.requirement("R74")
async def test_the_cost_is_of_all_attempts_and_each_answer_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of an answer that no later attempt replayed, of a rollout without a trajectory, and of a call without an
    event."""
    first = [CallFinished(call) for call in from_proto(attempt_of("e0", "lost")).calls]
    last = from_proto(attempt_of("c0", "c1", replayed=1))
    told: list[tuple[str, EventPayload]] = [("r", one) for one in first]
    told += [("r", AttemptFailed(1, LOST)), ("r", CallFinished(last.calls[0]))]
    told += [("none", first[0]), ("none", Ended(Outcome(failure=LOST))), ("r", Ended(Outcome()))]
    absent = FailedPrecondition("no gate", reason="TRAJECTORY_ABSENT")
    assert await seen(Services(r=last, none=absent), Handle(*told), tmp_path) == 1
    found = lines(capsys.readouterr().out)
    assert {name: line["cost"]["amount"] for name, line in found.items()} == {"r": 30, "none": 10}
    assert found["none"]["saved"] is None and (tmp_path / "r" / "turns.jsonl").stat().st_size


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("end", [BrokenPipeError(), SystemExit(CLOSED), Unavailable("gone", reason="GONE")])
async def test_whatever_ends_the_command_cancels_its_rollouts(end: BaseException, tmp_path: Path) -> None:
    """A reader that closes the output, as `head` does, and a service that is lost."""

    async def broken() -> None:
        raise end

    handle = Handle(then=broken)
    with pytest.raises(type(end)):
        await seen(Services(), handle, tmp_path)
    assert handle.cancelled == 1


@pytest.mark.requirement("R70")
async def test_rollouts_are_cancelled_where_nobody_reads_the_errors_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: object, **__: object) -> None:
        raise SystemExit(CLOSED)

    monkeypatch.setattr("penstock.cli.commands.rollout.err.print", unread)
    handle = Handle()
    with pytest.raises(SystemExit):
        await seen(Services(), handle, tmp_path, as_json=False)
    assert handle.cancelled == 1


@pytest.mark.requirement("R70")
async def test_what_has_ended_is_saved_and_shown_when_the_command_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first was being saved just then."""
    ps = Services(is_slow=True)
    task = asyncio.current_task()
    assert task is not None

    async def interrupted() -> None:
        await ps.read.wait()
        task.cancel()
        await asyncio.Event().wait()

    handle = Handle(("a", Ended(Outcome())), ("b", Ended(Outcome())), then=interrupted)
    with pytest.raises(asyncio.CancelledError):
        await seen(ps, handle, tmp_path)
    task.uncancel()
    assert lines(capsys.readouterr().out).keys() == {"a", "b"} and handle.cancelled == 1
    assert {path.parent.name for path in tmp_path.glob("*/turns.jsonl")} == {"a", "b"}


async def test_rollouts_are_saved_as_they_end(tmp_path: Path) -> None:
    """A trajectory that is there before the other rollout has ended."""
    saved = asyncio.Event()

    async def until_saved() -> None:
        await eventually(lambda: (tmp_path / "a" / "turns.jsonl").exists(), "the first is saved")
        saved.set()

    assert await seen(Services(), Handle(("a", Ended(Outcome())), then=until_saved), tmp_path) == 0
    assert saved.is_set()


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("n", [1, 2])
async def test_a_rollout_that_is_created_while_the_command_is_interrupted_is_cancelled(n: int, tmp_path: Path) -> None:
    begun, done, handle = asyncio.Event(), asyncio.Event(), Handle()

    async def create(*_: object, **__: object) -> Handle:
        begun.set()
        await done.wait()
        return handle

    ps = SimpleNamespace(rollouts=SimpleNamespace(create=create), groups=SimpleNamespace(create=create))
    task, agent = Task(task_id="t", instruction="x"), AgentChoice(name="shell")
    options: RolloutOptions = {"mode": Mode.TRANSPARENT_PROXY}
    running = asyncio.create_task(_run(cast(Penstock, ps), task, agent, n, options, tmp_path, None, as_json=True))
    await begun.wait()
    running.cancel()
    done.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert handle.cancelled == 1


async def test_a_trajectory_that_cannot_be_saved_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends by its error, once all others are saved and it was tried again."""
    ended = [(name, Ended(Outcome())) for name in "abc"]
    handle = Handle(*ended)
    with pytest.raises(Unavailable, match="the gate is away"):
        await seen(Services(b=Unavailable("the gate is away")), handle, tmp_path)
    assert handle.cancelled == 0
    printed = capsys.readouterr()
    saved = {name: line["saved"] for name, line in lines(printed.out).items()}
    assert saved == {"a": str(tmp_path / "a"), "b": None, "c": str(tmp_path / "c")}
    assert "b is not saved: the gate is away" in printed.err
