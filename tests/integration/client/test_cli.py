"""The command line as a person uses it: processes, exit codes, what is printed."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import atif
import orjson
import pytest
import yaml
from aiohttp import web
from tests.support.endpoints.loopback import serving, unused_port
from tests.support.endpoints.token_endpoint import VOCAB, token_endpoint
from tests.support.services.forking import genuine
from tests.support.services.processes import argv_of, children_of
from tests.support.terminal.commandline import json_lines
from tests.support.waiting import eventually_async

from penstock.cli.commands.doctor.inference import finding
from penstock.client import Unavailable, connect
from penstock.client.transport.endpoints import CONNECTION_FILE as CONNECTION
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

SECRET = "sk-test '$(leak)"
TASK_FILE = """
task_id: copy-note
instruction: Copy note.txt to out.txt
files: [{path: note.txt, content: "the word"}]
verifier: {commands: ['grep -q "the word" out.txt', "true"]}
"""


async def start(*argv: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Process:
    """A `penstock` process."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.cli.main",
        *argv,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "COLUMNS": "200", **(environment or {})},
        cwd=cwd,
    )


async def penstock(
    *argv: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    process = await start(*argv, environment=environment, cwd=cwd)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def connection(stack: LocalStack, tmp_path: Path) -> dict[str, str]:
    """An environment in which the command line finds the stack of the tests."""
    file = tmp_path / "connection.json"
    write_connection(file, stack.endpoints, pid=os.getpid())
    return {"PENSTOCK_CONNECTION": str(file)}


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """A task."""
    file = tmp_path / "task.yaml"
    file.write_text(TASK_FILE)
    return file


async def test_a_rollout_is_shown_live_and_its_trajectory_is_saved(
    connection: dict[str, str], task_file: Path, tmp_path: Path
) -> None:
    """In gate mode the command line is the trainer and lets the inference service answer."""
    code, out, err = await penstock(
        "rollout", "--agent", "shell", "--task", str(task_file), environment=connection, cwd=tmp_path
    )
    assert code == 0, (out, err)
    for said in ("== running", "calls: bash", "completed", "reward 1", "2 calls", "saved in runs/rollouts/shell-copy"):
        assert said in out, out
    (folder,) = (tmp_path / "runs" / "rollouts").iterdir()
    assert f"rollout: {folder.name}" in err
    turns = [orjson.loads(line) for line in (folder / "turns.jsonl").read_bytes().splitlines()]
    assert [turn["state"] for turn in turns] == ["delivered", "delivered"]
    assert turns[0]["request_body"]


async def test_several_rollouts_give_lines_of_json(connection: dict[str, str], task_file: Path, tmp_path: Path) -> None:
    """A program can read what a person sees."""
    code, out, err = await penstock(
        "rollout", "--agent", "shell", "--task", str(task_file), "-n", "2", "--json", "--mode", "transparent_proxy",
        environment=connection, cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    lines = [orjson.loads(line) for line in out.splitlines()]
    results = [line for line in lines if "completed" in line]
    assert [result["reward"] for result in results] == [1.0, 1.0]
    assert {line["event"] for line in lines if "event" in line} >= {"PhaseChanged", "AgentEvent", "Ended"}


async def test_failed_rollout_exits_with_1_and_a_refused_one_with_4(connection: dict[str, str], tmp_path: Path) -> None:
    """Errors are one line that says what to do, without a traceback."""
    failing = tmp_path / "failing.yaml"
    failing.write_text("instruction: x\nsetup: [exit 9]\n")
    code, out, _ = await penstock(
        "rollout", "--agent", "shell", "--task", str(failing), environment=connection, cwd=tmp_path
    )
    assert code == 1 and "failed: " in out and "exit 9" in out
    code, _, err = await penstock(
        "rollout", "--agent", "nobody", "--task", str(failing), environment=connection, cwd=tmp_path
    )
    assert code == 4 and "shell" in err and "Traceback" not in err
    failing.write_text("instruction: x\nsteup: []\n")
    code, _, err = await penstock("rollout", "--agent", "shell", "--task", str(failing), environment=connection)
    assert code == 2 and "steup: line 2: no such key; did you mean setup?" in err.replace("\n", "")


@pytest.mark.requirement("R27")
async def test_absent_services_exit_with_3_and_the_command_that_starts_them() -> None:
    """A service that is not reachable is a clear error."""
    code, _, err = await penstock("agents", environment={"PENSTOCK_DRIVER_ADDRESS": "127.0.0.1:1"})
    assert code == 3 and "penstock up" in err and "Traceback" not in err


@pytest.mark.requirement("R1")
async def test_key_comes_from_the_environment_never_the_command_line(task_file: Path) -> None:
    """No secret in an argv."""
    code, _, err = await penstock(
        "rollout", "--agent", "shell", "--task", str(task_file), "--upstream", "http://127.0.0.1:1/v1",
        "--api-key-env", "NOT_SET",
    )  # fmt: skip
    assert code == 2 and "NOT_SET" in err


@pytest.mark.requirement("R11")
async def test_upstream_is_asked_with_the_environments_key_without_any_service(task_file: Path, tmp_path: Path) -> None:
    """The key goes to the address that it was given for; without services the command starts its own."""
    asked: list[tuple[str | None, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append((request.headers.get("Authorization"), await request.json()))
        command = {"name": "bash", "arguments": orjson.dumps({"command": "cp note.txt out.txt"}).decode()}
        call = {"id": "c1", "type": "function", "function": command}
        first = len(asked) == 1
        message = {"role": "assistant", "content": None if first else "ok", **({"tool_calls": [call]} if first else {})}
        return web.json_response(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": "some-model",
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if first else "stop"}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with serving(app) as url:
        code, out, err = await penstock(
            "rollout", "--agent", "shell", "--task", str(task_file), "--upstream", f"{url}/v1",
            "--model", "some-model", "--api-key-env", "MY_KEY", "--state-dir", str(tmp_path / "state"),
            environment={"MY_KEY": SECRET}, cwd=tmp_path,
        )  # fmt: skip
    assert code == 0, (out, err)
    assert "services for this command only" in err and "reward 1" in out
    assert [key for key, _ in asked] == [f"Bearer {SECRET}"] * 2
    assert {body["model"] for _, body in asked} == {"some-model"}
    for written in [*(tmp_path / "runs").rglob("*"), *(tmp_path / "state").rglob("*")]:
        assert not written.is_file() or SECRET.encode() not in written.read_bytes(), written


@pytest.mark.requirement("R70")
async def test_an_interrupted_rollout_is_cancelled_and_exits_130(connection: dict[str, str], tmp_path: Path) -> None:
    """An interrupt leaves nothing running."""
    slow = tmp_path / "slow.yaml"
    slow.write_text("instruction: x\nsetup: [sleep 600]\n")
    process = await start(
        "rollout", "--agent", "shell", "--task", str(slow), "--json", environment=connection, cwd=tmp_path
    )
    assert process.stdout is not None
    async for line in process.stdout:
        if orjson.loads(line).get("data", {}).get("phase") in ("preparing", "setting_up"):
            break
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130, err
    assert b"cancelling" in err and b"Traceback" not in err
    code, out, _ = await penstock("rollout", "--help", environment=connection)
    assert code == 0 and "--skip-permissions" in out


async def test_up_keeps_services_running_until_stopped(tmp_path: Path) -> None:
    """One command runs everything; clients find it by its connection file; nothing is left afterwards."""
    state, port = tmp_path / "state", unused_port()
    with genuine():
        process = await start("up", "--free-ports", "--state-dir", str(state), "--set", f"driver.port={port}", "--json")
    assert process.stdout is not None and process.stderr is not None
    (told,) = json_lines("up", (await process.stdout.readline()).decode())
    assert told["services"]["driver"].endswith(f":{port}")
    connection = state / "connection.json"
    assert connection.stat().st_mode & 0o777 == 0o600
    content = orjson.loads(connection.read_bytes())
    assert content["addresses"]["driver"].endswith(f":{port}")
    page = str(told["dashboard"] or "").partition("#")[0]
    assert content.get("dashboard", "") == page, "commands link to its pages, without the token"
    code, out, err = await penstock("agents", "list", environment={"PENSTOCK_CONNECTION": str(connection)})
    assert code == 0 and "opencode" in out, err
    assert content["token"] not in out + err
    for command in (("agents",), ("agents", "show", "opencode"), ("doctor", "--live", "--min-free-gb", "0")):
        code, out, err = await penstock(*command, "--state-dir", str(state))
        assert code == 0, (command, out, err)
    code, _, err = await penstock("agents", "list", "--state-dir", str(state), environment={"PENSTOCK_TOKEN": "0" * 64})
    assert code == 0, err
    process.send_signal(signal.SIGTERM)
    _, err_bytes = await process.communicate()
    assert process.returncode == 0, err_bytes
    assert f"try: penstock agents --state-dir {state}, or".encode() in err_bytes, "what it says to try works"
    assert not connection.exists()
    for setting, problem in (("nobody.port=1", "is not SERVICE.NAME=VALUE"), ("driver.port=[", "is not YAML")):
        code, _, err = await penstock("up", "--state-dir", str(state), "--set", setting)
        assert code == 2 and problem in err


@pytest.mark.requirement("R1", "R27")
async def test_up_asks_an_endpoint_and_doctor_says_what_it_gives(tmp_path: Path) -> None:
    """The key comes by the environment and shows nowhere; until the endpoint answers, that is what is said."""
    model, state, port = tmp_path / "model", tmp_path / "state", unused_port()
    model.mkdir()
    (model / "config.json").write_bytes(orjson.dumps({"vocab_size": VOCAB}))
    with genuine():
        process = await start(
            "up", "--free-ports", "--state-dir", str(state), "--model-dir", str(model), "--engine", "openai",
            "--engine-option", f"base_url=http://127.0.0.1:{port}/v1", "--engine-key-env", "UPSTREAM_KEY",
            environment={"UPSTREAM_KEY": "sk-of-the-upstream"},
        )  # fmt: skip
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"ingress"):
            break

    _, out, err = await penstock("doctor", "--json", environment={"PENSTOCK_CONNECTION": str(state / CONNECTION)})
    waiting = next(found for found in orjson.loads(out)["findings"] if found["name"] == "inference service")
    assert not waiting["ok"] and "cannot be reached" in waiting["found"] and "sk-of" not in out + err
    async with token_endpoint(port, key="sk-of-the-upstream", mode="raw"), connect(state / CONNECTION) as ps:

        async def found() -> bool:
            try:
                await ps.inference.info()
            except Unavailable:
                return False
            return True

        await eventually_async(found, "the endpoint is found")
        told = finding(await ps.inference.info(), {"address": "there"})
    assert "openai (test 1.2) serves model: token ids and raw logprobs" in told.found and told.details["trainable"]
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    logs = "".join(file.read_text() for file in state.rglob("*.log"))
    assert process.returncode == 0 and "sk-of" not in logs
    code, _, err = await penstock("up", "--engine", "openai", "--model-dir", str(model), "--engine-key-env", "NOT_SET")
    assert code == 2 and "--engine-key-env" in err


@pytest.mark.requirement("R1", "R70")
async def test_stopped_rollout_ends_its_services_and_removes_their_secrets(tmp_path: Path) -> None:
    """SIGTERM is as an interrupt; no file with a token stays."""
    slow = tmp_path / "slow.yaml"
    slow.write_text("instruction: x\nsetup: [sleep 600]\n")
    state = tmp_path / "state"
    process = await start(
        "rollout", "--agent", "shell", "--task", str(slow), "--json", "--mode", "black_box", "--upstream",
        "http://127.0.0.1:1/v1", "--model", "m", "--state-dir", str(state), cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    async for line in process.stderr:
        if b"services for this command only" in line:
            break
    assert (state / "private").is_dir()
    process.send_signal(signal.SIGTERM)
    _, err = await process.communicate()
    assert process.returncode == 143, err
    assert not (state / "private").exists()


@pytest.mark.usefixtures("genuine_starts")
async def test_a_taken_port_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    """The service's own words, not its traceback."""
    holder = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 7703)
    async with holder:
        code, _, err = await penstock("up", "--state-dir", str(tmp_path / "state"))
    assert code == 3, err
    assert "127.0.0.1:7703: the service cannot listen there" in err and "--free-ports" in err
    first, told = err.strip().splitlines()  # what is being started, then what went wrong
    assert first.startswith("starting interception") and "Traceback" not in told


@pytest.mark.requirement("R66")
async def test_agents_are_listed_shown_checked_and_registered(connection: dict[str, str], tmp_path: Path) -> None:
    """The list is the registry's; adding an agent is adding one YAML file."""
    code, out, err = await penstock("agents", "show", "shell", environment=connection)
    assert code == 0 and "argv:" in out, err
    derived = tmp_path / "derived.yaml"
    derived.write_text(out.replace("name: shell", "name: derived", 1))
    code, out, err = await penstock("agents", "register", str(derived), environment=connection)
    assert code == 0 and "registered derived" in out, (out, err)
    code, out, err = await penstock("agents", "check", "shell", environment=connection)
    assert code == 0 and "ok" in out, (out, err)
    spec = tmp_path / "mine.yaml"
    spec.write_text(
        """
name: mine
version: "1"
argv: [sh, -c, "cat > /dev/null"]
check_argv: ["true"]
instruction: {method: stdin}
env: {URL: "{{base_url}}", KEY: "{{api_key}}"}
dialects: [chat_completions]
events: {source: none}
default_timeout_s: 30
"""
    )
    code, out, err = await penstock("agents", "register", str(spec), environment=connection)
    assert code == 0 and "registered mine 1" in out, (out, err)
    spec.write_text("name: mine\nargs: []\n")
    code, _, err = await penstock("agents", "register", str(spec), environment=connection)
    assert code == 2 and "args: no such key" in err
    spec.write_text(
        "name: mine\nversion: '1'\nargv: [x, '{{nothing}}']\ninstruction: {method: argv}\ndialects: [messages]\n"
    )
    code, _, err = await penstock("agents", "register", str(spec), environment=connection)
    assert code == 2, err  # the same kind of refusal, whoever found it
    assert "unknown placeholder {{nothing}}" in err and "nothing uses {{base_url}}" in err


@pytest.mark.requirement("R66")
async def test_a_new_agents_file_is_certified_before_anything_is_registered(
    connection: dict[str, str], tmp_path: Path
) -> None:
    """The scaffold holds as it is; a check reads, with --run installs and runs, and leaves nothing."""
    code, out, err = await penstock("agents", "new", "mine", "--npm", "@me/agent@1.2.3", cwd=tmp_path)
    assert code == 0 and "wrote mine.yaml" in out, (out, err)
    code, _, err = await penstock("agents", "new", "mine", cwd=tmp_path)
    assert code == 2 and "exists" in err
    code, _, err = await penstock("agents", "new", "other", "--pypi", "agent", cwd=tmp_path)
    assert code == 2 and "exact version" in err and not (tmp_path / "other.yaml").exists()
    code, out, err = await penstock("agents", "check", "mine.yaml", environment=connection, cwd=tmp_path)
    assert code == 0 and "spec ok" in out and "install" not in out, (out, err)

    code, text, err = await penstock("agents", "show", "shell", environment=connection)
    file = tmp_path / "copied.yaml"
    file.write_text(text.replace("name: shell", "name: copied", 1))
    code, out, err = await penstock("agents", "check", str(file), "--run", environment=connection)
    assert code == 0, (out, err)
    for step in ("spec", "install", "start", "endpoint", "instruction", "work", "exit", "events", "secrets"):
        assert f"{step} ok" in out, (step, out, err)
    file.write_text(file.read_text().replace("{{instruction_path}}", "/nowhere"))
    code, out, err = await penstock("agents", "check", str(file), "--run", environment=connection)
    assert code == 1 and "endpoint failed" in out and "end of its output" in out, (out, err)
    code, out, err = await penstock("agents", environment=connection)
    assert "copied" not in out, (out, err)


@pytest.mark.requirement("R66", "R128")
async def test_an_agent_that_does_not_repeat_itself_is_told_why(connection: dict[str, str], tmp_path: Path) -> None:
    """`agents check --run --replay` loses its sandbox at the last call; one that tells its model the time parts."""
    code, _, err = await penstock("agents", "check", "shell", "--replay", environment=connection)
    assert code == 2 and "give --run too" in err
    code, out, err = await penstock("agents", "check", "shell", "--run", "--replay", environment=connection)
    assert code == 0 and "replay ok in a fresh sandbox it made the same 2 calls" in " ".join(out.split()), (out, err)
    code, text, err = await penstock("agents", "show", "shell", environment=connection)
    spec = yaml.safe_load(text)
    shown = 'date "+Now it is %F %T.%N" >>"$0"; exec "$@"'
    spec |= {"name": "dated", "argv": ["sh", "-c", shown, "{{instruction_path}}", *spec["argv"]]}
    file = tmp_path / "dated.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    code, out, err = await penstock("agents", "check", str(file), "--run", "--replay", "--json", environment=connection)
    told = [orjson.loads(line) for line in out.splitlines()]
    assert code == 1 and told[-1]["step"] == "replay" and told[-1]["outcome"] == "failed", (out, err)
    replay = told[-1]["replay"]
    assert (replay["calls"], replay["replayed"], replay["reached"]) == (2, 0, False)
    first = replay["divergences"][0]
    assert (first["call"], first["cause"]) == (0, "DATE") and first["token"] > 0
    assert "Now it is" in first["recorded"] and "Now it is" in first["new"] and first["recorded"] != first["new"]


async def test_export_writes_a_file(connection: dict[str, str], task_file: Path, tmp_path: Path) -> None:
    """Trajectories leave as rows."""
    (tmp_path / "prices.yaml").write_text('models: {"*": {prompt: 1000000, completion: 0}}')
    _, out, _ = await penstock(
        "rollout", "--agent", "shell", "--task", str(task_file), "--run-id", "cli-export", "--prices", "prices.yaml",
        environment=connection, cwd=tmp_path,
    )  # fmt: skip
    (prompt,) = re.findall(r"(\d+) prompt and", out)
    assert f"cost {int(prompt):.4f} USD" in out
    file = tmp_path / "rows.jsonl"
    code, out, err = await penstock("export", str(file), "--run-id", "cli-export", environment=connection)
    assert code == 0 and "1 row of" in out, (out, err)
    assert orjson.loads(file.read_bytes())["reward"] == 1.0
    of_run = ("--run-id", "cli-export")
    file = tmp_path / "chat.jsonl"
    code, out, err = await penstock("export", str(file), "--table", "chat", *of_run, environment=connection)
    assert code == 0 and "1 row of chat" in out, (out, err)
    row = orjson.loads(file.read_bytes())
    said = [message["role"] for message in row["messages"]]
    assert said[0] == "system" and said[-1] == "assistant" and "tool" in said and row["left_out"] == []
    assert row["tools"][0]["function"]["name"] and len(row["call_ids"]) == said.count("assistant")
    code, out, err = await penstock("export", str(tmp_path / "atif"), "--atif", *of_run, environment=connection)
    assert code == 0 and "1 rollout in" in out, (out, err)
    (document,) = (tmp_path / "atif").iterdir()
    kept = atif.Trajectory.model_validate_json(document.read_bytes())
    sampled = [step.metrics for step in kept.steps if step.source == "agent"]
    assert len(sampled) == said.count("assistant") and all(one and one.completion_token_ids for one in sampled)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_an_export_that_matches_nothing_says_so_and_makes_no_file(
    connection: dict[str, str], tmp_path: Path, suffix: str
) -> None:
    """A mistyped id is no empty success."""
    file = tmp_path / f"rows.{suffix}"
    code, out, err = await penstock("export", str(file), "--run-id", "typo", environment=connection)
    assert code == 1 and not out and "no ended rollout with run id typo" in err
    assert not list(tmp_path.glob("*rows*"))
    for options in ((str(tmp_path / "absent" / "rows.jsonl"),), (str(file), "--state-dir", str(tmp_path / "absent"))):
        code, _, err = await penstock("export", *options, environment=connection)
        assert code == 2 and "there is no directory" in err
    assert not (tmp_path / "absent").exists()


async def test_a_state_directory_that_is_named_is_the_one_that_is_used(
    connection: dict[str, str], stack: LocalStack, tmp_path: Path
) -> None:
    """Services that run elsewhere do not answer for it; those that run there do."""
    state = tmp_path / "state"
    state.mkdir()
    code, _, err = await penstock(
        "export", str(tmp_path / "rows.jsonl"), "--state-dir", str(state), environment=connection
    )
    assert code == 1 and f"logs in {state}/logs" in err, err
    write_connection(state / "connection.json", stack.endpoints, pid=os.getpid())
    code, _, err = await penstock("export", str(tmp_path / "rows.jsonl"), "--state-dir", str(state), "--run-id", "typo")
    assert code == 1 and "logs in" not in err, err


@pytest.mark.requirement("R97")
async def test_up_starts_a_service_that_was_killed_again_and_reports_it(tmp_path: Path) -> None:
    """A line when it died, a line when it is back; `doctor --live` knows."""
    state = str(tmp_path / "state")
    with genuine():
        up = await start("up", "--free-ports", "--state-dir", state, "--set", f"sandbox.port={unused_port()}")
    assert up.stdout is not None and up.stderr is not None
    async for line in up.stdout:
        if line.startswith(b"ingress"):
            break
    (pid,) = _children(up.pid, "penstock_sandbox")
    os.kill(pid, signal.SIGKILL)
    said = []
    async for line in up.stderr:
        said.append(line.decode())
        if "is running again" in said[-1]:
            break
    (death,) = [line for line in said if "was killed by SIGKILL" in line]
    assert death.startswith("The sandbox service was killed by SIGKILL")
    assert "sandbox.log" in death and "restarts in 0.5 s (restart 1 of at most 5 in 10 minutes)" in death
    code, out, _ = await penstock("doctor", "--live", "--state-dir", state)
    assert code == 0 and "SERVICE_RESTARTED" in out
    up.terminate()
    assert await up.wait() == 0


def _children(pid: int, module: str) -> list[int]:
    """The child processes that run a module."""
    return [child for child in children_of(pid) if module.encode() in argv_of(child)]


async def test_piped_output_is_not_cut(connection: dict[str, str]) -> None:
    """A pipe has no width."""
    code, out, _ = await penstock("agents", environment={**connection, "COLUMNS": "80"})
    assert code == 0 and "…" not in out
    (row,) = [line for line in out.splitlines() if line.startswith("claude-code")]
    assert "append_system_prompt" in row


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_verify_proves_an_export_offline(
    connection: dict[str, str], task_file: Path, tmp_path: Path, suffix: str
) -> None:
    """What was exported is what the gate recorded; a token that was changed is found."""
    await penstock(
        "rollout", "--agent", "shell", "--task", str(task_file), "--run-id", f"verify-{suffix}", environment=connection,
        cwd=tmp_path,
    )  # fmt: skip
    turns, samples = tmp_path / f"turns.{suffix}", tmp_path / f"samples.{suffix}"
    for file, table in ((turns, "turns"), (samples, "sequences")):
        code, _, err = await penstock(
            "export", str(file), "--table", table, "--run-id", f"verify-{suffix}", environment=connection
        )
        assert code == 0, err
    code, out, err = await penstock("verify", str(turns), "--sequences", str(samples), "--json")
    told = orjson.loads(out)
    assert code == 0 and told["holds"] and told["calls"] > 0 and told["samples"] == 1, (out, err)
    if suffix == "jsonl":
        row, *rest = turns.read_bytes().splitlines(keepends=True)
        changed = orjson.loads(row)
        changed["completion_token_ids"][0] += 1
        turns.write_bytes(orjson.dumps(changed) + b"\n" + b"".join(rest))
        code, out, err = await penstock("verify", str(turns))
        assert code == 1 and "broken" in out and changed["call_id"] in out.replace("\n", ""), (out, err)


async def test_doctor_says_what_this_machine_can_do() -> None:
    """Each finding is OK or missing, with what to install; exit code 1 only when the local backend cannot work."""
    code, out, err = await penstock("doctor", "--json", environment={"E2B_API_KEY": "", "HF_TOKEN": ""})
    report = orjson.loads(out)
    assert code == (0 if report["local_backend"] else 1), err
    names = {finding["name"] for finding in report["findings"]}
    assert names >= {"Python", "user namespaces", "bubblewrap", "overlay", "cgroups", "node", "GPU", "disk"}
    assert names >= {"docker", "e2b", "hf"}
    assert all(finding["advice"] for finding in report["findings"] if not finding["ok"])
    code, out, _ = await penstock("doctor")
    assert "Python" in out


@pytest.mark.requirement("R8", "R48")
async def test_doctor_asks_a_service_that_runs_and_shows_no_key(connection: Mapping[str, str]) -> None:
    """What the service says of its backends, which may be configured otherwise than this command."""
    closed = {"E2B_API_KEY": SECRET, "E2B_API_URL": "http://127.0.0.1:1", "HF_TOKEN": SECRET, "HF_ENDPOINT": "http://x"}
    for arguments in (["--json"], []):
        code, out, err = await penstock("doctor", *arguments, environment={**connection, **closed})
        assert code == 0 and "sk-test" not in out + err
        if arguments:
            found = {finding["name"]: finding for finding in orjson.loads(out)["findings"]}
            assert found["sandbox service"]["ok"] and found["sandbox service"]["details"]["local"] is True
            assert found["e2b"]["details"]["reachable"] is False and not found["hf"]["ok"]
    nobody = {"PENSTOCK_SANDBOX_ADDRESS": "127.0.0.1:1", "PENSTOCK_TOKEN": SECRET}
    code, out, err = await penstock("doctor", "--json", environment=nobody)
    found = {finding["name"]: finding for finding in orjson.loads(out)["findings"]}
    assert not found["sandbox service"]["ok"] and found["sandbox service"]["advice"] and "sk-test" not in out + err


@pytest.mark.usefixtures("genuine_starts")
async def test_serve_runs_one_service_and_passes_its_arguments_on() -> None:
    """`penstock serve sandbox --help` is the service's own help."""
    code, out, err = await penstock("serve", "sandbox", "--help")
    assert code == 0 and "--max-sandboxes" in out, err
    code, _, err = await penstock("serve", "kitchen")
    assert code == 2 and "sandbox, driver, interception, inference" in err


async def test_version_names_what_is_installed() -> None:
    """One line for each distribution."""
    code, out, _ = await penstock("--version")
    assert code == 0 and "penstock-protos 0" in out
