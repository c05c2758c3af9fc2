"""A stack on Slurm whose steps end: `srun` and `scontrol` are stand-ins, and each step is a process that reports."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import pytest
from tests.support.waiting import eventually

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import ServiceName
from penstock.launchers.on_slurm import SlurmStack
from penstock.local import supervision

_SRUN: Final = """#!/bin/sh
for word in "$@"; do case "$word" in --job-name=*) name=${word#*=};; --nodelist=*) node=${word#*=};; esac; done
echo "$name $node $$" >> "$STEPS"
report() { printf '{"event":"ready","service":"%s","name":"%s","address":"%s:7000"}\\n' "$@"; }
case "$name" in
nodes) for node in a b c d; do report sandbox $node $node; done;;
d*) report driver $name $node;;
g*) report interception $name $node;;
esac
exec cat > /dev/null
"""
_SCONTROL: Final = """#!/bin/sh
for node in a b c d; do
  echo "NodeName=$node Arch=x86_64 NodeAddr=10.0.0.$node NodeHostName=$node State=$(cat "$STATES/$node") Weight=1"
done
"""


class _Placed(SlurmStack):
    """All its services are steps."""

    @property
    def services(self) -> Sequence[ServiceName]:
        return ()


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """A job of four nodes, this one is a. Returns name, node and process of each step that was started."""
    programs, states = tmp_path / "bin", tmp_path / "states"
    for folder in (programs, states):
        folder.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for node in "abcd":
        (states / node).write_text("ALLOCATED")
    (tmp_path / "steps").touch()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "1"), ("SLURMD_NODENAME", "a"), ("SLURM_JOB_NODELIST", "a,b,c,d")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    monkeypatch.setenv("STATES", str(states))
    return lambda: [line.split() for line in (tmp_path / "steps").read_text().splitlines() if line[0] in "dg"]


@pytest.mark.requirement("R125")
async def test_a_service_whose_node_is_lost_starts_again_on_one_that_is_left(
    tmp_path: Path, steps: Callable[[], list[list[str]]]
) -> None:
    stack = _Placed(drivers=1, gates=2, state_dir=tmp_path / "stack", scratch=tmp_path)
    async with stack:
        assert {name: node for name, node, _ in steps()} == {"g0": "b", "g1": "c", "d0": "d"}
        orders = stack.directory / "orders" / "g0"
        (tmp_path / "states" / "b").write_text("DOWN*+NOT_RESPONDING")
        (tmp_path / "states" / "c").write_text("ALLOCATED+DRAIN")
        os.kill(_processes(steps(), "g0")[-1], signal.SIGKILL)
        await eventually(lambda: stack.members["interception"].get("g0") == "d:7000", "g0 is back")
        assert steps()[-1][:2] == ["g0", "d"]
        first, second = (orjson.loads((orders / f"{node}.json").read_bytes()) for node in "bd")
        assert second["scratch"] == f"{first['scratch']}-1"
        (tmp_path / "states" / "d").write_text("DOWN")
        os.kill(_processes(steps(), "g0")[-1], signal.SIGKILL)
        await eventually(lambda: stack.members["interception"].get("g0") == "a:7000", "g0 is back where the trainer is")
        assert stack.members["interception"].keys() == {"g0", "g1"}


@pytest.mark.requirement("R125")
async def test_a_second_stack_in_a_directory_leaves_the_orders_of_the_first(
    tmp_path: Path, steps: Callable[[], list[list[str]]]
) -> None:
    stack, second = (_Placed(state_dir=tmp_path / "stack", scratch=tmp_path) for _ in range(2))
    async with stack:
        orders = sorted((stack.directory / "orders").rglob("*.json"))
        assert orders
        with pytest.raises(ConfigurationError, match="is in use by"):
            async with second:
                pass
        assert sorted((stack.directory / "orders").rglob("*.json")) == orders
        assert len(steps()) == 2
    assert not (stack.directory / "orders").exists()


async def test_a_lost_service_starts_again_where_it_was_if_there_is_no_other_node(
    tmp_path: Path, steps: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell of `salloc` on a login node is on no node of the job, so that there is no last resort beside them."""
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)
    stack = _Placed(drivers=1, gates=2, state_dir=tmp_path / "stack", scratch=tmp_path)
    async with stack:
        assert {name: node for name, node, _ in steps()} == {"g0": "a", "g1": "b", "d0": "c"}
        for node in "bcd":
            (tmp_path / "states" / node).write_text("ALLOCATED+DRAIN")
        os.kill(_processes(steps(), "g0")[-1], signal.SIGKILL)
        await eventually(partial(_has_started, steps, "g0", 2), "g0 starts again")
        assert steps()[-1][:2] == ["g0", "a"]
        await eventually(lambda: stack.members["interception"].get("g0") == "a:7000", "g0 is back")


async def test_a_service_that_ends_wherever_it_starts_is_given_up_and_the_stack_goes_on(
    tmp_path: Path, steps: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)
    stack = _Placed(drivers=1, gates=2, state_dir=tmp_path / "stack", scratch=tmp_path)
    async with stack:
        for count in range(1, supervision.MAX_RESTARTS + 2):
            await eventually(partial(_has_started, steps, "g1", count), "g1 starts")
            os.kill(_processes(steps(), "g1")[-1], signal.SIGKILL)
        await eventually(lambda: not stack.was_ready("g1", "interception"), "g1 is given up")
        assert stack.members["interception"].keys() == {"g0"}


def _has_started(steps: Callable[[], list[list[str]]], name: str, count: int) -> bool:
    return len(_processes(steps(), name)) == count


def _processes(steps: list[list[str]], name: str) -> list[int]:
    return [int(process) for one, _, process in steps if one == name]
