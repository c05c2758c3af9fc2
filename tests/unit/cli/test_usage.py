"""What the command line refuses before anything is started, and where it says that things are."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.commands import up
from penstock.cli.main import app
from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES
from penstock.client.types.trajectories import Call
from penstock.client.wire import results  # noqa: F401 - declares how calls are read
from penstock.local.stack import LocalStack
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import from_proto


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service of whoever runs the tests is found; starting one would be a failure."""

    async def nobody(_endpoints: object) -> bool:
        return False

    async def started(_stack: object) -> None:
        raise AssertionError("a service was started")

    monkeypatch.setattr("penstock.cli.connections.service_selection._answers", nobody)
    monkeypatch.setattr("penstock.local.stack.LocalStack.__aenter__", started)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task that holds."""
    file = tmp_path / "task.yaml"
    file.write_text("instruction: x\n")
    return file


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "there is no model"),
        (("--upstream", "127.0.0.1:9", "--model", "m"), "a URL like http://host:port/v1, or a name"),
        (("--upstream", "http://127.0.0.1:9/v1"), "--model"),
        (("--upstream", "mine"), "up --upstream mine=URL"),
        (("--model-dir", "/nowhere"), "there is no /nowhere"),
        (("--model-dir", "."), "has no config.json"),
        (("--script", "s.yaml"), "--model-dir"),
    ],
)
def test_a_rollout_that_cannot_be_asked_is_wrong_usage(task: Path, options: tuple[str, ...], said: str) -> None:
    """Exit code 2, and what to write instead, before any service is started."""
    done = CliRunner().invoke(app, ["rollout", "--agent", "shell", "--task", str(task), *options])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "steup: []"])
def test_a_task_file_that_cannot_be_read_is_wrong_usage(tmp_path: Path, content: str | None) -> None:
    """Exit code 2, not the refusal of a service that nobody asked."""
    file = tmp_path / "task.yaml"
    if content is not None:
        file.write_text(content)
    done = CliRunner().invoke(
        app, ["rollout", "--agent", "shell", "--task", str(file), "--upstream", "http://127.0.0.1:9/v1", "--model", "m"]
    )
    assert done.exit_code == 2, done.output
    assert "task.yaml" in done.output or "steup" in done.output


@pytest.mark.parametrize("command", [(), ("rollout",), ("export",), ("agents",), ("credentials",)], ids=" ".join)
def test_no_help_is_cut_on_a_narrow_terminal(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that cannot be read cannot be typed."""
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*command, "--help"])
    text = done.output.replace("scripted, ...", "").replace("[ARGS]...", "")
    assert done.exit_code == 0 and "…" not in text and "..." not in text, done.output


def test_up_names_settings_in_the_environment_that_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With what to write instead, and without the value, which may be a secret."""
    monkeypatch.setattr(up, "run", lambda work: work.close())
    monkeypatch.setattr(up, "err", Console(file=(said := io.StringIO()), width=80))
    monkeypatch.setenv("PENSTOCK_SANDBOX_EGRESS_HOSTS", '["a.example"]')
    monkeypatch.setenv("PENSTOCK_SANDBOX_ADDRESS", "127.0.0.1:1")
    done = CliRunner().invoke(app, ["up", "--upstream", "m=http://127.0.0.1:9/v1", "--state-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    expected = "PENSTOCK_SANDBOX_EGRESS_HOSTS has no effect here: use --set sandbox.egress_hosts=VALUE\n"
    assert said.getvalue() == expected


def test_an_upstream_of_up_is_an_address() -> None:
    """A name without a scheme is refused before it is configured."""
    done = CliRunner().invoke(app, ["up", "--upstream", "mine=127.0.0.1:9"])
    assert done.exit_code == 2 and "http://host:port/v1" in done.output


@pytest.mark.requirement("R24")
def test_a_call_without_its_tokens_still_says_how_many_were_sampled() -> None:
    """An event carries counts, not tokens."""
    message = trajectory_pb2.Call(state=trajectory_pb2.CALL_STATE_DELIVERED)
    message.completion.span.count = 7
    call = from_proto(Call, message)
    assert call.sampled_count == 7
    assert call.completion is not None and call.completion.token_ids is None


def test_the_dashboards_link_stays_whole_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was folded inside its token opens a page without a valid one; the terminal wraps it itself."""
    link = f"http://127.0.0.1:7790/#token={'0123456789abcdef' * 4}"
    said = io.StringIO()
    monkeypatch.setattr(up, "out", Console(file=said, force_terminal=True, width=80, highlight=False))
    stack, connection = LocalStack(state_dir=tmp_path), tmp_path / "connection.json"
    up._say_where(stack, connection, link, as_json=False, example="task.yaml")
    lines = said.getvalue().splitlines()
    assert [line for line in lines if "token" in line] == [f"dashboard     {link}"]
    assert [line.split()[0] for line in lines[1:]] == [*SERVICES, "ingress", "dashboard"]


def test_the_dashboards_names_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is published on another address is told under which names it is asked for."""
    listening: list[object] = []

    async def served(_endpoints: object, _show_token: bool, listen: tuple[object, ...], _as_json: bool) -> int:
        listening.extend(listen)
        return 0

    monkeypatch.setattr("penstock.cli.commands.dashboard._serve", served)
    done = CliRunner().invoke(app, ["dashboard"], env={"PENSTOCK_DASHBOARD_NAMES": "192.0.2.7 dash.example "})
    assert done.exit_code == 0, done.output
    assert listening[2] == ["192.0.2.7", "dash.example"]


@pytest.mark.requirement("R48")
def test_missing_package_is_wrong_usage_not_a_services_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 with what to install, and not 4, which is a service's."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "x.parquet")])
    assert done.exit_code == 2 and "penstock[parquet]" in done.output


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("line", [["rollout", "--n", "many"], ["agents", "shou"], ["nothing"], ["replay"]])
def test_every_error_begins_alike(line: list[str]) -> None:
    """A wrong option, a wrong command and a missing argument look like all other errors, and name the help."""
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2, done.output
    assert "error: " in done.output and "Error" not in done.output, done.output
    assert "--help' for help" in done.output


@pytest.mark.parametrize(
    ("options", "limit"),
    [((), up.OWN_ENGINE_CONTEXT), (("--set", "inference.max_context_tokens=9000"), 9000), (("--model-dir", "."), None)],
    ids=["the small model's tokenizer", "set", "a model"],
)
def test_an_engine_of_ones_own_has_not_the_context_of_the_small_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], limit: int | None
) -> None:
    """A pytest's output alone is longer than that."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    given: dict[str, dict[str, object]] = {}

    def launched(_on: str, _own: object, chosen: dict[str, dict[str, dict[str, object]]]) -> None:
        given.update(chosen["settings"])
        raise ConfigurationError("nothing is started", reason="CLIENT")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(up, "unnamed_model", lambda *_, **__: tmp_path)
    monkeypatch.setattr(up, "launched", launched)
    done = CliRunner().invoke(app, ["up", "--engine", "none", *options])
    assert "nothing is started" in done.output
    assert given.get("inference", {}).get("max_context_tokens") == limit
