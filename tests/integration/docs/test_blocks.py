"""Every block of code on every page: classified, parsed, and run where it can be."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import pytest_asyncio
import typer
import yaml
from tests.integration.docs import left_out
from tests.integration.docs.blocks import ALL, KINDS, Block, Command, commands, unfenced
from tests.integration.docs.stand import Stand, names, prepare, standing
from tests.support.charts import render
from tests.support.endpoints import debian
from tests.support.endpoints.package_index import NPM_LOCK
from tests.unit.docs.pages import ROOT
from tests.unit.docs.test_commands import PAGES

from penstock.analysis.prices import Prices
from penstock.analysis.scan import load_rules
from penstock.cli.main import app
from penstock.client import Task
from penstock.client.wire.agents import load_spec
from penstock.tasks.scaffold import files
from penstock.tasks.verifiers import load_verifiers
from penstock_inference.engines.scripted.script import Script

SHELL = [command for block in ALL if block.kind in {"sh", "console"} for command in commands(block)]
PROGRAMS = [block for block in ALL if block.kind == "python"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """One stack for all pages."""
    async with standing(tmp_path_factory.mktemp("pages")) as here:
        yield here


def pages(blocks: list[Block]) -> list[str]:
    """The pages of blocks, each once."""
    return list(dict.fromkeys(block.page for block in blocks))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_a_page_says_what_it_is(page: Path) -> None:
    """A block that nobody could check is found by its page and line."""
    name = page.relative_to(ROOT).as_posix()
    assert not unfenced(page), f"{name}: fence these lines and say what they are"
    unknown = [f"{block} {block.kind!r}" for block in ALL if block.page == name and block.kind not in KINDS]
    assert not unknown, f"say one of {sorted(KINDS)} behind the fence"


@pytest.mark.parametrize("command", SHELL, ids=lambda command: f"{command.block}: {command.line}"[:100])
def test_a_command_on_a_page_is_one_that_the_program_takes(command: Command) -> None:
    """Its options, arguments and choices exist; nothing is run."""
    subprocess.run(["bash", "-nc", command.line], check=True)
    for words in command.calls():
        if words[0].endswith("penstock"):
            parse(typer.main.get_command(app), words[1:], str(command.block))
        else:
            assert words[0] in left_out.PROGRAMS, f"{command.block}: who runs {words[0]}, or why not? (left_out.py)"


def parse(command: Any, words: list[str], where: str) -> None:
    """Walks a command line down the program's tree; the command at its end reads the rest and is not invoked."""
    if hasattr(command, "commands"):
        _, chosen, rest = command.resolve_command(typer.Context(command), list(words))
        assert chosen is not None, f"{where}: no command {words[0]}"
        parse(chosen, rest, where)
        return
    try:
        with command.make_context(where, list(words)):
            pass
    except typer.BadParameter as error:  # files that a reader has by then
        if "does not exist" not in str(error):
            raise


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", pages([command.block for command in SHELL]))
async def test_the_commands_of_a_page_run_and_print_what_it_shows(page: str, stand: Stand) -> None:
    """In order, in one directory, with services that run; what is not run stands in `left_out.py`."""
    elsewhere = {command.line for command in SHELL[: next(i for i, c in enumerate(SHELL) if c.block.page == page)]}
    wanted = [
        command
        for command in SHELL
        if command.block.page == page
        and command.line not in elsewhere  # what a page before has shown runs the same here
        and not any(left_out.reason(words) for words in command.calls())
    ]
    if not wanted:
        return
    stage = stand.stage(page)
    await prepare(stand, page)
    for command in wanted:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", stand.replaced(command.line).replace(".venv/bin/penstock", "penstock")),
            cwd=stage,
            env=stand.environment(stage),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0, f"{command.block}: {command.line}\n{printed.decode()}"
        compare(command, printed.decode())


def compare(command: Command, printed: str) -> None:
    """Each line that the page shows is printed, in order, whatever the figures are; `...` stands for any lines."""
    left = iter([shape(line) for line in printed.splitlines()])
    for line in command.printed:
        if line.strip() not in {"", "..."}:
            assert shape(line) in left, f"{command.block}: {line!r} is not printed (in this order):\n{printed}"


def shape(line: str) -> str:
    """A line without its figures, identifiers and widths."""
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "#", line)
    return " ".join(re.sub(r"\d+(?:[.,:]\d+)*", "#", line).split())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", pages(PROGRAMS))
async def test_the_programs_of_a_page_run(page: str, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, with real services; a program that is left out compiles and its imports are there."""
    monkeypatch.chdir(stand.stage(page))
    for name, value in stand.environment(stand.stage(page)).items():
        monkeypatch.setenv(name, value)
    async with names(stand, page) as known:
        for block in PROGRAMS:
            if block.page != page:
                continue
            code = compile(
                stand.replaced(block.text), str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
            check_imports(block)
            if any(text in block.text for text in left_out.BLOCKS):
                continue
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, known)
            else:
                await asyncio.to_thread(exec, code, known)
            await run_what_it_defines(block, known)


async def run_what_it_defines(block: Block, known: dict[str, Any]) -> None:
    """A page that shows a function shows it to be called."""
    if "async def train(task: Task, engine)" in block.text:
        await known["train"](known["task"], known["engine"])
    if "async def generate(self, input_batch)" in block.text:
        await known["PenstockGenerator"]().generate(None)


def check_imports(block: Block) -> None:
    """What a program imports from Penstock is there."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            module = importlib.import_module(node.module or "")
            for name in (item.name for item in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), f"{block}: {name}"


@pytest.mark.parametrize("block", [item for item in ALL if item.kind.startswith(("yaml", "json", "toml"))], ids=str)
def test_a_file_that_a_page_shows_is_read_by_its_own_parser(block: Block, stand: Stand) -> None:
    """A key that was renamed is renamed on the pages, too."""
    stage = stand.folder / "files"
    stage.mkdir(exist_ok=True)
    for name in ("check.py", "check.sh", "mine.sh"):
        (stage / name).write_text("#!/bin/sh\n", encoding="utf-8")
    (stage / "repository").mkdir(exist_ok=True)
    (stage / "repair-slug/repository").mkdir(parents=True, exist_ok=True)
    (stage / "requirements.txt").write_text(files()["requirements.txt"], encoding="utf-8")
    (stage / "package-lock.json").write_text(NPM_LOCK, encoding="utf-8")
    (stage / "debian.txt").write_text(debian.line("hello", b""), encoding="utf-8")
    file = stage / "file.yaml"
    file.write_text(block.text, encoding="utf-8")
    match block.kind:
        case "yaml task":
            assert Task.load(file).instruction
        case "yaml verifier":
            assert load_verifiers(file)
        case "yaml agent":
            assert load_spec(file).argv
        case "yaml rules":
            assert load_rules(file)
        case "yaml prices":
            assert Prices.load(file).currency
        case "yaml script":
            assert Script.parse(block.text).turns
        case "yaml compose":
            services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
            assert set(yaml.safe_load(block.text)["services"]) <= set(services)
        case "yaml values":
            assert render(yaml.safe_load(block.text)).manifests
        case "yaml kubernetes":
            for manifest in yaml.safe_load_all(block.text):
                kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)


def test_everything_that_is_left_out_is_on_a_page() -> None:
    """The list names nothing that is gone; it is the one place that says what is not run."""
    calls = [words for command in SHELL for words in command.calls()]
    lines = [" ".join(["penstock", *words[1:]]) for words in calls if words[0].endswith("penstock")]
    assert set(left_out.PROGRAMS) <= {words[0] for words in calls}
    assert not [start for start in left_out.COMMANDS if not any(line.startswith(start) for line in lines)]
    assert not [text for text in left_out.BLOCKS if not any(text in block.text for block in PROGRAMS)]
