"""Names that the command line looks up itself: a wrong one suggests the similar one that there is."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.values.similar_names import did_you_mean


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a task, and a registry of Harbor."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mend-parser.yaml").write_text("instruction: x\n")
    sets = [{"name": "terminal-bench", "version": "2.0", "tasks": []}, {"name": "swe", "version": "1", "tasks": []}]
    (tmp_path / "registry.json").write_bytes(orjson.dumps(sets))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("tasks import harbr source tasks", "harbor"),
        ("tasks import harbor registry.json tasks --dataset terminal-bnch", "terminal-bench"),
        ("eval run set --agent shell --task mend-parsr --upstream x --model m", "mend-parser"),
        ("doctor --attack --list --class escpe", "escape"),
        ("doctor --attack --list --only reward-endles", "reward-endless"),
        ("serve drivr", "driver"),
        ("up --on slrum", "slurm"),
        ("up --upstream mine=http://127.0.0.1:9/v1 --api-key-env mime=KEY", "mine"),
        ("agents shw", "show"),
        ("watch --grop g", "--group"),
    ],
)
def test_a_similar_name_is_suggested(line: str, meant: str) -> None:
    """Wrong usage, before any service is asked."""
    done = CliRunner().invoke(app, line.split())
    text = " ".join(done.output.split())
    assert done.exit_code == 2, text
    assert f"did you mean {meant}?" in text or f"Did you mean '{meant}'?" in text or f"options: {meant})" in text, text


def test_nothing_is_suggested_where_nothing_is_similar() -> None:
    assert did_you_mean("xyz", ["harbor", "swe"]) == "" == did_you_mean("harbor", [])
    assert did_you_mean("h" * 10**6, ["h" * 200]), "as far as a name goes"
