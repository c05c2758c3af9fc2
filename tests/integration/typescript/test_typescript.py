"""The TypeScript client as its users have it: its package, its example, its own tests."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from tests.conformance.clients import subjects
from tests.support.services.stack import Running

from clients import nodejs
from penstock.client.transport.endpoints import write_connection
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = ROOT / "clients" / "typescript"
TSC: Final = FOLDER / "node_modules" / ".bin" / "tsc"


def run(*command: str, cwd: Path = FOLDER, env: Mapping[str, str] | None = None) -> str:
    """What a command says that has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=env or nodejs.environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def surroundings(stack: Running, folder: Path) -> dict[str, str]:
    """Where a program finds the services that run."""
    connection = folder / "connection.json"
    write_connection(connection, stack.stack.endpoints, pid=None)
    return {**nodejs.environment(), "PENSTOCK_CONNECTION": str(connection)}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Compiled, strictly."""
    subjects.build_typescript()


def test_the_typescript_clients_own_tests_pass() -> None:
    """Addresses, errors, completions and the book of leases, each without a service."""
    run("npm", "test", "--silent")


def test_the_typescript_package_works_in_an_empty_folder_with_types(tmp_path: Path) -> None:
    """What npm packs has the code, its types and nothing of the tests, and needs nothing of this repository."""
    (packed,) = json.loads(run("npm", "pack", "--json", "--ignore-scripts", "--pack-destination", str(tmp_path)))
    names = {file["path"] for file in packed["files"]}
    assert {"README.md", "dist/index.js", "dist/index.d.ts", "dist/gen/penstock/sandbox/v1/sandbox_pb.js"} <= names
    assert not [name for name in names if "/test/" in name or name.startswith("node_modules")]
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    run("npm", "install", "--prefer-offline", "--no-audit", "--no-fund", f"./{packed['filename']}", cwd=tmp_path)
    (tmp_path / "use.ts").write_text(
        'import { Completion, connect, NotFound, type Task } from "@penstock/client";\n'
        'import { SandboxService } from "@penstock/client/gen/penstock/sandbox/v1/sandbox_service_pb.js";\n'
        'const task: Task = { taskId: "t", instruction: "i", setup: ["true"] };\n'
        "const ids: Int32Array = Completion.ofTokens([1, 2], [-1, -2]).tokenIds;\n"
        "const ps = connect();\n"
        "console.log(task.taskId, ids.length, SandboxService.typeName, NotFound.name, typeof ps.groups.create);\n"
        "await ps.close();\n"
        "// @ts-expect-error: a task has an instruction\n"
        'const wrong: Task = { taskId: "t" };\n'
        "void wrong;\n"
    )
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2023"]
    options += ["--lib", "esnext,dom", "--types", "node", "--typeRoots", str(FOLDER / "node_modules" / "@types")]
    run(str(TSC), *options, "use.ts", cwd=tmp_path)
    assert run("node", "use.ts", cwd=tmp_path).split() == [
        "t", "2", "penstock.sandbox.v1.SandboxService", "NotFound", "function",
    ]  # fmt: skip


MANY: Final = """
import { connect } from "@penstock/client";

const ps = connect();
const rollout = await ps.rollouts.create({ taskId: "t", instruction: "i" }, "shell");
const watches = Array.from({ length: 600 }, () => rollout.events());
const first = await Promise.all(watches.map((watch) => watch.next())); // each is open, and stays so
const { rolloutId } = await ps.rollouts.get(rollout.rolloutId);
await rollout.cancel();
const ends = watches.map(async (watch) => (await Array.fromAsync(watch)).at(-1)?.event.case);
console.log(first.length, rolloutId === rollout.rolloutId, [...new Set(await Promise.all(ends))].join());
await ps.close();
"""


@pytest.mark.requirement("R148")
@pytest.mark.asyncio(loop_scope="session")
async def test_more_calls_at_once_than_a_service_takes_on_a_connection(stack: Running, tmp_path: Path) -> None:
    """600 watches of one rollout are open together, and a further call is answered beside them."""
    program = FOLDER / "examples" / f".many-{tmp_path.name}.ts"
    program.write_text(MANY)
    try:
        run(str(TSC), "-p", "examples")
        said = await asyncio.to_thread(run, "node", str(program), env=surroundings(stack, tmp_path))
    finally:
        program.unlink()
    assert said.split() == ["600", "true", "ended"]


def blocks_of(page: str) -> list[str]:
    """The TypeScript of a page: one program, or in a README one for each block."""
    return re.findall(r"^```ts\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def ran(tmp_path: Path, blocks: list[str], env: Mapping[str, str], *, times: int = 1) -> list[str]:
    """What a program of these blocks says each time, compiled strictly."""
    program = FOLDER / "examples" / f".page-{tmp_path.name}.ts"  # where the package's name means this one
    program.write_text("\n".join(blocks))
    try:
        run(str(TSC), "-p", "examples")
        return [run("node", str(program), env=env) for _ in range(times)]
    finally:
        program.unlink()


@pytest.mark.parametrize("page", ["clients/typescript/README.md", "docs/guides/typescript.md"])
@pytest.mark.asyncio(loop_scope="session")
async def test_the_program_of_a_page_runs(stack: Running, tmp_path: Path, page: str) -> None:
    """What a reader copies compiles strictly and does its work, against real services."""
    blocks = blocks_of(page)
    blocks = blocks[:1] if page.endswith("README.md") else blocks
    (said,) = await asyncio.to_thread(ran, tmp_path, blocks, surroundings(stack, tmp_path))
    assert "Int32Array" in said
    assert page != "clients/typescript/README.md" or said.splitlines()[-1] == "words: 2"


@pytest.mark.requirement("R87")
async def test_the_program_that_pushes_weights_runs(tmp_path: Path) -> None:
    """The README's other program, against an engine that takes weights."""
    config = random_config("qwen3")
    model = write_model(tmp_path / "tiny", config, random_tensors(config))
    blocks = blocks_of("clients/typescript/README.md")[1:]
    async with open_inference(model, tmp_path / "state") as engine:
        env = {**nodejs.environment(), "PENSTOCK_INFERENCE_ADDRESS": engine.address}
        said = await asyncio.to_thread(ran, tmp_path, blocks, env, times=2)
    assert said == ["version 1 is in force\n", "version 2 is in force\n"]


@pytest.mark.requirement("R82", "R87")
@pytest.mark.asyncio(loop_scope="session")
async def test_the_typescript_example_learns_which_command_does_the_task(stack: Running, tmp_path: Path) -> None:
    """A whole trainer, against real services and sandboxes: what is rewarded becomes likelier."""
    run(str(TSC), "-p", "examples")
    said = await asyncio.to_thread(run, "node", "examples/bandit.ts", "5", "2", env=surroundings(stack, tmp_path))
    assert float(said.splitlines()[-1]) > 0.5, said
    rollouts = [rollout async for rollout in stack.ps.rollouts.list(run_id="bandit-2")]
    assert len(rollouts) == 30 and all(item.outcome is not None and item.outcome.completed for item in rollouts)
