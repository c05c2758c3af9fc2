"""`penstock doctor --live` against real services: each trouble is made for real, and named; a healthy stack is healthy.

A machine that is busy with other tests holds loops up, which the doctor rightly says: that warning is left out here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.integration.operations.conftest import Stack
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import eventually_async

from penstock.cli.commands.doctor.live import Diagnosis, examine
from penstock.client import Completion, SandboxSpec, StalePolicy, Task
from penstock.client.operations import ROLLOUT_LABEL, TERMINAL_LABEL
from penstock.client.transport.endpoints import write_connection
from penstock.interception.v1 import interception_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def looked_at(stack: Stack, **options: Any) -> Diagnosis:
    """What the doctor finds, for somebody who waits for nothing."""
    found = await examine(stack.services.endpoints, 0.0, options.get("min_free_bytes", 0))
    return replace(found, troubles=[trouble for trouble in found.troubles if trouble.reason != "LOOP_LAG"])


async def reasons(stack: Stack, **options: Any) -> set[str]:
    """Of the troubles."""
    return {trouble.reason for trouble in (await looked_at(stack, **options)).troubles}


async def well_again(stack: Stack) -> None:
    """Nothing is wrong any more."""

    async def well() -> bool:
        return await reasons(stack) == set()

    await eventually_async(well, "well again")


async def becomes(stack: Stack, reason: str) -> Diagnosis:
    """The diagnosis as soon as this is what is wrong, and nothing else."""
    found: list[Diagnosis] = []

    async def named() -> bool:
        found.append(await looked_at(stack))
        return {trouble.reason for trouble in found[-1].troubles} == {reason}

    await eventually_async(named, reason)
    return found[-1]


async def test_healthy_services_are_reported_healthy(stack: Stack) -> None:
    """All four answer, with version, age and clock; nothing is wrong, and the exit code says so."""
    diagnosis = await looked_at(stack)
    assert not diagnosis.troubles and diagnosis.healthy
    assert {status.service for status in diagnosis.services} == {"sandbox", "driver", "interception", "inference"}
    for status in diagnosis.services:
        assert status.version == "0.1.0" and status.up > 0 and abs(status.clock_skew) <= status.clock_error + 0.1
        assert status.resident_bytes > 0 and 0 < status.open_files < status.max_files


async def test_waiting_calls_without_a_trainer_are_reported(stack: Stack) -> None:
    """A stalled run is named: which rollouts wait, and that nobody's selector matches them."""
    async with stack.agent() as agent:
        agent.asks()
        diagnosis = await becomes(stack, "TRAINER_ABSENT")
        (trouble,) = diagnosis.troubles
        assert trouble.service == "interception" and trouble.grave and not diagnosis.healthy
        assert trouble.subjects == (agent.rollout_id,) and "selector" in trouble.advice
    await well_again(stack)


async def test_trainer_that_answers_nothing_is_reported(stack: Stack) -> None:
    """Attached, without acknowledgements: the session is named, and its identity."""
    async with stack.agent() as agent, stack.ps.intercept(rollout_ids=[agent.rollout_id], identity="sleepy") as session:
        agent.asks()
        await anext(session.calls())
        (trouble,) = (await becomes(stack, "TRAINER_STALLED")).troubles
        assert "sleepy" in trouble.message and session.session_id in trouble.message
    await well_again(stack)


async def test_a_trainer_without_credit(stack: Stack) -> None:
    """Calls that wait for credit are told from those that nobody wants: a warning."""
    async with stack.agent() as agent, stack.ps.intercept(rollout_ids=[agent.rollout_id]) as session:
        session.set_credits(0)
        # What is said on a session arrives in order, and these are answered: the gate has the credits before the call.
        await session.pause("credits")
        await session.resume()
        agent.asks()
        diagnosis = await becomes(stack, "CREDITS_USED_UP")
        assert diagnosis.healthy and "set_credits" in diagnosis.troubles[0].advice
    await well_again(stack)


async def test_a_pause_that_nobody_ends(stack: Stack) -> None:
    """Calls that a trainer holds back for a weight update are no trainer's silence."""
    async with stack.agent() as agent, stack.ps.intercept(rollout_ids=[agent.rollout_id]) as session:
        await session.pause("weights")
        agent.asks()
        await becomes(stack, "CALLS_HELD_BACK")
        await session.resume()
    await well_again(stack)


async def test_weights_that_never_come(stack: Stack) -> None:
    """A policy version that is asked for and is not there: at the engine, and in a trainer's answers."""
    policy = interception_pb2.PolicyVersionConstraint(min_version=7)
    proxy = interception_pb2.MODE_TRANSPARENT_PROXY
    async with stack.agent(mode=proxy, policy=policy) as agent:
        agent.asks()

        async def named() -> bool:
            return await reasons(stack) == {"POLICY_STUCK", "SOURCE_SLOW"}

        await eventually_async(named, "POLICY_STUCK")
    await well_again(stack)
    async with stack.agent(policy=policy) as agent, stack.ps.intercept(rollout_ids=[agent.rollout_id]) as session:
        agent.asks()
        call = await anext(session.calls())
        old = await stack.ps.inference.generate(call.prompt_token_ids, call.sampling)
        assert isinstance(old, Completion)
        with pytest.raises(StalePolicy):
            await call.deliver(old)
        await becomes(stack, "POLICY_STUCK")
    await well_again(stack)


async def test_an_engine_that_somebody_paused(stack: Stack) -> None:
    """And who is to resume it."""
    await stack.ps.inference.pause()
    try:
        (trouble,) = (await becomes(stack, "ENGINE_PAUSED")).troubles
        assert trouble.service == "inference" and "resume" in trouble.advice
    finally:
        await stack.ps.inference.resume()
    await well_again(stack)


async def test_sandboxes_of_rollouts_that_are_over(stack: Stack) -> None:
    """A leak is named by sandbox; it is grave, or a warning where another driver may have made it."""
    handle = await stack.ps.rollouts.create(Task(task_id="t", instruction="Do it."), "shell", mode="transparent_proxy")
    await handle.result()
    async with await stack.ps.sandboxes.create(SandboxSpec(labels={ROLLOUT_LABEL: handle.rollout_id})) as left:
        (trouble,) = (await becomes(stack, "SANDBOXES_LEFT")).troubles
        assert trouble.subjects == (left.sandbox_id,) and trouble.grave
    async with await stack.ps.sandboxes.create(SandboxSpec(labels={ROLLOUT_LABEL: "of-another-driver"})):
        assert (await becomes(stack, "SANDBOXES_STRANGE")).healthy
    await well_again(stack)


async def test_sandboxes_of_terminals_that_are_over(stack: Stack) -> None:
    """As those of rollouts; a terminal that is open has its own, and one that has just ended may have it a moment."""
    async with await stack.ps.terminals.open(Task(task_id="t", instruction="Do it.")) as terminal:
        await well_again(stack)
        other = await stack.ps.sandboxes.create(SandboxSpec(labels={TERMINAL_LABEL: terminal.terminal_id}))
    async with other:
        (trouble,) = (await becomes(stack, "SANDBOXES_LEFT")).troubles
        assert trouble.subjects == (other.sandbox_id,) and trouble.grave
        assert await stack.ps.operations.left_sandboxes(patience=3600.0) == []
    async with await stack.ps.sandboxes.create(SandboxSpec(labels={TERMINAL_LABEL: "of-another-driver"})):
        assert (await becomes(stack, "SANDBOXES_STRANGE")).healthy
    await well_again(stack)


async def test_a_disk_that_is_nearly_full(stack: Stack) -> None:
    """Judged by what the operator wants to be free; each service's state is looked at where that service sees it."""
    diagnosis = await looked_at(stack, min_free_bytes=1 << 60)
    assert {trouble.reason for trouble in diagnosis.troubles} == {"DISK_LOW"}
    assert {trouble.service for trouble in diagnosis.troubles} == {"sandbox", "driver", "interception", "inference"}


async def test_a_service_that_is_away_and_a_token_that_is_refused(stack: Stack) -> None:
    """Both are told in words, and what the others say is told all the same."""
    nobody = f"127.0.0.1:{unused_port()}"
    diagnosis = await examine(replace(stack.services.endpoints, sandbox=nobody), 0.0, 0)
    (trouble,) = (trouble for trouble in diagnosis.troubles if trouble.reason != "LOOP_LAG")
    assert (trouble.service, trouble.reason) == ("sandbox", "SERVICE_UNREACHABLE") and "start it" in trouble.advice
    assert len(diagnosis.services) == 3
    diagnosis = await examine(replace(stack.services.endpoints, token="wrong"), 0.0, 0)
    assert {trouble.reason for trouble in diagnosis.troubles} == {"CREDENTIAL_INVALID"} and not diagnosis.services


async def test_doctor_prints_text_and_json_and_sets_its_exit_code(stack: Stack, tmp_path: Path) -> None:
    """0 when nothing is grave, 1 when something is; `--json` has the same facts."""
    connection = tmp_path / "connection.json"
    write_connection(connection, stack.services.endpoints, pid=None)
    code, said = await doctor(connection, "--min-free-gb", "0")
    assert code == 0 and ("All services are healthy" in said or "LOOP_LAG" in said)
    async with stack.agent() as agent:
        agent.asks()
        await becomes(stack, "TRAINER_ABSENT")
        code, said = await doctor(connection, "--json", "--patience", "0", "--min-free-gb", "0")
    report = orjson.loads(said)
    assert code == 1 and report["healthy"] is False and len(report["services"]) == 4
    assert [trouble["reason"] for trouble in report["troubles"] if trouble["grave"]] == ["TRAINER_ABSENT"]


async def doctor(connection: Path, *options: str) -> tuple[int | None, str]:
    """Runs the command as people do."""
    environment = {**os.environ, "PENSTOCK_CONNECTION": str(connection), "NO_COLOR": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli.main", "doctor", "--live", *options,
        env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode, said.decode()
