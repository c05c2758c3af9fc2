"""Task files, sets, models, users and verifiers as JSON: read as every JSON reader does, as strictly as YAML."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tasks.test_task_files import write as write_yaml

from penstock.client import InvalidArgument, Task
from penstock.client.tasks.model_keys import load_models
from penstock.client.tasks.task import load_task, load_user
from penstock.client.tasks.yaml import MAX_NODES, YamlFile
from penstock.tasks.sets import load_tasks
from penstock.tasks.verifiers import load_verifiers

EMOJI = "\N{GRINNING FACE}"


def write(folder: Path, text: str | bytes, name: str = "task.json") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.requirement("R67")
def test_a_json_file_has_the_values_of_json(tmp_path: Path) -> None:
    """Numbers with an exponent and letters beyond 16 bits, escaped, which YAML 1.1 takes for text or refuses."""
    meant = {
        "instruction": f"Smile {EMOJI}", "metadata": {"lr": 1e-05, "big": 1e300, "at": "12:30", "no": "no"},
        "env": {"A": "on"}, "labels": {"a": "1e3"},
    }  # fmt: skip
    for text in (json.dumps(meant), json.dumps(meant, ensure_ascii=False), "\ufeff" + json.dumps(meant)):
        task = Task.load(write(tmp_path, text))
        assert (task.instruction, task.metadata) == (f"Smile {EMOJI}", meant["metadata"])
        assert (task.env, task.labels) == (meant["env"], meant["labels"])


@pytest.mark.requirement("R67")
def test_sets_models_users_and_verifiers_are_read_alike(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"defaults": {"metadata": {"lr": 1e-05}}}), "taskset.json")
    write(tmp_path, json.dumps({"instruction": EMOJI}), "one.json")
    (task,) = load_tasks(tmp_path).tasks
    assert (task.instruction, task.metadata) == (EMOJI, {"lr": 1e-05})
    assert load_user(write(tmp_path, json.dumps({"instructions": [EMOJI]}), "user.json")).instructions == [EMOJI]
    body = {"commands": ["true"], "command_timeout": 1e2, "range": [-1e-05, 1e0]}
    verifier = load_verifiers(write(tmp_path, json.dumps(body), "verifier.json"))
    assert getattr(verifier, "range", None) == (-1e-05, 1.0)
    (model,) = load_models(write(tmp_path, json.dumps([{"name": EMOJI, "policy_id": "p"}]), "models.json"))
    assert model.name == EMOJI


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ('{\n"instruction": "x",\n"env": {"A": "1",\n "A": "2"}}', "env.A", "line 4: duplicate key"),
        ('{"instruction": "\\ud83d\\ude00", "env": {"A": "1", "A": "2"}}', "A", "duplicate key"),
        ('{"<<": {}, "<<": {}}', "<<", "duplicate key"),
        ('{\n"instruction": "x",\n"instrution": "y"}', "instrution", "line 3: no such key"),
        ('{"instruction": "\\ud83d\\ude00",\n"instrution": "y"}', "instrution", "no such key"),
        ('{"metadata": {"a": NaN}}', "task.json", "NaN is not JSON"),
        ('{"metadata": {"a": -Infinity}}', "task.json", "-Infinity is not JSON"),
        ('{"metadata": {"a": 1e999}}', "task.json", "1e999 is too large"),
        ('{"metadata": {"a": ' + "9" * 5000 + "}}", "task.json", "is not JSON in UTF-8"),
        ('{"instruction": "\\ud83d"}', "task.json", "half a surrogate pair"),
        ('{"instruction": "x",\n}', "task.json", "line 2, column 1: "),
        ("instruction: x", "task.json", "line 1, column 1: "),
        (b'{"instruction": "\xff"}', "task.json", "is not JSON in UTF-8"),
        ("", "task.json", "line 1, column 1: "),
    ],
)
def test_a_json_file_is_refused_by_its_field_and_line(
    tmp_path: Path, text: str | bytes, field: str, description: str
) -> None:
    """Where YAML cannot read the file there are no lines."""
    with pytest.raises(InvalidArgument) as caught:
        Task.load(write(tmp_path, text))
    assert caught.value.reason == "TASK_FILE"
    (found,) = [item for item in caught.value.violations if item.field.endswith(field)]
    assert description in found.description


def test_keys_that_only_yaml_takes_for_one_are_two(tmp_path: Path) -> None:
    task = Task.load(write(tmp_path, '{"instruction": "x", "metadata": {"a\x85b": 1, "a b": 2}}'))
    assert task.metadata == {"a\x85b": 1, "a b": 2}


BOMBS = {
    "values": b"[" + b"1," * 5_000_000 + b"1]",
    "lists": b"[" + b"[]," * 3_000_000 + b"[]]",
    "texts": b"[" + b'"",' * 3_000_000 + b'""]',
    "keys": b"{" + b",".join(b'"%d":0' % number for number in range(MAX_NODES + 1)) + b"}",
    "brackets": b"[" * 5_000_000,
    "depth": b"[" * 200 + b"]" * 200,
    "quotes": b'"' + b'\\"' * 8_000_000,
    "backslashes": b'"' + b"\\" * 16_000_001,
}


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("name", BOMBS)
def test_a_json_file_takes_bounded_steps_or_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, BOMBS[name])
    with pytest.raises(InvalidArgument) as refused:
        YamlFile(file)
    assert refused.value.reason == "TASK_FILE" and refused.value.violations[0].field == str(file)


def test_long_texts_with_commas_brackets_and_quotes_are_no_values(tmp_path: Path) -> None:
    """What is in a text is not counted, whatever it looks like."""
    text = '[{"a": 1}, \\ ,' * 100_000
    task = Task.load(write(tmp_path, json.dumps({"instruction": "x", "files": [{"path": "a", "content": text}]})))
    assert task.files[0].content == text.encode()


_KEYS = st.sampled_from(["instruction", "env", "metadata", "files", "x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner),
    max_leaves=9,
)


@pytest.mark.requirement("R80")
@given(_VALUES | st.binary(max_size=64))
def test_any_json_is_a_task_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    file = tmp_path_factory.mktemp("t") / "task.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with contextlib.suppress(InvalidArgument):
        assert isinstance(load_task(file), Task)


def test_json_in_a_yaml_file_is_yaml(tmp_path: Path) -> None:
    """The name decides, so that one file has one meaning."""
    assert Task.load(write_yaml(tmp_path, '{"instruction": "x", "metadata": {"a": yes}}')).metadata == {"a": True}
