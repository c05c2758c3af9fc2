"""What a task file may say, and what a rollout takes, are the same: the client has the driver's rules again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.client import InvalidArgument
from penstock.client.rollouts.client import spec
from penstock.client.tasks.task import load_task
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.interception.v1 import interception_pb2
from penstock_chassis.errors import InvalidArgument as Refused
from penstock_driver.agents.registry import Agent, AgentRegistry, built_in_specs
from penstock_driver.wire.specs import rollout_spec


class _Shell(AgentRegistry):
    def __init__(self) -> None:
        self._agent = next(Agent(found, found.sha256, True, 0.0) for found in built_in_specs() if found.name == "shell")

    def get(self, namespace: str, name: str, sha256: str = "") -> Agent:
        return self._agent


_REGISTRY = _Shell()
_PATHS = ["a", "/a", "a/", "a//b", "./a", ".", "/", "..", "../a", "a/../b", "**", "~/**", "**/a", "a**", "~"]
_TEXT = st.sampled_from([*_PATHS, "", " ", "a\0", "A", "1a", "a-b", "a b", "penstock_x", "a" * 64, "a" * 129])
_WHOLE = [-1, 0, 1, 3, 86_400, 86_401, 604_800, 604_801, 1 << 31, 1 << 63]
_NUMBER = st.sampled_from([*_WHOLE, 0.5, float("inf"), float("nan")])
_RANGE = st.lists(_NUMBER, min_size=2, max_size=2)
_NAMED = st.dictionaries(_TEXT, _TEXT, max_size=1)
_FULL_COMMAND = st.fixed_dictionaries(
    {"argv": st.just(["true"])}, optional={"env": _NAMED, "cwd": _TEXT, "timeout": _NUMBER}
)
_COMMAND = _TEXT | st.lists(_TEXT, max_size=2) | _FULL_COMMAND
_MODE = st.sampled_from(["0644", "0777", "1777"])
_FILES = st.lists(st.fixed_dictionaries({"path": _TEXT, "content": _TEXT}, optional={"mode": _MODE}), max_size=1)
_BUDGETS = ["max_calls", "max_total_tokens", "max_request_bytes", "max_request_bytes_per_call", "wall_time"]
_PARTS: dict[str, st.SearchStrategy[Any]] = {
    "instruction": _TEXT,
    "files": _FILES,
    "setup": st.lists(_COMMAND, max_size=1),
    "env": _NAMED,
    "labels": _NAMED,
    "limits": st.dictionaries(st.sampled_from(["prepare", "setup", "agent", "verify"]), _NUMBER, max_size=1),
    "budgets": st.dictionaries(st.sampled_from(_BUDGETS), _NUMBER, max_size=1),
    "sandbox": st.fixed_dictionaries(
        {"resources": st.dictionaries(st.sampled_from(["cpu", "memory_bytes", "pids"]), _NUMBER, max_size=1)}
    ),
    "metadata": st.dictionaries(_TEXT, _NUMBER | _TEXT | st.dates(), max_size=1),
    "verifier": st.fixed_dictionaries(
        {"commands": st.lists(_COMMAND, max_size=1)},
        optional={
            "files": _FILES,
            "reward": st.just("file"),
            "range": _RANGE,
            "command_timeout": _NUMBER,
            "fresh_fork": st.booleans(),
            "restore": st.lists(_TEXT, max_size=1),
            "changes_below": st.lists(_TEXT, max_size=1),
            "copies": st.lists(_TEXT | st.fixed_dictionaries({"path": _TEXT, "exclude": st.lists(_TEXT)}), max_size=2),
            "collect": st.lists(_COMMAND, max_size=1),
            "image": st.sampled_from(["", "judge"]),
            "user": st.sampled_from(["", "root"]),
            "component_ranges": st.dictionaries(_TEXT, _RANGE, max_size=1),
        },
    ),
}


@given(st.sampled_from(sorted(_PARTS)).flatmap(lambda name: st.tuples(st.just(name), _PARTS[name])))
def test_a_task_file_that_holds_makes_a_rollout_that_is_taken(tmp_path_factory: Any, part: tuple[str, Any]) -> None:
    """Issue 6, point 6: `tasks check` passes nothing that the driver refuses."""
    file: Path = tmp_path_factory.getbasetemp() / "task.yaml"
    file.write_text(yaml.safe_dump({"instruction": "x", part[0]: part[1]}), encoding="utf-8")
    try:
        task = load_task(file)
    except InvalidArgument:
        task = None
    assume(task is not None)
    assert task is not None
    try:
        rollout_spec(spec(task, "shell", {}), _REGISTRY, "default")
    except Refused as refused:
        raise AssertionError(f"the file holds, and a rollout is refused: {refused.message}") from None


@pytest.mark.requirement("R25", "R33")
@pytest.mark.parametrize(("objects", "lists"), [(25, 10), (31, 1), (24, 0)])
def test_values_that_a_client_could_not_read_are_refused(objects: int, lists: int) -> None:
    """An answer has a task's metadata deeper than the request that brought it."""
    value: Any = 1
    for _ in range(lists):
        value = [value]
    for _ in range(objects):
        value = {"x": value}
    asked = rollout_service_pb2.CreateRolloutRequest(
        spec=rollout_pb2.RolloutSpec(
            task=rollout_pb2.Task(instruction="x"),
            agent=rollout_pb2.AgentChoice(name="shell"),
            mode=interception_pb2.MODE_INTERCEPTION_GATE,
            source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
        )
    )
    asked.spec.task.metadata.update({"x": value})
    asked.spec.agent.options.update({"x": value})
    heard = rollout_service_pb2.CreateRolloutRequest.FromString(asked.SerializeToString())
    with pytest.raises(Refused) as refused:
        rollout_spec(heard.spec, _REGISTRY, "default")
    fields = {violation.field for violation in refused.value.violations}
    assert {"spec.task.metadata", "spec.agent.options"} <= fields
