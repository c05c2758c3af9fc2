"""A gate's start on a disk that refuses one step of it: opening, schema, key, recovery (R34, R50, R146).

Whoever starts it hears which file it is and what to do; the next start finds all that was there, and nothing else.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from tests.support.disks.failing_disk import Opening, failing_to_open
from tests.support.disks.failing_files import Files, failing
from tests.support.disks.refused_writes import ERRORS, sweep
from tests.support.services.inner_gate import completion, inner_gate

from penstock_chassis.disk import refused_start
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.journal import refusal
from penstock_interception.domain.calls import CallState
from penstock_interception.store.store import CallStore
from penstock_interception.testing import OpenGate


def check_told(error: Exception, directory: Path) -> None:
    """That an error of a start is one clear message."""
    told = refused_start(error, directory) or refusal(error) or error
    assert isinstance(told, Unavailable | FailedPrecondition), error
    if not isinstance(error, Unavailable | FailedPrecondition) and refusal(error):
        return  # of the recovery: `run` adds the directory
    assert str(directory) in told.message and "state_dir" in told.message, told


async def leave(directory: Path) -> None:
    """What a gate that was killed left: rollouts with calls in every state."""
    async with inner_gate(directory) as gate:
        gate.join()
        rollout = await gate.open()
        call = await gate.ask(rollout, "a")
        await gate.interceptor.deliver(call.id, call.lease_id, completion("answer"))
        await call.ended
        await gate.ask(rollout, "bb")
        await gate.open(request_id="open-r2", rollout_id="r2")
        await gate.interceptor.rollouts.close("r2", "DONE")


async def check(gate: OpenGate) -> None:
    """All of it is there."""
    rollout = gate.interceptor.registry.rollout("r1")
    assert rollout.calls[0].state is CallState.DELIVERED and len(rollout.calls) == 2
    assert gate.interceptor.registry.rollout("r2").close_reason == "DONE"


@pytest.mark.requirement("R50", "R146")
@ERRORS
async def test_refused_step_of_a_first_start_is_named_and_repeatable(tmp_path: Path, code: int, undoes: bool) -> None:
    """No half of a schema is left; every step of opening is refused in its turn."""

    async def play(directory: Path, disk: Opening) -> None:
        with failing_to_open(disk):
            try:
                store = await CallStore.open(directory)
            except Exception as error:  # noqa: BLE001 - each is looked at
                check_told(error, directory)
            else:
                await store.aclose()
        async with inner_gate(directory) as gate:
            await gate.open()

    swept = await sweep(play, tmp_path, lambda at: Opening(code, at=at, undoes=undoes))
    assert any(step.startswith("CREATE TABLE calls") for step in swept.refused)
    assert any(step.startswith("PRAGMA journal_mode") for step in swept.refused)


@pytest.mark.requirement("R34", "R146")
@ERRORS
async def test_a_refused_step_of_a_later_start_loses_nothing(tmp_path: Path, code: int, undoes: bool) -> None:
    """Of what was journalled all is there at the next start, whichever read or write was refused."""
    await leave(tmp_path / "left")

    async def play(directory: Path, disk: Opening) -> None:
        shutil.copytree(tmp_path / "left", directory)
        with failing_to_open(disk):
            try:
                async with inner_gate(directory) as gate:
                    disk.armed = False
                    await check(gate)
            except Exception as error:
                if isinstance(error, AssertionError):
                    raise
                check_told(error, directory)
        async with inner_gate(directory) as gate:
            await check(gate)

    swept = await sweep(play, tmp_path / "played", lambda at: Opening(code, at=at, undoes=undoes))
    assert any(step.startswith("SELECT") for step in swept.refused)


@pytest.mark.requirement("R5", "R146")
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_refused_file_of_a_first_start_is_named_and_repeatable(tmp_path: Path, code: int, torn: bool) -> None:
    """The directory, the journal, and the key that tokens are made under, which is whole or not there."""

    async def play(directory: Path, disk: Files) -> None:
        with failing(disk):
            try:
                store = await CallStore.open(directory)
            except Exception as error:  # noqa: BLE001 - each is looked at
                check_told(error, directory)
            else:
                await store.aclose()
        async with inner_gate(directory) as gate:
            await gate.open()
        assert len((directory / "token.key").read_bytes()) == 32
        assert not (directory / "token.new").exists()

    swept = await sweep(play, tmp_path / "played", lambda at: Files(code, tmp_path / "played", at=at, torn=torn))
    assert {"mkdir", "open", "write", "fsync", "rename"} <= set(swept.refused)
