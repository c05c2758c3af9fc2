"""Agent specs from YAML."""

from pathlib import Path

import pytest

import penstock_driver
from penstock.client import InvalidArgument
from penstock.client.agentfile import load_spec
from penstock_driver.registry import built_in_specs
from penstock_driver.rpc.agents import spec_from_proto

AGENTS = Path(penstock_driver.__path__[0]) / "agents"


@pytest.mark.parametrize("spec", list(built_in_specs()), ids=lambda spec: str(spec.name))
def test_the_client_reads_a_spec_as_the_driver_does(spec: object) -> None:
    """R66: an agent is one YAML file, whoever reads it."""
    read = load_spec(AGENTS / f"{spec.name}.yaml")  # type: ignore[attr-defined]
    assert spec_from_proto(read) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nargs: []", "args: no such key; there are argv"),
        ("name: x\ninstruction: {method: fax}", "instruction.method: 'fax' is none of file, stdin, argv"),
        ("name: x\nargv: cat", "argv: expected a list"),
        ("name: x\nenv: []", "env: expected a mapping"),
        ("name: x\ndefault_timeout_s: soon", "default_timeout_s: expected seconds"),
        ("name: x\ntoolbox: {files: [{path: a, from: absent.py}]}", "absent.py: No such file"),
        ("name: x\nneeds_root: 3", "needs_root"),
        ("- x", "mapping"),
        ("a: [", "line"),
    ],
)
def test_a_spec_that_does_not_hold_is_refused_with_the_field_and_the_reason(
    tmp_path: Path, text: str, said: str
) -> None:
    """A malformed spec gets a typed error that names the field and the reason."""
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load_spec(file)
    assert said in str(caught.value)
