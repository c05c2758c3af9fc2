"""Agent specs from YAML."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

import penstock_driver
from penstock.client import InvalidArgument
from penstock.client.tasks.field_types import MAX_FILE_BYTES
from penstock.client.wire.agents import dump_spec, load_spec
from penstock.driver.v1 import agent_pb2
from penstock_driver.agents.registry import built_in_specs
from penstock_driver.agents.specs import AgentSpec
from penstock_driver.wire.agents import spec_from_proto, spec_to_proto

AGENTS = Path(penstock_driver.__path__[0]) / "agents" / "catalog"


@pytest.mark.requirement("R66")
@pytest.mark.parametrize("spec", list(built_in_specs()), ids=lambda spec: str(spec.name))
def test_the_client_reads_a_spec_as_the_driver_does(spec: AgentSpec) -> None:
    """An agent is one YAML file, whoever reads it."""
    read = load_spec(AGENTS / f"{spec.name}.yaml")
    assert spec_from_proto(read) == spec


@pytest.mark.requirement("R66")
@pytest.mark.parametrize("spec", list(built_in_specs()), ids=lambda spec: str(spec.name))
def test_shown_agent_is_the_file_that_registers_it(spec: AgentSpec, tmp_path: Path) -> None:
    """One can start from a built-in agent."""
    message = spec_to_proto(spec)
    file = tmp_path / "mine.yaml"
    text = dump_spec(message)
    file.write_text(text)
    read = load_spec(file)
    assert read == message and spec_from_proto(read) == spec
    assert "_UNSPECIFIED" not in text and "METHOD_" not in text


@pytest.mark.requirement("R44")
def test_a_file_that_is_no_text_and_permission_bits_survive_the_file(tmp_path: Path) -> None:
    """Files are bytes."""
    spec = agent_pb2.AgentSpec(name="x")
    spec.toolbox.files.add(path="bin/x", content=bytes(range(256)), mode=0o755)
    spec.toolbox.files.add(path="bin/y", content=b"#!/bin/sh\n\ttrailing \nx\r\n", mode=0)
    spec.toolbox.files.add(path="bin/z", content="a line end of Unicode's: \x85, and one: \u2028\n".encode())
    file = tmp_path / "mine.yaml"
    file.write_text(dump_spec(spec), newline="")
    assert load_spec(file) == spec
    assert "mode: 0755" in file.read_text()
    file.write_text('name: x\ntoolbox: {files: [{path: a, content: b, mode: "0755"}]}')
    assert load_spec(file).toolbox.files[0].mode == 0o755


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """Whoever corrects a file shall not have to ask once for each mistake."""
    file = tmp_path / "agent.yaml"
    file.write_text("name: x\nargs: []\ninstruction: {method: fax, nowhere: 1}\nargv: cat\nneeds_root: 3\n")
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    named = [item.field for item in caught.value.violations]
    assert named == ["args", "instruction.method", "instruction.nowhere", "argv", "needs_root"]
    assert all(field in str(caught.value) for field in named)


def test_valid_keys_are_listed_once_and_each_mistake_has_its_line(tmp_path: Path) -> None:
    """Three wrong keys are three short lines, not three times all keys in one."""
    file = tmp_path / "agent.yaml"
    file.write_text("name: x\nqqq: 1\nzzz: 2\nargs: []\n")
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    first, second, third = caught.value.violations
    assert "known keys: argv, " in first.description and "default_timeout_s" in first.description
    assert (second.description, third.description) == ("no such key", "no such key; did you mean argv?")
    assert caught.value.message == f"{file} is not an agent spec"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nargs: []", "args: no such key; did you mean argv?"),
        ("name: x\nzzz: []", "zzz: no such key; known keys: argv"),
        ("name: x\ninstruction: {method: fax}", "instruction.method: 'fax' is not one of file, stdin, argv"),
        ("name: x\nargv: cat", "argv: expected a list"),
        ("name: x\nenv: []", "env: expected a mapping"),
        ("name: x\ndefault_timeout_s: soon", "default_timeout_s: expected seconds"),
        ("name: x\ntoolbox: {files: [{path: a, from: absent.py}]}", "absent.py: No such file"),
        ("name: x\nneeds_root: 3", "needs_root"),
        ("- x", "mapping"),
        ("a: [", "line"),
    ],
)
def test_invalid_spec_is_refused_with_field_and_reason(tmp_path: Path, text: str, said: str) -> None:
    """A malformed spec gets a typed error that names the field and the reason."""
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    assert said in str(caught.value)


@pytest.mark.parametrize("field", ["env", "skip_permissions_env"])
def test_a_value_of_the_environment_must_be_text(tmp_path: Path, field: str) -> None:
    """YAML reads 0755 as 493, 1.10 as 1.1 and yes as true: only its author knows what was meant."""
    file = tmp_path / "agent.yaml"
    file.write_text(f"name: x\n{field}: {{CI: true, V: 1.10, M: 0755, E: , L: [a], on: 'a', 'NO': 'no', N: '0755'}}\n")
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    assert [(item.field, item.description) for item in caught.value.violations] == [
        *((f"{field}.{name}", "must be text: put it in quotes") for name in ("CI", "V", "M")),
        *((f"{field}.{name}", "must be text") for name in ("E", "L")),
        (f"{field}.True", "must be text: put it in quotes"),
    ]
    file.write_text("name: x\nenv: {CI: 'true', V: '1.10', M: '0755'}\nevents: {rules: [{when: a, fields: {line: b}}]}")
    read = load_spec(file)
    assert dict(read.env) == {"CI": "true", "V": "1.10", "M": "0755"}
    assert dict(read.events.rules[0].fields) == {"line": "b"}


BOMB = "name: x\na: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 10)}]\n" for before, after in pairwise("abcdefgh")
)


@pytest.mark.requirement("R8", "R23", "R33")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "has more than"),
        ("name: x\nargv: " + "[" * 200 + "]" * 200, "nests them deeper than"),
        ("name: x\nname: y", "duplicate key"),
        ("name: x\ntoolbox: {files: [{path: a, from: ../secret}]}", "outside of the directory of the agent spec"),
        ("name: x\ntoolbox: {files: [{path: a, from: link}]}", "outside of the directory of the agent spec"),
        ("name: x\ntoolbox: {python_packages: {from: /etc/hostname}}", "outside of the directory of the agent spec"),
        ("name: x\ntoolbox: {files: [{path: a, from: pipe}]}", "is not a regular file"),
        ("name: x\ntoolbox: {files: [{path: a, from: huge}]}", "at most"),
    ],
)
def test_a_strangers_spec_is_bounded_and_takes_nothing_from_elsewhere(tmp_path: Path, text: str, said: str) -> None:
    """It is read as strictly as a task file."""
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "spec"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    with (folder / "huge").open("wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    file = folder / "agent.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    assert caught.value.reason == "AGENT_FILE"
    assert any(said in item.description for item in caught.value.violations), caught.value.violations
