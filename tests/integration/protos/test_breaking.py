"""`make lint` refuses a change of the protos that breaks clients of the baseline (R111), but of what is provisional."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from protos.breaking import BASELINE, ROOT, breaking, compared

SERVICE = Path("protos/penstock/interception/v1/intercept_service.proto")
PROVISIONAL = ' [(penstock.options.v1.provisional) = "stage.new"]'
RPC_PROVISIONAL = 'option (penstock.options.v1.provisional_method) = "stage.new";'
WITH_PROVISIONAL = f"""syntax = "proto3";
package penstock.stage.v1;
import "penstock/options/v1/options.proto";
// StageService has an RPC that is served and one that is not.
service StageService {{
  // Play plays.
  rpc Play(PlayRequest) returns (PlayResponse);
  // Rehearse rehearses.
  rpc Rehearse(RehearseRequest) returns (RehearseResponse) {{ {RPC_PROVISIONAL} }}
}}
message PlayRequest {{
  optional int32 act = 1;
  oneof light {{
    string colour = 2;
    Lamp lamp = 3{PROVISIONAL};
  }}
  optional string prompter = 4{PROVISIONAL};
  optional int32 scene = 5;
}}
// PlayResponse is empty.
message PlayResponse {{}}
// Lamp is reached by what is provisional only.
message Lamp {{
  // Kind is a kind of lamp.
  enum Kind {{
    KIND_UNSPECIFIED = 0;
    KIND_SPOT = 1;
  }}
  Kind kind = 1;
}}
// RehearseRequest asks.
message RehearseRequest {{
  PlayRequest play = 1;
}}
// RehearseResponse answers.
message RehearseResponse {{
  string note = 1;
}}
"""
"""A baseline with all that can be provisional."""


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
    assert "changed type" in changed(tree, "int32 calls = 1;\n  // Bytes of", "string calls = 1;\n  // Bytes of")


@pytest.mark.requirement("R111")
def test_added_field_and_rpc_break_nothing(tree: Path) -> None:
    """As every release adds some."""
    field = "// For people.\n  string note = 90;\n  "
    assert changed(tree, '// For the logs, for example "weight sync".\n  ', field + "// For the logs.\n  ") == ""


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A directory for the two sides, of which `staged` writes the protos."""
    return tmp_path


def staged(stage: Path, *changes: tuple[str, str]) -> str:
    """What breaks clients of WITH_PROVISIONAL once each first text is the second."""
    text = WITH_PROVISIONAL
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    for side, proto in (("old", WITH_PROVISIONAL), ("new", text)):
        root = stage / side
        (root / "protos/penstock/stage/v1").mkdir(parents=True)
        shutil.copytree(ROOT / "protos/penstock/options", root / "protos/penstock/options")
        shutil.copy(ROOT / "buf.yaml", root)
        (root / "protos/penstock/stage/v1/stage.proto").write_text(proto, encoding="utf-8")
    return compared(stage / "new", stage / "old")


@pytest.mark.requirement("R111")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([("optional string prompter = 4", "repeated bytes prompters = 4")], id="another type"),
        pytest.param([(f"  optional string prompter = 4{PROVISIONAL};\n", "")], id="removed"),
        pytest.param([(f"    Lamp lamp = 3{PROVISIONAL};\n", "")], id="removed from a oneof"),
        pytest.param([(f"prompter = 4{PROVISIONAL}", "prompter = 4")], id="served"),
        pytest.param([(f"prompter = 4{PROVISIONAL}", "prompter = 7")], id="served under another number"),
        pytest.param([("    KIND_SPOT = 1;\n", ""), ("  Kind kind = 1;", "  int64 watts = 1;")], id="its message"),
        pytest.param([(RPC_PROVISIONAL, "")], id="the rpc is served"),
        pytest.param([("rpc Rehearse(RehearseRequest)", "rpc Practise(PlayRequest)")], id="another rpc"),
        pytest.param([("string note = 1;", "int32 minutes = 2;")], id="the rpc's answer"),
    ],
)
def test_what_is_provisional_may_change(stage: Path, changes: list[tuple[str, str]]) -> None:
    """Nobody can use it: a request that sets it is refused."""
    assert staged(stage, *changes) == ""


@pytest.mark.requirement("R111")
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("  optional int32 act = 1;\n", ""), '"act" on message "PlayRequest" was deleted'),
        (("optional int32 scene = 5", "optional string scene = 5"), '"scene" on message "PlayRequest" changed type'),
        (("string colour = 2;", f"string colour = 2{PROVISIONAL};"), '"colour" on message "PlayRequest" was deleted'),
        (("returns (PlayResponse);", f"returns (PlayResponse) {{ {RPC_PROVISIONAL} }}"), 'RPC "Play"'),
    ],
)
def test_what_is_served_may_not_change(stage: Path, change: tuple[str, str], found: str) -> None:
    """Beside provisional fields too, and it cannot become provisional."""
    assert found in staged(stage, change)


@pytest.mark.requirement("R111")
def test_a_message_that_something_served_reaches_may_not_change(stage: Path) -> None:
    """Although a provisional RPC reaches it too."""
    changes = [
        ("  oneof light", f"  int32 hall = 6{PROVISIONAL};\n  oneof light"),
        ("string colour = 2", "bytes colour = 2"),
    ]
    assert '"colour" on message "PlayRequest" changed type' in staged(stage, *changes)
