"""What programs rely on, command by command: `--json` is all that stands on standard output, and exit codes hold."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from tests.integration.client.test_cli import start
from tests.support.terminal.commandline import commands, json_lines
from tests.support.terminal.commands import invoke
from tests.unit.docs.test_cli import WITHOUT

from penstock.analysis.export import write
from penstock.cli.terminal import console
from penstock.client import Mode, Task, connect
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

TASK = """
task_id: copy-note
instruction: Copy note.txt to out.txt
files: [{path: note.txt, content: "the word"}]
verifier: {commands: ['grep -q "the word" out.txt']}
solution: {commands: [cp note.txt out.txt]}
"""
NOWHERE = {"PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1", "PENSTOCK_SANDBOX_ADDRESS": "127.0.0.1:1"}


@dataclass(frozen=True)
class Ground:
    """Where commands are run: services, a directory with a task, an export and an evaluation, a rollout that ended."""

    folder: Path
    environment: dict[str, str]
    model: Path

    def run(self, *argv: str, keys: str = "") -> tuple[int, str, str]:
        """A command, here."""
        return invoke(*argv, environment=self.environment, cwd=self.folder, keys=keys)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ground(stack: LocalStack, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Made once."""
    folder = tmp_path_factory.mktemp("ground")
    (folder / "task.yaml").write_text(TASK)
    write_connection(folder / "connection.json", stack.endpoints, pid=os.getpid())
    async with connect(stack.endpoints) as ps:
        task = Task.load(folder / "task.yaml")
        handle = await ps.rollouts.create(task, "shell", rollout_id="ended", run_id="json", mode=Mode.TRANSPARENT_PROXY)
        await handle.result()
        await ps.runs.log("json", {"loss": 0.5}, step=1)
        await ps.rollouts.create(task, "shell", rollout_id="waiting")  # for a trainer, which never comes
        await write(ps.rollouts.export(run_id="json"), folder / "turns.jsonl", table="turns")
    environment = {"PENSTOCK_CONNECTION": str(folder / "connection.json"), "E2B_API_KEY": "", "HF_TOKEN": ""}
    made = Ground(folder, environment, model_dir)
    code, _, err = await asyncio.to_thread(made.run, "eval", "task.yaml", "--agent", "shell", "--out", "evaluation")
    assert code == 0, err
    return made


def _agent_file(ground: Ground) -> str:
    text = ground.run("agents", "show", "shell")[1].replace("name: shell", "name: of-json", 1)
    (ground.folder / "of-json.yaml").write_text(text)
    return "of-json.yaml"


def _record(ground: Ground) -> str:
    record = {
        "instance_id": "one__two-3", "problem_statement": "Mend it", "image": "registry.test/one:1",
        "base_commit": "0" * 40, "repo": "one/two", "patch": "", "test_patch": "",
        "FAIL_TO_PASS": ["tests/test_one.py::test_one"], "PASS_TO_PASS": [],
    }  # fmt: skip
    (ground.folder / "records.jsonl").write_bytes(orjson.dumps(record))
    return "records.jsonl"


def _real(ground: Ground) -> str:
    """The export as if a distribution had been sampled from: a script's logprobs are compared with nothing."""
    text = (ground.folder / "turns.jsonl").read_text()
    (ground.folder / "real.jsonl").write_text(text.replace('"scripted"', '"processed"'))
    return "real.jsonl"


def _models(ground: Ground) -> str:
    teacher = "{policy_id: teacher, inference: '', trained: false, calls: {from_index: 1}}"
    (ground.folder / "models.yaml").write_text(f"[{teacher}, {{policy_id: student}}]")
    return "models.yaml"


def _graded_again(ground: Ground) -> str:
    assert ground.run("regrade", "json")[0] == 0
    return "json"


RUNS: dict[str, Callable[[Ground], list[str]]] = {
    "rollout": lambda ground: ["rollout", "--agent", "shell", "--task", "task.yaml", "--models", _models(ground)],
    "branch": lambda _: ["branch", "ended", "0"],
    "pause": lambda _: ["pause", "waiting"],
    "resume": lambda _: ["resume", "ended"],
    "cancel": lambda _: ["cancel", "ended"],
    "watch": lambda _: ["watch", "--once", "--run", "json"],
    "replay": lambda _: ["replay", "ended", "--tokens"],
    "diff": lambda _: ["diff", "ended", "turns.jsonl"],
    "regrade": lambda _: ["regrade", "json"],
    "rewards diff": lambda ground: ["rewards", "diff", _graded_again(ground)],
    "annotate": lambda _: ["annotate", "ended", "--name", "helpful", "--author", "me", "--value", "1"],
    "bias": lambda _: ["bias", "json"],
    "metrics": lambda _: ["metrics", "json"],
    "scan": lambda _: ["scan", "turns.jsonl"],
    "terminal": lambda _: ["terminal", "task.yaml"],
    "agents": lambda _: ["agents"],
    "agents list": lambda _: ["agents", "list"],
    "agents show": lambda _: ["agents", "show", "shell"],
    "agents new": lambda _: ["agents", "new", "fresh"],
    "agents check": lambda ground: ["agents", "check", _agent_file(ground)],
    "agents register": lambda ground: ["agents", "register", _agent_file(ground)],
    "tasks new": lambda _: ["tasks", "new", "a-task"],
    "tasks check": lambda _: ["tasks", "check", "task.yaml"],
    "tasks import": lambda ground: ["tasks", "import", "swe", _record(ground), "imported"],
    "tasks build": lambda _: ["tasks", "build", "task.yaml"],
    "tasks prove": lambda _: ["tasks", "prove", "task.yaml"],
    "tasks assay": lambda _: ["tasks", "assay", "task.yaml", "--solutions", "1", "--mutants", "1", "--no-attacks"],
    "tasks lock": lambda _: ["tasks", "lock", "dpkg"],
    "eval run": lambda _: ["eval", "run", "task.yaml", "--agent", "shell", "--out", "another"],
    "eval matrix": lambda _: ["eval", "matrix", "task.yaml", "--agent", "shell", "--out", "matrix"],
    "eval show": lambda _: ["eval", "show", "evaluation"],
    "eval diff": lambda _: ["eval", "diff", "evaluation", "evaluation"],
    "eval report": lambda _: ["eval", "report", "evaluation"],
    "doctor": lambda _: ["doctor"],
    "drain": lambda _: ["drain", "driver", "--undo"],
    "credentials": lambda _: ["credentials", "made"],
    "export": lambda _: ["export", "rows.jsonl", "--run-id", "json"],
    "verify": lambda _: ["verify", "turns.jsonl"],
    "gap": lambda ground: ["gap", _real(ground), "--column", "completion_logprobs"],
    "conformance": lambda ground: ["conformance", "--model", str(ground.model)],
}
"""How each command is run for its result; those that serve are below."""
SERVING = {"up", "dashboard", "openenv serve"}


def test_every_command_is_run() -> None:
    """A command that is added is run here, too."""
    assert RUNS.keys() | SERVING == commands().keys() - WITHOUT


@pytest.mark.parametrize("name", RUNS)
def test_json_is_all_that_a_command_prints(name: str, ground: Ground) -> None:
    """Each line of standard output is an object of the shape that docs/cli.md tells."""
    code, out, err = ground.run(*RUNS[name](ground), "--json", keys="cp note.txt out.txt\n")
    assert code in (console.OK, console.FAILED), err
    lines = json_lines(name, out)
    # There is no image, nothing to find, and dpkg is installed where there is an apt.
    assert lines or name in ("tasks build", "scan", "tasks lock")
    assert "Traceback" not in err


async def test_json_is_all_that_a_server_prints(ground: Ground) -> None:
    """`openenv serve` says where it listens and goes on; so do `up`, which test_cli.py starts, and `dashboard`."""
    process = await start(
        "openenv", "serve", "--port", "0", "--no-token", "--json", environment=ground.environment, cwd=ground.folder
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert json_lines("openenv serve", line.decode())[0]["base_url"].startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    rest, err = await process.communicate()
    assert process.returncode == 0 and not rest, err


@pytest.mark.parametrize(
    ("code", "argv", "environment", "said"),
    [
        (console.OK, ["agents"], {}, ""),
        (console.FAILED, ["watch", "--once", "--run", "typo"], {}, "no rollout"),
        (console.FAILED, ["export", "none.jsonl", "--run-id", "typo"], {}, "no ended rollout"),
        (console.USAGE, ["agents", "--nonsense"], {}, "--nonsense"),
        (console.USAGE, ["replay", "missing.jsonl"], {}, "there is no file"),
        (console.USAGE, ["diff", "task.yaml", "task.yaml"], {}, "task.yaml"),
        (console.UNREACHABLE, ["agents"], NOWHERE, "penstock up"),
        (console.UNREACHABLE, ["watch", "--once"], NOWHERE, "penstock up"),
        (console.REFUSED, ["agents", "show", "nobody"], {}, "nobody"),
        (console.REFUSED, ["replay", "nobody"], {}, "there is no rollout nobody"),
    ],
)
def test_an_exit_code_means_the_same_for_every_command(
    code: int, argv: list[str], environment: dict[str, str], said: str, ground: Ground
) -> None:
    """Scripts branch on it; the words for people are on standard error."""
    found, out, err = invoke(*argv, environment={**ground.environment, **environment}, cwd=ground.folder)
    assert found == code and said in err and "Traceback" not in err, (out, err)
    assert code == console.OK or not out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, console.INTERRUPTED), (signal.SIGTERM, console.TERMINATED)]
)
async def test_stopped_command_names_the_signal(number: signal.Signals, code: int, ground: Ground) -> None:
    """130 and 143, as shells count signals."""
    process = await start("watch", "--json", environment=ground.environment, cwd=ground.folder)
    assert process.stdout is not None
    assert await process.stdout.readline()
    process.send_signal(number)
    _, err = await process.communicate()
    assert process.returncode == code and b"Traceback" not in err, err


async def test_a_command_whose_reader_has_gone_ends_quietly(ground: Ground) -> None:
    """`penstock agents --json | head -1` is no error of anybody's."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "agents", "--json"),
            stdout=writing,
            stderr=PIPE,
            env={**os.environ, **ground.environment},
        )
    finally:
        os.close(writing)
    _, err = await process.communicate()
    assert process.returncode == console.CLOSED and not err, err
