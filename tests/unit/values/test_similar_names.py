"""Names that the command line looks up itself: a wrong one suggests the similar one that there is."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from penstock.cli.connections import model_sources
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
        ("verify --jsn turns.jsonl", "--json"),
        ("up --no-dashbord", "--no-dashboard"),
        ("rollot", "rollout"),
        ("rollout --agent shell --task set/mend-parser.yaml --mode transparent", "transparent_proxy"),
        ("watch --by stp", "step"),
        ("export rows.jsonl --table sequence", "sequences"),
        ("completion bsh", "bash"),
        ("rollout --agent shell --task set/mend-parser.yaml --engine nmpy", "numpy"),
        ("up --engine vlm", "vllm"),
        ("eval run set --agent shell --engine scriptd", "scripted"),
        ("up --set sandbx.replicas=1", "sandbox"),
        ("eval matirx set", "matrix"),
        ("eval shw runs/evals/mine", "show"),
    ],
)
def test_a_similar_name_is_suggested(line: str, meant: str) -> None:
    """Wrong usage, before any service is asked."""
    done = CliRunner().invoke(app, line.split())
    text = " ".join(done.output.split())
    assert done.exit_code == 2, text
    assert f"; did you mean {meant}?" in text, text
    assert "Value error" not in text, text


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("watch --by nothing", "error: Invalid value for '--by': 'nothing' is not one of 'step', 'version', 'group'."),
        ("watch --xyz", "error: No such option: --xyz\n"),
        ("xyz", "error: No such command 'xyz'.\n"),
        ("eval set", "error: Missing option '--agent'."),
        ("up --engine xyz", "engines: none, numpy, openai, scripted, sglang, vllm"),
    ],
)
def test_what_is_similar_to_nothing_is_refused_without_a_suggestion(line: str, said: str) -> None:
    """In the program's own words, and a directory of tasks is no command with a mistake."""
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and said in done.output, done.output
    assert "did you mean" not in done.output


def test_an_engine_of_a_plugin_is_known(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Whoever adds an engine gets no complaint about its name."""
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    mine = EntryPoint("mine", "mine:open_engine", "penstock.inference.engines")
    monkeypatch.setattr(model_sources, "entry_points", lambda group: EntryPoints([mine]).select(group=group))
    assert model_sources.model_choice(folder / "model", "mine", None).engine == "mine"


def test_nothing_is_suggested_where_nothing_is_similar() -> None:
    assert did_you_mean("xyz", ["harbor", "swe"]) == "" == did_you_mean("harbor", [])
    assert did_you_mean("h" * 10**6, ["h" * 200]), "as far as a name goes"
