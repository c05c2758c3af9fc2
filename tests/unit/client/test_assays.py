"""Signed lines of assays: what is refused, and that it is refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from penstock.client import (
    Assays,
    Budgets,
    Command,
    FailedPrecondition,
    InvalidArgument,
    Limits,
    McpServer,
    Packages,
    Resources,
    SandboxChoice,
    SeedFile,
    Task,
    Verifier,
)
from penstock.client.rollouts.assays import AssayLine, existing_or_new_key, read_key
from penstock.client.rollouts.client import spec
from penstock.client.wire.specs import digest

TASK = Task(task_id="it", instruction="Do it.")


def written(folder: Path, *lines: AssayLine) -> Path:
    """A file of lines beside its key."""
    file = folder / "assay.jsonl"
    key = existing_or_new_key(folder / "assay.key")
    file.write_bytes(b"".join(line.signed(key) for line in lines))
    return file


def passed(task: Task = TASK) -> AssayLine:
    return AssayLine(
        task_id=task.task_id, digest=digest(task), passed=True, accepted=("REWARD_FORGED",), backend="local"
    )


@pytest.mark.requirement("R138")
def test_only_the_very_task_that_passed_may_start(tmp_path: Path) -> None:
    """By the digest: a changed task, a failed one and an unknown one are refused, with the reason."""
    failed = replace(TASK, task_id="bad")
    line = AssayLine(task_id="bad", digest=digest(failed), passed=False, failed=("NOTHING_REWARDED", "REWARD_FORGED"))
    assays = Assays.load(written(tmp_path, passed(), line))
    assert spec(TASK, "shell", {"require_assay": assays}).task.task_id == "it"
    tools = replace(TASK, sandbox=SandboxChoice(packages=Packages(python="a==1")))
    served = replace(TASK, mcp_servers=[McpServer(name="notes", args=["notes"])])
    for task, words in (
        (failed, "did not pass its assay: NOTHING_REWARDED, REWARD_FORGED"),
        (replace(TASK, instruction="Do more."), "has changed since its assay"),
        (tools, "has changed since its assay"),
        (served, "has changed since its assay"),
        (replace(TASK, task_id="other"), "has no line in"),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            spec(task, "shell", {"require_assay": assays})
        assert caught.value.reason == "ASSAY_REQUIRED" and str(caught.value).count(words) == 1
        assert [item.field for item in caught.value.violations] == ["task"]
        assert words in str(caught.value)


@pytest.mark.requirement("R138")
def test_the_digest_of_a_task_is_that_of_all_clients() -> None:
    """The tests of the clients in TypeScript and Go have the same; what is empty is nothing."""
    task = Task(
        task_id="tá",
        instruction="i",
        metadata={"b": 1.5, "a": [True, None, "x"]},
        env={"B": "2", "A": ""},
        files=[SeedFile("f", b"\x00\xff", 0o644)],
        setup=[Command(["true"], timeout=1.5)],
        verifier=Verifier(commands=[Command(shell="true")], component_ranges={"c": (0.0, 1.0)}),
        sandbox=SandboxChoice(image="x:1", resources=Resources(cpu=0.5, memory_bytes=1 << 33)),
        limits=Limits(agent=2.0),
        budgets=Budgets(),
    )
    assert digest(task) == "86cc3c848c2d985156b9a2598fef371d91c48afc89e0176848f236aa9d43e9e2"
    assert digest(replace(task, budgets=None)) == digest(task)


@pytest.mark.requirement("R138")
def test_a_line_that_was_changed_in_any_value_is_refused(tmp_path: Path) -> None:
    """Also one with a value added, without a signature, or signed with another key."""
    file = written(tmp_path, AssayLine(task_id="it", digest=digest(TASK), passed=False, failed=("X",)))
    line = orjson.loads(file.read_bytes())
    changes = [{**line, name: value} for name, value in (
        ("passed", True), ("passed", 1), ("digest", "0" * 64), ("task_id", "x"), ("failed", []), ("failed", "X"),
        ("accepted", ["Y"]), ("schema", 1), ("more", 1), ("signature", "0" * 64), ("signature", None), ("time", "x"),
    )]  # fmt: skip
    changes.append({name: value for name, value in line.items() if name != "signature"})
    for changed in changes:
        file.write_bytes(orjson.dumps(changed) + b"\n")
        with pytest.raises(InvalidArgument) as caught:
            Assays.load(file)
        assert caught.value.reason == "ASSAY_UNREADABLE" and "line 1" in str(caught.value)
    file.write_bytes(orjson.dumps(line) + b"\n")
    Assays.load(file)
    other = existing_or_new_key(tmp_path / "other.key")
    assert other != read_key(tmp_path / "assay.key")
    with pytest.raises(InvalidArgument, match="not signed with this key"):
        Assays.load(file, tmp_path / "other.key")


def test_a_later_line_of_the_same_task_counts(tmp_path: Path) -> None:
    bad = AssayLine(task_id="it", digest=digest(TASK), passed=False, failed=("X",))
    Assays.load(written(tmp_path, bad, passed())).require(TASK)
    with pytest.raises(FailedPrecondition):
        Assays.load(written(tmp_path, passed(), bad)).require(TASK)


def test_a_key_is_made_once_for_its_owner_and_a_short_one_refused(tmp_path: Path) -> None:
    key = tmp_path / "deep" / "k.key"
    assert existing_or_new_key(key) == existing_or_new_key(key)
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="32 to 4096 bytes"):
        read_key(key)
    with pytest.raises(InvalidArgument, match="no such file"):
        Assays.load(tmp_path / "none.jsonl")
