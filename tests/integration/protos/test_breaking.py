"""`make lint` refuses a change of the protos that breaks clients of the baseline (R111)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from protos.breaking import BASELINE, ROOT, breaking

SERVICE = Path("protos/penstock/interception/v1/intercept_service.proto")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the protos that a test may change."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def changed(tree: Path, old: str, new: str) -> str:
    """What breaks once `old` is `new` in one proto."""
    text = (tree / SERVICE).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tree / SERVICE).write_text(text.replace(old, new), encoding="utf-8")
    return breaking(tree, BASELINE.read_text(encoding="utf-8").strip())


@pytest.mark.requirement("R111")
def test_protos_as_they_are_break_nothing(tree: Path) -> None:
    """What `make lint` finds in this checkout."""
    assert changed(tree, "message ResumeCalls {}", "message ResumeCalls {}") == ""


@pytest.mark.requirement("R111")
def test_deleted_field_breaks(tree: Path) -> None:
    """Its number could be given to something else."""
    found = changed(
        tree, "  optional string group_id = 2;\n  repeated string rollout_ids", "  repeated string rollout_ids"
    )
    assert 'field "2" with name "group_id" on message "CallSelector" was deleted' in found


@pytest.mark.requirement("R111")
def test_changed_type_breaks(tree: Path) -> None:
    """An old client would read another number."""
    assert "changed type" in changed(tree, "int32 calls = 1;\n  // Serialised", "string calls = 1;\n  // Serialised")


@pytest.mark.requirement("R111")
def test_added_field_and_rpc_break_nothing(tree: Path) -> None:
    """As every release adds some."""
    field = "// For people.\n  string note = 90;\n  "
    assert changed(tree, '// For the logs, for example "weight sync".\n  ', field + "// For the logs.\n  ") == ""
