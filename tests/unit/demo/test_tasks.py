"""The demo's tasks: what the model is taught before the rollouts is what the rollouts show it; the verifier is fair."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from penstock_codec import Codec, Continuation
from penstock_demo import tasks
from penstock_demo.tasks import BASH, STOCK_FILE, STOCK_WORD, TASKS, CopyTask
from penstock_driver.testing import CATALOG

TASK = CopyTask("grove", "b.txt")


@pytest.fixture(scope="module")
def codec() -> Codec:
    return tasks.build_codec()


@pytest.fixture(scope="module")
def shell_agent() -> ModuleType:
    # As a program finds its second file: beside itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CATALOG)
        return importlib.import_module("shell_agent")


@pytest.mark.requirement("R82")
def test_the_examples_open_as_the_shell_agent_opens_its_conversation(shell_agent: ModuleType) -> None:
    """A policy that learned another prompt than the one that it gets would be wasted."""
    function = shell_agent.TOOL["function"]
    assert shell_agent.DEFAULTS["system_prompt"] == tasks.SYSTEM_PROMPT
    assert (function["name"], function["description"]) == (BASH.name, BASH.description)
    assert function["parameters"] == json.loads(BASH.parameters_json_schema)


@pytest.mark.requirement("R82")
def test_an_example_has_the_tokens_that_exact_continuation_gives_a_rollout(codec: Codec) -> None:
    """Turn by turn, prompt + sampled + what the gate appends is the supervised sequence."""
    messages = tasks.episode(TASK, TASK.word, TASK.file)
    ids, mask = tasks.encode(codec, messages)
    so_far = codec.render(tasks.prompt(TASK), [BASH])
    for turn in range(2, len(messages), 2):
        assert np.array_equal(ids[: len(so_far)], so_far)
        assert mask[len(so_far)] == 1.0
        sampled = int(np.argmax(mask[len(so_far) :] == 0)) or len(ids) - len(so_far)
        so_far = ids[: len(so_far) + sampled]
        if turn + 1 < len(messages):
            added = codec.continuation(
                messages[: turn + 1], messages[turn + 1 : turn + 2], [BASH], last_id=int(so_far[-1])
            )
            assert isinstance(added, Continuation)
            so_far = np.concatenate([so_far, added.ids])
    assert np.array_equal(ids, so_far)


@pytest.mark.requirement("R82")
def test_assistants_texts_parse_to_the_solutions_commands(codec: Codec) -> None:
    ids, mask = tasks.encode(codec, tasks.episode(TASK, TASK.word, TASK.file))
    edges = np.flatnonzero(np.diff(np.concatenate([[0.0], mask, [0.0]])))
    said = [codec.parse(ids[start:end]).message for start, end in zip(edges[::2], edges[1::2], strict=True)]
    commands = [json.loads(call.arguments_json)["command"] for message in said for call in message.tool_calls]
    assert commands == ["cat note.txt", "echo grove > b.txt"]
    assert said[-1].text == "Done."


def test_corpus_has_every_habit_and_is_the_same_for_a_seed(codec: Codec) -> None:
    """A prior that is too weak, or too strong, leaves nothing to learn."""
    corpus = tasks.Corpus(codec)
    drawn = [codec.decode(ids) for ids, _ in corpus.draw(np.random.default_rng(3), 2000)]
    assert drawn == [codec.decode(ids) for ids, _ in corpus.draw(np.random.default_rng(3), 2000)]
    stock_word = np.mean([f"echo {STOCK_WORD}" in text for text in drawn])
    stock_file = np.mean([f"> {STOCK_FILE}" in text for text in drawn])
    assert abs(stock_word - 0.5) < 0.05
    assert abs(stock_file - 0.5) < 0.05


def test_no_task_is_solved_by_the_stock_answer() -> None:
    """Else a model that reads nothing would be rewarded."""
    assert all(task.word != STOCK_WORD and task.file != STOCK_FILE for task in TASKS)
    assert all(task.word not in task.instruction for task in TASKS)


def test_the_task_file_is_one_of_the_tasks() -> None:
    """What `penstock rollout --task` runs is what the model was trained on."""
    word, file = tasks.EXAMPLE.verifier.commands[0].argv[-2:] if tasks.EXAMPLE.verifier else ("", "")
    task = CopyTask(word, file)
    assert task in TASKS
    assert task.to_task() == replace(tasks.EXAMPLE, files=task.to_task().files)
    assert [(seed.path, seed.content) for seed in tasks.EXAMPLE.files] == [("note.txt", task.note.encode())]


@pytest.mark.requirement("R79")
@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"b.txt": "grove\n"}, 1.0),
        ({"b.txt": "grove"}, 1.0),
        ({"b.txt": "grove\n", "a.txt": "amber\n"}, 1.0),
        ({"b.txt": "kiwi\n"}, 0.3),
        ({"b.txt": ""}, 0.3),
        ({"a.txt": "grove\n"}, 0.3),
        ({"a.txt": "amber\n"}, 0.0),
        ({"d.txt": "grove\n"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_verifier_grades_what_the_files_say(tmp_path: Path, files: dict[str, str], reward: float) -> None:
    """The reward is made from the state of the sandbox."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert _verify(tmp_path) == reward


@pytest.mark.requirement("R75")
def test_a_link_to_the_note_is_not_a_solution(tmp_path: Path) -> None:
    """The verifier follows no links that the agent left."""
    (tmp_path / "note.txt").write_text("grove")
    (tmp_path / "b.txt").symlink_to("note.txt")
    assert _verify(tmp_path) < 1.0


def _verify(directory: Path) -> float:
    """Run the task's verifier as the driver would, in `directory`."""
    verifier = TASK.to_task().verifier
    assert verifier is not None
    reward = directory.parent / f"{directory.name}.reward"
    for command in verifier.commands:
        environment = {**os.environ, "PENSTOCK_REWARD_FILE": str(reward)}
        subprocess.run(command.argv, cwd=directory, env=environment, check=True)
    return float(reward.read_text())
