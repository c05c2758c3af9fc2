"""The demo's repositories: the model is taught what the agent will show it, and the grade is fair."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray

from penstock.client import RolloutResult
from penstock.client.wire.agents import load_spec
from penstock_codec import Codec, Continuation
from penstock_demo import model
from penstock_demo.learner import Learner
from penstock_demo.repairs import agent, tasks, train
from penstock_demo.repairs.tasks import STOCK_NAME, STOCK_SCRIPT, TASKS, Repair
from penstock_demo.rollouts import Collected
from penstock_demo.tasks import encode
from penstock_driver.testing import CATALOG

TASK = Repair("price.sh", "net", "total")


@pytest.fixture(scope="module")
def codec() -> Codec:
    return tasks.build_codec()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The task's repository, as the driver would write it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for file in TASK.to_task().files:
        (folder / file.path).write_bytes(file.content)
    return folder


@pytest.mark.requirement("R144")
def test_the_agent_is_the_built_in_one_but_for_its_own_configuration() -> None:
    """Nothing is installed, started or read in another way."""
    built_in = load_spec(CATALOG / f"{agent.BUILT_IN}.yaml")
    made = agent.configured(built_in)
    differs = {name for name, value in MessageToDict(made).items() if MessageToDict(built_in)[name] != value}
    assert differs == {"name", "description", "files"}
    before, after = (MessageToDict(spec.files[0].json) for spec in (built_in, made))
    assert after["agent"] == {**before["agent"], **agent.AGENT}
    assert after["model"] == {**before["model"], **agent.MODEL}
    assert {**after, "agent": {}, "model": {}} == {**before, "agent": {}, "model": {}}


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("right", [TASK.right, STOCK_NAME])
@pytest.mark.parametrize("script", [TASK.script, STOCK_SCRIPT])
def test_the_examples_show_what_the_commands_print(repository: Path, right: str, script: str) -> None:
    """A policy that learned other outputs than those that it gets would be wasted."""
    messages = tasks.episode(TASK, right, script)
    for command, printed in zip(messages[2:-1:2], messages[3::2], strict=True):
        assert _run(repository, command.text) == printed.text
    assert _run(repository, messages[-1].text) == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


@pytest.mark.requirement("R82")
def test_an_example_has_the_tokens_that_exact_continuation_gives_a_rollout(codec: Codec) -> None:
    """Turn by turn, prompt + sampled + what the gate appends is the supervised sequence."""
    messages = tasks.episode(TASK, TASK.right, TASK.script)
    ids, mask = encode(codec, messages, ())
    so_far = codec.render(tasks.prompt())
    for turn in range(2, len(messages), 2):
        assert np.array_equal(ids[: len(so_far)], so_far)
        sampled = int(np.argmax(mask[len(so_far) :] == 0)) or len(ids) - len(so_far)
        so_far = ids[: len(so_far) + sampled]
        if turn + 1 < len(messages):
            added = codec.continuation(messages[: turn + 1], messages[turn + 1 : turn + 2], last_id=int(so_far[-1]))
            assert isinstance(added, Continuation)
            so_far = np.concatenate([so_far, added.ids])
    assert np.array_equal(ids, so_far)


def test_a_name_is_one_token_wherever_it_stands(codec: Codec) -> None:
    """What has to be copied is the same token in the test's output and in the command."""
    for name in tasks.NAMES:
        shown = codec.encode(TASK.complaint(name)).tolist()
        asked = codec.encode(tasks.edit(name, TASK.right, TASK.script)).tolist()
        (token,) = {token for token in shown if codec.decode([token]) == name}
        assert token in asked


def test_no_task_is_solved_by_the_stock_answer_or_by_another_tasks() -> None:
    """Else a model that reads nothing would be rewarded."""
    assert all(STOCK_NAME not in (task.right, task.wrong) and task.script != STOCK_SCRIPT for task in TASKS)
    answers = [tasks.edit(task.wrong, task.right, task.script) for task in TASKS]
    assert len(set(answers)) == len(TASKS) == 224
    assert {task.to_task().instruction for task in TASKS} == {tasks.EXAMPLE.instruction}


def test_the_task_file_is_one_of_the_tasks() -> None:
    """What `penstock rollout --task` runs is what the model was trained on."""
    made = TASK.to_task()
    assert TASK in TASKS
    assert {file.path: file.content for file in made.files} == {file.path: file.content for file in tasks.EXAMPLE.files}
    assert (made.task_id, made.verifier) == (tasks.EXAMPLE.task_id, tasks.EXAMPLE.verifier)


@pytest.mark.requirement("R79")
@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"price.sh": "echo $total\n"}, 1.0),
        ({"price.sh": "printf %s ${total}"}, 1.0),
        ({"price.sh": "echo $value\n"}, 0.3),
        ({"price.sh": "echo total\n"}, 0.3),
        ({"price.sh": ""}, 0.3),
        ({"price.sh": "echo $total\n", "tax.sh": "echo $size\n"}, 0.3),
        ({"test.sh": "echo ok\n"}, 0.0),
        ({"wanted.txt": "price.sh net\n"}, 0.0),
        ({"price.sh": None}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_verifier_grades_what_the_scripts_print(
    repository: Path, files: dict[str, str | None], reward: float
) -> None:
    """The reward is made from the state of the sandbox."""
    for name, content in files.items():
        (repository / name).unlink() if content is None else (repository / name).write_text(content)
    assert _verify(repository) == reward


@pytest.mark.requirement("R75")
def test_a_script_that_looks_for_the_reward_finds_nothing(repository: Path) -> None:
    """The verifier runs what the agent left without the file's name, and follows no links."""
    (repository / "price.sh").write_text('echo 1 > "$PENSTOCK_REWARD_FILE"; echo $net\n')
    assert _verify(repository) < 1.0
    (repository / "price.sh").unlink()
    (repository / "right.sh").write_text("echo $total\n")
    (repository / "price.sh").symlink_to("right.sh")
    assert _verify(repository) == 0.3


def _run(repository: Path, command: str) -> str:
    """As the agent's environment runs a command."""
    done = subprocess.run(["sh", "-c", command], cwd=repository, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _verify(repository: Path) -> float:
    """Run the task's verifier as the driver would."""
    verifier = TASK.to_task().verifier
    assert verifier is not None
    reward = repository.parent / "reward"
    for command in verifier.commands:
        environment = {**os.environ, "PENSTOCK_REWARD_FILE": str(reward)}
        subprocess.run(command.argv, cwd=repository, env=environment, check=True)
    return float(reward.read_text())


@pytest.mark.requirement("R144", "R84")
def test_successes_of_earlier_steps_are_learned_again_and_failures_are_not(codec: Codec) -> None:
    """A step whose rollouts all fail, or all succeed, has no advantage at all."""
    learner, update = Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed=7), train.Update(7)
    solved = encode(codec, tasks.episode(TASK, TASK.right, TASK.script), ())
    failed = encode(codec, tasks.episode(TASK, STOCK_NAME, TASK.script), ())
    steps = [[_ended("a", 1.0, *solved)], [_ended("b", 0.0, *failed)], [_ended("b", None, *failed)]]
    likely = [_logprob(learner, *solved)]
    for results in steps:
        assert update(learner, Collected(results, [], [])) == (0.0, 0.0)
        likely.append(_logprob(learner, *solved))
    assert likely == sorted(set(likely))


def test_a_step_without_a_success_so_far_changes_nothing(codec: Codec) -> None:
    learner, update = Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed=7), train.Update(7)
    row = encode(codec, tasks.episode(TASK, STOCK_NAME, TASK.script), ())
    before = learner.weights()
    update(learner, Collected([_ended("a", 0.3, *row)], [], []))
    assert all(np.array_equal(before[name], value) for name, value in learner.weights().items())


def _ended(task_id: str, reward: float | None, ids: NDArray[np.int32], mask: NDArray[np.float32]) -> RolloutResult:
    """A rollout with one sample, as far as the trainer looks at it."""
    sample = SimpleNamespace(input_ids=ids, loss_mask=mask, logprobs=np.zeros(len(ids), np.float32), weight=1.0)
    graded = None if reward is None else SimpleNamespace(value=reward)
    return cast(
        "RolloutResult",
        SimpleNamespace(reward=graded, trajectory=SimpleNamespace(task_id=task_id, samples=[sample])),
    )


def _logprob(learner: Learner, ids: NDArray[np.int32], mask: NDArray[np.float32]) -> float:
    return float(
        (np.asarray(model.token_logprobs(learner.params, learner.config, jnp.asarray(ids[None])))[0] * mask).sum()
    )
