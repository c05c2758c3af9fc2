"""The Go client as its users have it: its module in a program of theirs, its example, what it is built of."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from tests.support.services.stack import Running

from penstock.client.transport.endpoints import write_connection
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model
from tools import golang

ROOT: Final = Path(__file__).resolve().parents[3]
MODULE: Final = "penstock.example/penstock"
LINKED: Final = "-ldflags=-w"
"""Without tables for a debugger, which take most of a linker's time. A trace of a panic has its lines all the same."""


def run(*command: str, cwd: Path = golang.ROOT, env: Mapping[str, str] | None = None) -> str:
    """What a command says that has to succeed, and without complaints."""
    done = subprocess.run(
        command, cwd=cwd, env=env or golang.environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def go(*arguments: str, cwd: Path = golang.ROOT, **more: str) -> str:
    """What `go` says."""
    prepared = golang.environment()
    return run(str(golang.HOME / "go" / "bin" / "go"), *arguments, cwd=cwd, env={**prepared, **more})


def surroundings(stack: Running, folder: Path) -> dict[str, str]:
    """Where a program finds the services that run."""
    connection = folder / "connection.json"
    write_connection(connection, stack.stack.endpoints, pid=None)
    return {**os.environ, "PENSTOCK_CONNECTION": str(connection)}


def test_the_go_client_is_well_formed_and_passes_its_tests() -> None:
    """Endpoints, errors, retries, sessions on a network that breaks, goroutines that are left behind; no data race."""
    sources = [path for path in sorted(golang.ROOT.rglob("*.go")) if golang.HOME not in path.parents]
    formatter = golang.HOME / "go" / "bin" / "gofmt"
    assert run(str(formatter), "-l", *(str(path) for path in sources)) == "", "run gofmt -w on these"
    go("vet", "-race", "./...")
    go("test", "-race", LINKED, "-vet=off", "-count=1", "./...")  # run, even where a run of the same is remembered


def built(tmp_path: Path, blocks: list[str]) -> str:
    """A program of these blocks in a module of its own, compiled."""
    (tmp_path / "main.go").write_text("\n".join(blocks))
    requires = (golang.ROOT / "go.mod").read_text().partition("\n\n")[2]
    (tmp_path / "go.mod").write_text(f"module reader\n\n{requires}\nrequire {MODULE} v0.0.0\n")
    (tmp_path / "go.sum").write_text((golang.ROOT / "go.sum").read_text())
    theirs = (golang.HOME / "go.work").read_text().partition("replace ")[2]
    work = f"go 1.23\n\nuse .\n\nreplace {MODULE} => {json.dumps(str(golang.ROOT))}\n\nreplace {theirs}"
    (tmp_path / "go.work").write_text(work)
    go("vet", "-race", ".", cwd=tmp_path, GOWORK=str(tmp_path / "go.work"))
    go("build", "-race", LINKED, "-o", "program", ".", cwd=tmp_path, GOWORK=str(tmp_path / "go.work"))
    return str(tmp_path / "program")


def blocks_of(page: str) -> list[str]:
    """The Go of a page: one program, or in a README one for each block."""
    return re.findall(r"^```go\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["clients/go/README.md", "docs/guides/go.md"])
@pytest.mark.asyncio(loop_scope="session")
async def test_the_program_of_a_page_runs(stack: Running, tmp_path: Path, page: str) -> None:
    """What a reader copies into a module of his own compiles and does its work, against real services."""
    blocks = blocks_of(page)
    program = await asyncio.to_thread(built, tmp_path, blocks[:1] if page.endswith("README.md") else blocks)
    said = await asyncio.to_thread(run, program, env=surroundings(stack, tmp_path))
    rollouts = [line for line in said.splitlines() if not line.startswith("words")]
    assert len(rollouts) == 8, said  # a line for each rollout
    assert page != "clients/go/README.md" or said.splitlines()[-1] == "words: 2"


@pytest.mark.requirement("R87")
async def test_the_program_that_pushes_weights_runs(tmp_path: Path) -> None:
    """The README's other program, against an engine that takes weights."""
    program = await asyncio.to_thread(built, tmp_path, blocks_of("clients/go/README.md")[1:])
    config = random_config("qwen3")
    model = write_model(tmp_path / "tiny", config, random_tensors(config))
    async with open_inference(model, tmp_path / "state") as engine:
        env = {**os.environ, "PENSTOCK_INFERENCE_ADDRESS": engine.address}
        said = [await asyncio.to_thread(run, program, env=env) for _ in range(2)]
    assert said == ["version 1 is in force\n", "version 2 is in force\n"]


@pytest.mark.requirement("R79", "R82", "R87")
@pytest.mark.asyncio(loop_scope="session")
async def test_the_go_example_learns_which_command_does_the_task(stack: Running, tmp_path: Path) -> None:
    """A whole trainer, against real services and sandboxes: what is rewarded becomes likelier."""
    program = tmp_path / "trainer"
    await asyncio.to_thread(go, "build", "-race", LINKED, "-o", str(program), "./examples/trainer")
    said = await asyncio.to_thread(run, str(program), "-steps", "3", "-n", "6", env=surroundings(stack, tmp_path))
    steps = re.findall(r"^step (\d+): reward ([\d.]+), P\(cedar\) = ([\d.]+)$", said, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["1", "2", "3"], said
    probabilities = [0.25, *(float(probability) for _, _, probability in steps)]
    assert probabilities == sorted(probabilities), "a step of ascent made the rewarded command less likely"
    assert probabilities[-1] > 0.5


def test_go_client_is_built_of_what_go_mod_requires() -> None:
    """Go took every module in the version that go.mod names, by go.sum's sums, but for the one that is made here."""
    told = "{{with .Module}}{{.Path}} {{.Version}} {{with .Replace}}{{.Path}}{{end}}{{end}}"
    used = {line for line in go("list", "-deps", "-f", told, "./...").splitlines() if not line.startswith(MODULE)}
    made = (
        f"google.golang.org/genproto/googleapis/rpc v0.0.0-20241007155032-5fefd90f89a9 {golang.HOME / 'error-details'}"
    )
    required = re.findall(r"^\s+(\S+\.\S+ v\S+)", (golang.ROOT / "go.mod").read_text(), re.MULTILINE)
    assert used - {""} == {made, *(f"{item} " for item in required if item not in made)}
    sums = (golang.ROOT / "go.sum").read_text().splitlines()
    assert len(sums) == 2 * len(required)
    assert all(any(line.startswith(f"{item} h1:") for line in sums) for item in required)


def test_missing_toolchain_is_reported_with_the_fix(tmp_path: Path) -> None:
    """What cannot be had is said in words, and how to do without it."""
    elsewhere = tmp_path / "tools"
    elsewhere.mkdir()
    (elsewhere / "golang.py").write_text((ROOT / "tools" / "golang.py").read_text())
    command = [sys.executable, "-m", "tools.golang", "run", "go", "version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "make go-client" in done.stderr
