"""Task files."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import Command, InvalidArgument, RewardFrom, SeedFile, Task
from penstock.client.taskfile import load_task
from penstock.client.tasksets import schemas

ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, text: str) -> Path:
    file = folder / "my task.yaml"
    file.write_text(text)
    return file


def test_a_task_file_says_everything_that_a_task_can(tmp_path: Path) -> None:
    """R67: the instruction arrives byte for byte."""
    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "src" / "a.py").write_bytes(b"\xff")
    (tmp_path / "repo" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "repo" / "run").chmod(0o755)
    task = Task.load(
        write(
            tmp_path,
            """
instruction: |
  Say 'hi' $(now) & more
files:
  - {path: note.txt, content: hello, mode: "0600"}
  - {path: blob, content_base64: AP8=}
  - {path: code, from: repo}
setup:
  - [git, init]
  - pip install -e . && true
  - {argv: [make], env: {CI: "1"}, timeout: 30}
verifier:
  commands: [pytest -q]
  reward: file
  range: [-1, 1]
env: {LANG: C}
metadata: {level: 3}
""",
        )
    )
    assert (task.task_id, task.instruction) == ("my-task", "Say 'hi' $(now) & more\n")
    assert task.files[:2] == [SeedFile("note.txt", b"hello", 0o600), SeedFile("blob", b"\0\xff")]
    assert [(file.path, file.mode) for file in task.files[2:]] == [("code/run", 0o755), ("code/src/a.py", 0o644)]
    assert task.setup[0] == Command(["git", "init"]) and task.setup[1] == Command(shell="pip install -e . && true")
    assert (task.setup[2].env, task.setup[2].timeout) == ({"CI": "1"}, 30.0)
    assert task.verifier is not None
    assert (task.verifier.reward, task.verifier.range) == (RewardFrom.FILE, (-1.0, 1.0))


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ("instruction: x\ninstrution: y", "instrution", "no such key"),
        ("task_id: x", "task", "instruction"),
        ("instruction: x\nsetup: [{argv: []}]", "setup.0", "argv"),
        ("instruction: x\nverifier: {commands: []}", "verifier.commands", "at least 1"),
        ("instruction: x\nfiles: [{path: a, content: b, from: c}]", "files.0", "exactly one"),
        ("instruction: x\nfiles: [{path: a, from: absent}]", "files.0.from", "absent"),
        ("instruction: x\nfiles: [{path: a, content: b, mode: rw}]", "files.0.mode", "octal"),
        ("instruction: x\nenv: {A: 1}", "env.A", "string"),
        ("instruction_file: absent.md", "instruction_file", "absent.md"),
        ("- x", "task", "dictionary"),
        ("a: [", "my task.yaml", "line 1"),
        ("instruction: x\ntask_id: a/b", "task_id", "pattern"),
    ],
)
def test_a_task_that_does_not_hold_is_refused_with_the_field_and_the_reason(
    tmp_path: Path, text: str, field: str, description: str
) -> None:
    """A malformed task gets a typed error that names the field and the reason."""
    with pytest.raises(InvalidArgument) as caught:
        Task.load(write(tmp_path, text))
    assert any(field in item.field and description in item.description for item in caught.value.violations), str(
        caught.value
    )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["instruction", "files", "setup", "verifier", "path", "content", "argv", "mode", "env"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.one_of(_VALUES, st.binary(max_size=64)))
def test_any_content_is_a_task_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    """R80's spirit for our own files: nothing but a Task or an InvalidArgument comes out."""
    import yaml

    file = tmp_path_factory.mktemp("t") / "task.yaml"
    file.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    with contextlib.suppress(InvalidArgument):
        assert isinstance(load_task(file), Task)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(InvalidArgument, match=r"absent.yaml: No such file"):
        Task.load(tmp_path / "absent.yaml")


def test_an_argv_that_is_a_text_is_refused_with_the_way_to_write_it() -> None:
    """R42: argv, not shell strings."""
    with pytest.raises(InvalidArgument, match="shell="):
        Command("rm -rf x")


def test_the_dashboards_form_knows_the_keys_that_a_task_file_has() -> None:
    """A key that the page does not know is refused there; what the schema has is taken, or refused by name."""
    form = json.loads((ROOT / "clients/web/src/start/keys.json").read_text(encoding="utf-8"))
    schema = schemas()["task"]
    tables = {name.strip("_").removesuffix("Table").lower(): found for name, found in schema["$defs"].items()}
    tables["command"] = tables["command"]["anyOf"][0]
    assert form["task"] == list(schema["properties"])
    for name in form.keys() - {"task"}:
        assert sorted(form[name]) == sorted(tables[name]["properties"]), name
