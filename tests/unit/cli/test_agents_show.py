"""`penstock agents show`: a summary at a terminal, the whole spec to a file, a pipe or with --full."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from tests.unit.cli.test_watch_replay_diff import HOSTILE, drawn, foreign
from tests.unit.docs.pages import ROOT
from typer.testing import CliRunner

from penstock.cli.commands import agents
from penstock.cli.main import app
from penstock.cli.views.agent_summary import summary
from penstock.client.agents import Agent, _agent
from penstock.client.wire.agents import load_spec
from penstock.driver.v1 import agent_pb2, agent_service_pb2

CATALOG = ROOT / "services/driver/penstock_driver/agents/catalog"


def agent(spec: agent_pb2.AgentSpec) -> Agent:
    """A built-in agent."""
    return _agent(agent_service_pb2.Agent(spec=spec, spec_sha256="5" * 64, built_in=True))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal, and services that have OpenCode."""

    async def get(name: str) -> Agent:
        return agent(load_spec(CATALOG / f"{name}.yaml"))

    @asynccontextmanager
    async def services(**_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(agents=SimpleNamespace(get=get))

    shown = io.StringIO()
    monkeypatch.setattr(agents, "services", services)
    monkeypatch.setattr(agents, "out", Console(file=shown, force_terminal=True, width=120, color_system=None))
    return shown


def test_a_terminal_gets_a_summary(screen: io.StringIO) -> None:
    """What it is, what is installed and run, each option with its default and range."""
    done = CliRunner().invoke(app, ["agents", "show", "opencode"])
    text = screen.getvalue()
    assert done.exit_code == 0 and not done.output and len(text.splitlines()) < 30, text
    for words in ("opencode 1.18.33  built in", "opencode-ai@1.18.33", "chat completions", "on standard input",
                  "run --format json", "--skip-permissions", "32000", "from 1", "0 to 2", "--full"):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("full", [True, False])
def test_the_whole_spec_is_the_file_that_register_takes(screen: io.StringIO, full: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With --full at a terminal, and to a file or a pipe in any case."""
    if not full:
        monkeypatch.setattr(agents, "out", Console(file=io.StringIO(), width=120))
    done = CliRunner().invoke(app, ["agents", "show", "opencode", *(["--full"] if full else [])])
    assert done.exit_code == 0 and not screen.getvalue()
    file = tmp_path / "opencode.yaml"
    file.write_text(done.output)
    assert load_spec(file) == load_spec(CATALOG / "opencode.yaml")
    assert yaml.safe_load(done.output)["name"] == "opencode"


@pytest.mark.parametrize("file", sorted(CATALOG.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_built_in_agent_has_a_summary_that_fits_a_screen(file: Path) -> None:
    """A hundred locked packages are counted."""
    text = drawn([summary(agent(load_spec(file)))], 120)
    assert len(text.splitlines()) <= 45 and "speaks" in text


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_spec_drives_the_terminal(text: str) -> None:
    """Anybody may have written it."""
    text = text.encode("utf-8", "replace").decode()
    spec = agent_pb2.AgentSpec(name=text, description=text, version=text, argv=[text])
    spec.options.add(name=text, description=text, choices=[{"string_value": text}])
    spec.toolbox.npm_packages.append(text)
    assert not foreign(drawn([summary(agent(spec))]))
