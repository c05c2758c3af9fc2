"""What the plug-ins of trainers share, on real services: the trainer's engine answers, and nothing runs on unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from tests.support.policy import in_shell, in_turn, prompt_text, sampled
from tests.support.services.stack import Running, running

from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, CannotAnswer
from penstock.client import Completion, InvalidArgument, ModelCall
from penstock.client.errors import RolloutFailed
from penstock.client.transport.endpoints import write_connection

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSION = 5
WORKS = in_turn(in_shell("echo kiwi > out.txt"), "It is written.")
TASKS = {
    "graded": {"commands": [{"shell": "grep -q kiwi out.txt"}], "reward": "passed_share"},
    "ungraded": {"commands": [{"shell": "true"}], "reward": "file"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("stack"), agents=False) as found:
        yield found


@pytest.fixture
def rollouts(stack: Running, tmp_path: Path) -> AgentRollouts:
    connection = tmp_path / "connection.json"
    write_connection(connection, stack.stack.endpoints, pid=0)
    (tmp_path / "tasks").mkdir()
    for task_id, verifier in TASKS.items():
        content = {"task_id": task_id, "instruction": "Write kiwi to out.txt.", "verifier": verifier}
        (tmp_path / "tasks" / f"{task_id}.yaml").write_text(yaml.safe_dump(content))
    labels = {"test": tmp_path.name}
    return AgentRollouts.load(tmp_path / "tasks", "shell", connection=connection, tries=2, labels=labels)


async def causes(stack: Running, rollouts: AgentRollouts) -> list[str]:
    """Why each of the test's rollouts ended."""
    found = [one async for one in stack.ps.rollouts.list(labels=rollouts.options["labels"])]
    outcomes = [one.outcome for one in found]
    return ["running" if one is None else "" if one.failure is None else str(one.failure.cause) for one in outcomes]


@pytest.mark.requirement("R82", "R84")
async def test_row_of_a_trainer_has_what_its_engine_sampled(stack: Running, rollouts: AgentRollouts) -> None:
    given: list[tuple[int, float]] = []

    async def engine(call: ModelCall) -> Completion:
        ids, logprobs = sampled(WORKS(prompt_text(call)))
        given.extend(zip(ids, logprobs, strict=True))
        return Completion.of_tokens(ids, logprobs, policy_version=VERSION)

    row = await rollouts.row("graded", engine)
    mask = row.sample.loss_mask
    assert given and given == list(zip(row.sample.input_ids[mask].tolist(), row.logprobs[mask].tolist(), strict=True))
    assert (row.reward, row.policy_versions) == (1.0, (VERSION,))
    assert await causes(stack, rollouts) == [""]


async def test_rollout_without_a_reward_is_run_again_and_then_an_error(stack: Running, rollouts: AgentRollouts) -> None:
    async def engine(call: ModelCall) -> Completion:
        return Completion.of_tokens(*sampled("I did nothing."), policy_version=VERSION)

    with pytest.raises(RolloutFailed) as raised:
        await rollouts.row("ungraded", engine)
    assert raised.value.reason == "NOTHING_TO_LEARN" and "verifier" in str(raised.value)
    assert len(await causes(stack, rollouts)) == rollouts.tries


async def test_error_of_a_trainers_engine_is_raised_as_it_is_and_cancels_the_rollout(
    stack: Running, rollouts: AgentRollouts
) -> None:
    async def engine(call: ModelCall) -> Completion:
        raise LookupError("no server is left")

    with pytest.raises(LookupError, match="no server is left"):
        await rollouts.row("graded", engine)
    assert await causes(stack, rollouts) == ["cancelled"]


async def test_call_that_an_engine_cannot_answer_is_the_agents_error_and_not_the_rollouts_end(
    stack: Running, rollouts: AgentRollouts
) -> None:
    """An outgrown context is the policy's doing: what was sampled before is graded and learned from."""
    seen: list[int] = []

    async def engine(call: ModelCall) -> Completion:
        seen.append(len(call.messages))
        if call.index:
            raise CannotAnswer("4097 tokens of 4096")
        return Completion.of_tokens(*sampled(WORKS(prompt_text(call))), policy_version=VERSION)

    row = await replace(rollouts, messages=True).row("graded", engine)
    assert (row.reward, len(row.sample.turns)) == (1.0, 1)
    assert len(seen) >= 2 and all(seen)


async def test_cancelled_trainer_leaves_no_rollout(stack: Running, rollouts: AgentRollouts) -> None:
    asked = asyncio.Event()
    stopped: list[str] = []

    async def engine(call: ModelCall) -> Completion:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(call.call_id)
        raise AssertionError("unreachable")

    training = asyncio.create_task(rollouts.row("graded", engine))
    await asked.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert len(stopped) == 1
    assert await causes(stack, rollouts) == ["cancelled"]


@pytest.mark.parametrize(
    ("task_id", "reason"), [("pear", "TASK_UNKNOWN"), (None, "TASK_UNKNOWN"), (["graded"], "TASK_UNKNOWN")]
)
async def test_row_of_data_without_a_task_starts_nothing(
    stack: Running, rollouts: AgentRollouts, task_id: object, reason: str
) -> None:
    async def engine(call: ModelCall) -> Completion:
        raise AssertionError("unreachable")

    with pytest.raises(InvalidArgument) as raised:
        await rollouts.row(task_id, engine)
    assert raised.value.reason == reason
    assert await causes(stack, rollouts) == []
