"""Directories of tasks, task set files, and the schemas of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.client import Allowlist, InvalidArgument, Limits, Resources, Task
from penstock.client.rollouts.client import spec
from penstock.client.tasks.spec import Budgets, CallRate, SandboxChoice
from penstock.client.wire.specs import digest
from penstock.tasks.sets import load_tasks, schemas

VERIFIER = "verifier: {commands: ['true']}\n"
FULL = """
instruction: Do it.
sandbox:
  backend: docker
  image: python:3.12
  resources: {cpu: 2, memory_bytes: 512MiB, pids: 100, disk_bytes: 1000000}
  setup_network: {hosts: [pypi.org], ports: [443]}
  agent_network: {denied_hosts: [a.pypi.org]}
  verifier_network: {hosts: [pypi.org], recording: r, recorded_only: true}
  user: root
  own_kernel: true
limits: {prepare: 10, setup: 20, agent: 30.5, verify: 40}
budgets: {max_calls: 5, max_request_bytes: 2MB, call_rate: {calls: 3, period: 2, burst: 1}}
labels: {level: hard}
solution: {commands: ['true'], files: [{path: a, content: b}]}
verifier: {commands: [[pytest, -q], 'make test', {shell: 'true', timeout: 3}]}
files: [{path: a, content: b, mode: "0755"}]
metadata: {any: [1, {thing: true}]}
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_directorys_tasks_are_its_files_and_folders_by_id(tmp_path: Path) -> None:
    """Issue 6, point 6: a task is a file or a folder of its own; other folders and hidden files are no tasks."""
    write(
        tmp_path,
        {
            "zebra.yaml": "instruction: z\n" + VERIFIER,
            "ant/task.yaml": "instruction_file: said.md\n" + VERIFIER,
            "ant/said.md": "An ant.\n",
            "bee.json": '{"instruction": "b"}',
            "data/readme.txt": "no task",
            ".hidden.yaml": "nonsense: [",
        },
    )
    found = load_tasks(tmp_path)
    assert [task.task_id for task in found.tasks] == ["ant", "bee", "zebra"]
    assert found.tasks[0].instruction == "An ant.\n"
    assert [task.task_id for task in load_tasks(tmp_path / "ant").tasks] == ["ant"]
    assert [task.task_id for task in load_tasks(tmp_path / "zebra.yaml").tasks] == ["zebra"]


def test_every_task_has_the_set_s_defaults_unless_it_says_otherwise(tmp_path: Path) -> None:
    """Issue 6, point 6: mappings are merged key by key, everything else is replaced."""
    write(
        tmp_path,
        {
            "taskset.yaml": (
                "name: mine\ndefaults:\n  image: python:3.12\n  limits: {agent: 60, verify: 30}\n"
                "  labels: {a: '1', b: '1'}\ntasks: [tasks/*.yaml, extra]\n"
            ),
            "tasks/one.yaml": "instruction: x\nlimits: {agent: 5}\nlabels: {b: '2'}\n",
            "tasks/two.yaml": "instruction: x\nimage: busybox:1\n",
            "extra/task.yaml": "instruction: x\n",
            "left-out.yaml": "instruction: x\n",
        },
    )
    found = load_tasks(tmp_path)
    assert found.name == "mine"
    assert [task.task_id for task in found.tasks] == ["extra", "one", "two"]
    extra, one, two = found.tasks
    assert one.limits == Limits(agent=5.0, verify=30.0)
    assert dict(one.labels) == {"a": "1", "b": "2"}
    assert extra.sandbox == SandboxChoice(image="python:3.12")
    assert two.sandbox == SandboxChoice(image="busybox:1")
    assert load_tasks(tmp_path / "taskset.yaml").tasks == found.tasks


def test_problems_of_all_tasks_have_file_line_and_a_suggestion(tmp_path: Path) -> None:
    """Issue 6, point 6: nobody has to ask once for each mistake."""
    write(
        tmp_path,
        {
            "a.yaml": "instruction: x\nverifer: {}\n",
            "b.yaml": "instruction: x\nlimits:\n  prepare: 1\n  agnet: 3\n",
            "c.yaml": "instruction: x\nverifier:\n  commands: ['true']\n  rewrad: file\n",
            "d.yaml": "instruction: x\ntask_id: same\n",
            "e.yaml": "instruction: x\ntask_id: same\n",
            "f.yaml": "instruction: x\nenv:\n  A: '1'\n  A: '2'\n",
        },
    )
    with pytest.raises(InvalidArgument) as caught:
        load_tasks(tmp_path)
    told = [f"{Path(item.field).name}|{item.description}" for item in caught.value.violations]
    assert told == [
        "a.yaml: verifer|line 2: no such key; did you mean verifier?",
        "b.yaml: limits.agnet|line 4: no such key; did you mean agent?",
        "c.yaml: verifier.rewrad|line 4: no such key; did you mean reward?",
        told[3],
        "f.yaml: env.A|line 4: duplicate key",
    ]
    assert told[3].startswith("e.yaml: task_id|same is also the id of ")
    assert caught.value.reason == "TASK_FILE"


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ("defaults: {instruction: x}", "defaults.instruction", "line 1: no such key"),
        ("tasks: [/etc/passwd]", "tasks.0", "leads out"),
        ("tasks: ['../*']", "tasks.0", "leads out"),
        ("tasks: [absent.yaml]", "tasks.0", "no file matches"),
        ("task: [a]", "task", "did you mean tasks?"),
        ("tasks: []", "tasks", "must not be empty"),
    ],
)
def test_a_task_set_that_does_not_hold_is_refused_with_the_field(
    tmp_path: Path, text: str, field: str, description: str
) -> None:
    """Issue 6, point 6: a task set file is as strict as a task file."""
    write(tmp_path, {"taskset.yaml": text, "a.yaml": "instruction: x"})
    with pytest.raises(InvalidArgument) as caught:
        load_tasks(tmp_path)
    assert any(item.field.endswith(field) and description in item.description for item in caught.value.violations), (
        caught.value.violations
    )


def test_an_empty_directory_is_no_task_set(tmp_path: Path) -> None:
    """Issue 6, point 6: nothing to do is told, not done."""
    with pytest.raises(InvalidArgument, match="has no task"):
        load_tasks(tmp_path)


@pytest.mark.requirement("R80")
def test_a_file_whose_aliases_unfold_without_end_is_refused(tmp_path: Path) -> None:
    """R80's spirit: a small file cannot take all of the memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    file = write(tmp_path, {"bomb.yaml": "\n".join(lines)}) / "bomb.yaml"
    with pytest.raises(InvalidArgument, match="has more than"):
        Task.load(file)
    file.write_text("labels: &a {mine: *a}")
    with pytest.raises(InvalidArgument, match="contains itself"):
        Task.load(file)
    file.write_text("[" * 1500)
    with pytest.raises(InvalidArgument):
        Task.load(file)


@pytest.mark.requirement("R63")
def test_tasks_sandbox_limits_and_budgets_reach_the_rollout(tmp_path: Path) -> None:
    """Every key of a task file takes effect; what the rollout says itself comes before, field by field."""
    task = Task.load(write(tmp_path, {"full.yaml": FULL}) / "full.yaml")
    assert task.sandbox == SandboxChoice(
        backend="docker",
        image="python:3.12",
        resources=Resources(cpu=2.0, memory_bytes=512 << 20, pids=100, disk_bytes=1_000_000),
        setup_network=Allowlist(hosts=["pypi.org"], ports=[443], denied_hosts=[]),
        agent_network=Allowlist(hosts=[], ports=[], denied_hosts=["a.pypi.org"]),
        verifier_network=Allowlist(hosts=["pypi.org"], ports=[], denied_hosts=[], recording="r", recorded_only=True),
        user="root",
        own_kernel=True,
    )
    assert task.budgets == Budgets(
        max_calls=5, max_request_bytes=2_000_000, call_rate=CallRate(calls=3, period=2.0, burst=1)
    )
    message = spec(
        task,
        "shell",
        {"limits": Limits(agent=7.0), "sandbox": SandboxChoice(backend="local"), "labels": {"mine": "yes"}},
    )
    assert (message.sandbox.backend, message.sandbox.image, message.sandbox.user) == ("local", "python:3.12", "root")
    assert (message.limits.agent.seconds, message.limits.verify.seconds) == (7, 40)
    assert list(message.sandbox.agent_network.denied_hosts) == ["a.pypi.org"]
    assert message.sandbox.verifier_network.recording == "r"
    assert message.budgets.max_calls == 5
    assert dict(message.labels) == {"level": "hard", "mine": "yes"}
    plain = spec(Task(task_id="t", instruction="x"), "shell", {})
    assert not (plain.HasField("sandbox") or plain.HasField("limits") or plain.HasField("budgets"))


def test_digest_changes_with_a_rollouts_inputs_alone(tmp_path: Path) -> None:
    """Issue 6, point 6: an evaluation is not resumed on a task that has changed."""
    full = Task.load(write(tmp_path, {"full.yaml": FULL}) / "full.yaml")
    again = Task.load(write(tmp_path, {"full.yaml": FULL.replace("solution: {", "solution:  {")}) / "full.yaml")
    assert digest(full) == digest(again)
    for before, after in (
        ("Do it.", "Do it!"),
        ("cpu: 2", "cpu: 3"),
        ("agent: 30.5", "agent: 31"),
        ("pytest, -q", "pytest"),
    ):
        changed = Task.load(write(tmp_path, {"full.yaml": FULL.replace(before, after)}) / "full.yaml")
        assert digest(changed) != digest(full), before


def test_the_schemas_accept_what_is_accepted_and_refuse_what_is_refused(tmp_path: Path) -> None:
    """Issue 6, point 6: an editor that follows the schema says what `penstock tasks check` says."""
    task, taskset = schemas()["task"], schemas()["taskset"]
    jsonschema.Draft202012Validator.check_schema(task)
    jsonschema.Draft202012Validator.check_schema(taskset)
    jsonschema.validate(yaml.safe_load(FULL), task)
    jsonschema.validate({"name": "x", "defaults": {"image": "i", "limits": {"agent": 3}}, "tasks": ["*"]}, taskset)
    wrong: list[dict[str, Any]] = [
        {"instruction": "x", "instrution": "y"},
        {"instruction": "x", "setup": [{"argv": 3}]},
        {"instruction": "x", "limits": {"agent": "long"}},
        {"instruction": "x", "verifier": {"commands": []}},
    ]
    for content in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content, task)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"defaults": {"instruction": "x"}}, taskset)
