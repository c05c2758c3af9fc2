"""What the pages tell a reader to type exists: make targets, commands, flags, variables, the README's program."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from docs import check
from tests.unit.docs.pages import ROOT

from penstock.cli.main import app
from penstock_chassis.settings import ServiceSettings
from penstock_driver.settings import DriverSettings
from penstock_inference.settings import InferenceSettings
from penstock_interception.settings import InterceptionSettings
from penstock_sandbox.settings import SandboxSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "driver": DriverSettings,
    "inference": InferenceSettings,
    "interception": InterceptionSettings,
    "sandbox": SandboxSettings,
}
PAGES = check.pages()

_CODE = re.compile(r"^```.*?\n(.*?)^```|^(?: {4}.*\n?)+|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"(?:^|\s)make ([a-z][a-z-]*)")
_SERVICE = re.compile(r"penstock-(driver|inference|interception|sandbox)\b(?![-.])([^\n#]*)")
_PROGRAM = re.compile(r"(?:^|[\s/])penstock ([a-z]+)(?: ([a-z]+))?([^\n#]*)")
_OTHERS = re.compile(r"^(`?(?:kubectl|helm)) [^`\n]*", re.MULTILINE)
_FLAG = re.compile(r"(?<!\S)--([a-z][a-z-]*)")
_VARIABLE = re.compile(r"\bPENSTOCK_(DRIVER|INFERENCE|INTERCEPTION|SANDBOX)_[A-Z_]+[A-Z]\b")


def code_of(page: Path) -> Iterator[str]:
    """Fenced and indented blocks and inline code, with line ends joined by a backslash.

    Without the arguments of kubectl and Helm, where a service's name is that of what a cluster has.
    """
    for match in _CODE.finditer(page.read_text(encoding="utf-8")):
        yield _OTHERS.sub(r"\1", (match[1] or match[2] or match[0]).replace("\\\n", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_commands_exist(page: Path) -> None:
    """A command that was renamed is renamed in the pages, too."""
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    program = typer.main.get_command(app)
    for code in code_of(page):
        assert set(_MAKE.findall(code)) <= targets, code
        for service, rest in _SERVICE.findall(code):
            fields = {name.replace("_", "-") for name in SETTINGS[service].model_fields} | {"help"}
            assert set(_FLAG.findall(rest)) <= fields, code
        for variable in _VARIABLE.finditer(code):
            settings = SETTINGS[variable[1].lower()]
            # _ADDRESS is the client's: where it finds the service.
            names = {settings.env_name(name) for name in (*settings.model_fields, "address")}
            assert variable[0] in names, code
        for name, second, rest in _PROGRAM.findall(code):
            command = program.commands[name]  # type: ignore[attr-defined]
            if second and hasattr(command, "commands"):
                command = command.commands[second]
            flags = {option.removeprefix("--") for item in command.params for option in item.opts + item.secondary_opts}
            if name not in ("serve", "demo"):  # which pass theirs on
                assert set(_FLAG.findall(rest.partition(" | ")[0])) <= flags | {"help"}, code


def test_the_client_s_readme_names_every_command() -> None:
    """A command that is added is told."""
    text = "\n".join(code_of(ROOT / "clients/python/sdk/README.md"))
    assert {name for name, _, _ in _PROGRAM.findall(text)} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.requirement("R38")
@pytest.mark.parametrize("name", SETTINGS)
def test_service_readme_mentions_help_and_the_help_lists_every_setting(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every timeout's default is documented; none is hidden."""
    assert f"penstock-{name} --help" in (ROOT / f"services/{name}/README.md").read_text(encoding="utf-8")
    settings = SETTINGS[name]
    with pytest.raises(SystemExit):
        settings.load(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field, info in settings.model_fields.items():
        assert settings.env_name(field) in text
        assert info.description, field
        if field.endswith("_s"):
            assert f"{settings.env_name(field)}; default {info.default}" in text


def test_every_service_has_a_readme_that_fits_on_a_screen() -> None:
    """A reader of a directory learns at once what it is; the reference is elsewhere."""
    for folder in [*ROOT.glob("services/*"), *ROOT.glob("libs/*"), *ROOT.glob("clients/python/*")]:
        if (folder / "pyproject.toml").exists():
            assert len((folder / "README.md").read_text(encoding="utf-8").splitlines()) <= 60, folder


def test_the_readme_s_program_type_checks_against_the_client(tmp_path: Path) -> None:
    """The first thing that a newcomer copies uses the client as it is. Only `engine` is his."""
    block = re.search(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert block
    imports = [line for line in block[1].splitlines() if line.startswith(("from ", "import "))]
    body = [line for line in block[1].splitlines() if line not in imports]
    ours = [
        "from penstock.client import Sampling",
        "import numpy as np",
        "import numpy.typing as npt",
        "class Engine:",
        "    async def sample(self, ids: npt.NDArray[np.int32], how: Sampling) -> tuple[list[int], list[float], str]:",
        "        raise NotImplementedError",
        "async def main(engine: Engine) -> None:",
    ]
    text = "\n".join([*imports, *ours, *(f"    {line}" for line in body), ""])
    ast.parse(text)
    program = tmp_path / "program.py"
    program.write_text(text, encoding="utf-8")
    # The repository's own settings and cache: after `make lint` only the program itself is left to check.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
