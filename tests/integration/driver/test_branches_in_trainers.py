"""Branches of a real rollout in TRL's forms: what is trained, with which logprobs, and what is context."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio
from tests.support.copying import copy_task, finish, training
from tests.support.policy import Trainer, in_shell, in_turn
from tests.support.services.stack import Running, running

from penstock.adapters.trainers import select, trl
from penstock.client import Command, RewardFrom, RolloutResult, Trajectory, Verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAD = 0
PARENT_VERSION, VERSION = 3, 5
AT = 1
"""The call from which branches go on by themselves."""
WORKS = in_turn(in_shell("echo one"), in_shell("bash work.sh"), "The word is copied.")
IDLES = in_turn(in_shell("echo one"), in_shell("echo idle"), "I did nothing.")

VERIFIER = Verifier(commands=[Command(shell="grep -q kiwi out.txt")], reward=RewardFrom.PASSED_SHARE)

Token = tuple[int, float]
"""An id with its logprob."""


@dataclass(frozen=True, slots=True)
class Branched:
    """A parent and its branches. `sampled` are the tokens of each call that the trainer answered, by the call's id."""

    parent: Trajectory
    branches: list[RolloutResult]
    sampled: dict[str, list[Token]]

    def of(self, trajectory: Trajectory, calls: slice) -> list[Token]:
        """The tokens of a trajectory's calls, as the trainer gave them."""
        return [token for call in trajectory.calls[calls] for token in self.sampled[call.call_id]]


def given(trainer: Trainer) -> dict[str, list[Token]]:
    """What a trainer has answered so far."""
    found = {}
    for call_id, answer in trainer.answers.items():
        assert answer.token_ids is not None and answer.logprobs is not None
        found[call_id] = pairs(answer.token_ids, answer.logprobs)
    return found


def pairs(ids: Iterable[int], logprobs: Iterable[float]) -> list[Token]:
    return [(int(one), float(np.float32(two))) for one, two in zip(ids, logprobs, strict=True)]


def masked(ids: list[int], mask: list[int], logprobs: list[float], *, by: int) -> list[Token]:
    """The tokens of TRL's parallel lists whose mask is `by`."""
    assert len(ids) == len(mask) == len(logprobs)
    return [token for token, kept in zip(pairs(ids, logprobs), mask, strict=True) if kept == by]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("stack"), agents=False) as found:
        yield found


async def branched(stack: Running, *, train_prefix: bool) -> Branched:
    """Two branches of a rollout, of which one does the work; newer weights than their parent's sample them."""
    label = secrets.token_hex(8)
    async with training(stack, label, WORKS) as trainer:
        task = copy_task(stack, verifier=VERIFIER)
        parent = await stack.ps.rollouts.create(task, "shell", labels={"test": label})
        finished = await finish(parent)
        assert finished.reward == 1.0, finished.agent_said()
        before = await parent.trajectory()
        idle: set[str] = set()

        def reply(prompt: str) -> str:
            first = prompt.count("<|im_start|>assistant") - 1 == AT
            if first and not idle:
                idle.add("begun")
                return IDLES(prompt)
            return IDLES(prompt) if "echo idle" in prompt else WORKS(prompt)

        trainer.reply, trainer.version = reply, VERSION
        group = await parent.branch(AT, 2, train_prefix=train_prefix)
        return Branched(before, await group.results(samples_only=False), given(trainer))


@pytest.mark.requirement("R84", "R87", "R129")
async def test_branches_train_their_own_tokens_in_trls_forms(stack: Running) -> None:
    """Their parent's turns are masked, and no reason to call them stale: they are as old as what they sampled."""
    made = await branched(stack, train_prefix=False)
    selection = select(made.branches, one_sequence=True)
    output = trl.rollout_output(selection, filler_token_id=PAD)
    assert sorted(map(str, output["reward"])) == ["0.0", "1.0"]
    assert output["reward"] == [one.reward and one.reward.value for one in made.branches]
    assert output["policy_version"] == [VERSION, VERSION]
    context = [token_id for token_id, _ in made.of(made.parent, slice(AT))]
    for place, one in enumerate(made.branches):
        after = one.trajectory
        assert after is not None
        prompt, ids = output["prompt_ids"][place], output["completion_ids"][place]
        columns = ids, output["env_mask"][place], output["logprobs"][place]
        assert prompt == made.parent.prompt_of(made.parent.calls[0].call_id).tolist()
        assert prompt + ids == after.samples[0].input_ids.tolist()
        assert masked(*columns, by=1) == made.of(after, slice(AT, None))
        # The completion begins with what the parent sampled.
        assert ids[: len(context)] == context
        assert set(columns[1][: len(context)]) == {0}
        assert {logprob for _, logprob in masked(*columns, by=0)} == {0.0}

    samples = trl.rollout_samples(selection)
    assert [one["advantage"] for one in samples] == [1.0 if reward else -1.0 for reward in output["reward"]]
    assert [one["model_version"] for one in samples] == [VERSION, VERSION]
    assert {one["group_id"] for one in samples} == {0}
    for place, sample in enumerate(samples):
        assert sample["completion_mask"].tolist() == [0] * len(output["prompt_ids"][place]) + output["env_mask"][place]


@pytest.mark.requirement("R84", "R129")
async def test_branches_train_their_prefix_in_trls_form_where_that_is_asked(stack: Running) -> None:
    """With the parent's logprobs, and as old as the oldest of all that is trained."""
    made = await branched(stack, train_prefix=True)
    output = trl.rollout_output(select(made.branches, one_sequence=True), filler_token_id=PAD)
    assert output["policy_version"] == [PARENT_VERSION, PARENT_VERSION]
    for place, one in enumerate(made.branches):
        after = one.trajectory
        assert after is not None
        columns = output["completion_ids"][place], output["env_mask"][place], output["logprobs"][place]
        assert masked(*columns, by=1) == made.of(made.parent, slice(AT)) + made.of(after, slice(AT, None))
