"""Toolboxes from locks: by the real pip and npm, from an index on loopback, for the sandbox's Python and Node.js."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.endpoints.package_index import (
    PASSWORD,
    Index,
    index,
    integrity,
    line,
    npm_lock,
    npm_package,
    source_distribution,
    wheel,
)

from penstock_chassis.errors import InvalidArgument, Unavailable
from penstock_sandbox.domain.model import PythonTarget, Toolbox, ToolboxFile, ToolboxSpec
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes

TARGET = PythonTarget(f"3.{sys.version_info.minor}", "manylinux_2_36_x86_64")
TOOL = wheel("tool", {"tool.py": "def main():\n    print('ran tool')\n"}, {"run-tool": "tool:main"})
OLD_TOOL = wheel("old", {"old.py": "def main():\n    print('ran old')\n"}, {"run-old": "old:main"})
INSTALLER = 61235
"""The user of the installer, where the tests run as root."""
SCRIPTED = {"name": "scripted", "version": "1.0.0", "bin": {"scripted": "cli.js"}, "main": "cli.js"}
SCRIPTED["scripts"] = {"preinstall": "touch {mark}", "install": "touch {mark}", "postinstall": "touch {mark}"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """An index with a password, which is in the settings of the service's user."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().startswith("npm_config_")]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with index(password=True) as here:
        settings = tmp_path / "npmrc"
        host = here.url.removeprefix("http:")
        secret = base64.b64encode(f"reader:{PASSWORD}".encode()).decode()
        settings.write_text(f"registry={here.url}/npm/\n{host}/npm/:_auth={secret}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{here.with_password}/simple/")
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".npmrc").write_text(settings.read_text())
        yield here


@pytest.fixture
def mark(reachable: Path) -> Path:
    """A file that a package could make when it is installed, and nobody has made."""
    folder = reachable / "marks"
    folder.mkdir()
    folder.chmod(0o777)
    return folder / "ran"


@pytest.fixture
def toolboxes(tmp_path: Path) -> Toolboxes:
    made = Toolboxes(tmp_path / "toolboxes", Installer(INSTALLER if os.geteuid() == 0 else None, _no_pause))
    made.open()
    return made


def _no_pause(seconds: float) -> asyncio.Future[None]:
    raise AssertionError(f"tried again after {seconds} s")


def python(*lines: str) -> ToolboxSpec:
    return ToolboxSpec("task", python_packages=tuple(text.strip() for text in lines), python_target=TARGET)


async def prepared(toolboxes: Toolboxes, spec: ToolboxSpec) -> tuple[Toolbox, list[str]]:
    events = [event async for event in toolboxes.prepare(spec)]
    return events[-1], [event for event in events if isinstance(event, str)]  # type: ignore[return-value]


@pytest.mark.requirement("R151")
async def test_packages_are_found_by_the_python_of_the_sandbox(served: Index, toolboxes: Toolboxes) -> None:
    """As a program, as a module, and by an import; no Python is mounted with them."""
    served.add_python("tool-1.0-py3-none-any.whl", TOOL)
    box, _ = await prepared(toolboxes, python(line("tool", TOOL)))
    mounted = toolboxes.mounted(box.id)
    assert mounted.python_path == ("/opt/penstock/toolboxes/task/python",)
    assert "/opt/penstock/toolboxes/task/python/bin" in mounted.path and not mounted.runtimes
    folder = mounted.source / "python"
    environment = {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    for argv, extra in (
        (["run-tool"], {}),
        (["python3", "-c", "import tool; tool.main()"], {"PYTHONPATH": str(folder)}),
    ):
        done = subprocess.run(argv, capture_output=True, text=True, env={**environment, **extra}, check=True)
        assert done.stdout == "ran tool\n"


@pytest.mark.requirement("R151")
async def test_an_index_is_asked_once_and_its_password_is_nowhere(served: Index, toolboxes: Toolboxes) -> None:
    """By callers at once and later ones, also after a restart without the index."""
    served.add_python("tool-1.0-py3-none-any.whl", TOOL)
    spec = python(line("tool", TOOL))
    found = await asyncio.gather(*(prepared(toolboxes, spec) for _ in range(8)))
    assert len({box.id for box, _ in found}) == 1
    assert served.fetched["/files/tool-1.0-py3-none-any.whl"] == 1
    served.files.clear()
    again = Toolboxes(toolboxes.mounted(found[0][0].id).source.parents[1], Installer(None, _no_pause))
    again.open()
    box, lines = await prepared(again, spec)
    assert not lines and again.mounted(box.id).python_path
    printed = "\n".join(text for _, texts in found for text in texts)
    kept = b"".join(path.read_bytes() for path in again.mounted(box.id).source.rglob("*") if path.is_file())
    assert PASSWORD not in printed and PASSWORD.encode() not in kept


@pytest.mark.requirement("R151")
async def test_setup_py_of_a_source_distribution_is_not_run(served: Index, toolboxes: Toolboxes, mark: Path) -> None:
    """The package is not there for pip, which takes wheels only."""
    content = source_distribution("sdist", f"open({str(mark)!r}, 'w')\n")
    served.add_python("sdist-1.0.tar.gz", content)
    with pytest.raises(Unavailable) as caught:
        await prepared(toolboxes, python(line("sdist", content)))
    assert caught.value.metadata["permanent"] == "true"
    assert not mark.exists()


@pytest.mark.requirement("R151")
async def test_a_file_that_the_index_exchanged_is_refused(served: Index, toolboxes: Toolboxes) -> None:
    served.add_python("tool-1.0-py3-none-any.whl", OLD_TOOL)
    with pytest.raises(Unavailable) as caught:
        await prepared(toolboxes, python(line("tool", TOOL)))
    assert caught.value.metadata["pip_code"] == "HASH_MISMATCH"
    assert toolboxes.all() == []


def npm_tool(served: Index, mark: Path) -> tuple[bytes, ToolboxSpec]:
    """A package with install scripts, in the registry, and the toolbox of its lock."""
    scripts = dict.fromkeys(("preinstall", "install", "postinstall"), f"touch {mark}")
    manifest = {**SCRIPTED, "scripts": scripts}
    content = npm_package(manifest, {"cli.js": "#!/usr/bin/env node\nconsole.log('ran scripted')\n"})
    served.add_npm("scripted", "1.0.0", content, manifest)
    entry = {
        "version": "1.0.0",
        "resolved": "https://registry.elsewhere.example/scripted-1.0.0.tgz",
        "integrity": integrity(content),
        "hasInstallScript": True,
        "bin": {"scripted": "cli.js"},
    }
    return content, ToolboxSpec("task", npm_lock=npm_lock({"scripted": entry}))


@pytest.mark.requirement("R151")
async def test_an_npm_lock_is_installed_from_the_services_registry_without_scripts(
    served: Index, toolboxes: Toolboxes, mark: Path
) -> None:
    """Its address is not asked, its install scripts are named and not run, its program is there."""
    _, spec = npm_tool(served, mark)
    box, lines = await prepared(toolboxes, spec)
    mounted = toolboxes.mounted(box.id)
    assert mounted.node_path == ("/opt/penstock/toolboxes/task/node_modules",)
    assert served.fetched["/npm/scripted/-/scripted-1.0.0.tgz"] == 1
    assert not mark.exists()
    assert any("not run: the install scripts of node_modules/scripted" in text for text in lines)
    program = mounted.source / "node_modules" / ".bin" / "scripted"
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run([node, program], capture_output=True, text=True, check=True)
    assert done.stdout == "ran scripted\n"


def git_repository(folder: Path, manifest: Mapping[str, object], files: Mapping[str, str]) -> str:
    """A repository that the installer's user can clone, as npm names it in dependencies."""
    folder.mkdir()
    for name, text in {"package.json": json.dumps(manifest), **files}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    git = ("git", "-c", "user.name=author", "-c", "user.email=author@example.com")
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message=x")):
        subprocess.run((*git, *command), cwd=folder, check=True)
    if os.geteuid() == 0:
        # git takes a repository from its owner alone.
        for path in (folder, *folder.rglob("*")):
            os.chown(path, INSTALLER, INSTALLER)
    return f"git+file://{folder}"


# Stands in for an npm that does not know the options: the real one without them.
OLD_NPM = """#!/bin/sh
for word; do shift; case "$word" in --allow-*) ;; *) set -- "$@" "$word" ;; esac; done
exec {npm} "$@"
"""


@pytest.mark.requirement("R56", "R151")
@pytest.mark.parametrize("kind", ["dependencies", "optionalDependencies"])
@pytest.mark.parametrize("npm", ["new", "old"])
async def test_a_git_dependency_of_an_npm_package_is_not_cloned_and_nothing_of_it_runs(
    served: Index,
    toolboxes: Toolboxes,
    mark: Path,
    reachable: Path,
    monkeypatch: pytest.MonkeyPatch,
    npm: str,
    kind: str,
) -> None:
    """npm would prepare it by another npm, which takes the program that is git from the clone's own settings."""
    if npm == "old":
        (reachable / "npm").write_text(OLD_NPM.format(npm=shutil.which("npm")))
        (reachable / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{reachable}:{os.environ['PATH']}")
    inner = git_repository(reachable / "inner", {"name": "inner", "version": "1.0.0"}, {})
    program = f"#!/bin/sh\ntouch {mark}\n"
    manifest = {"name": "x", "version": "1.0.0", "scripts": {"prepare": "true"}, "dependencies": {"inner": inner}}
    x = git_repository(reachable / "x", manifest, {".npmrc": "git=./program.sh\n", "program.sh": program})
    evil = {"name": "evil", "version": "1.0.0", kind: {"x": x}}
    served.add_npm("evil", "1.0.0", npm_package(evil, {}), evil)
    spec = ToolboxSpec("task", npm_packages=("evil@1.0.0",))
    if kind == "dependencies":
        with pytest.raises(Unavailable) as caught:
            await prepared(toolboxes, spec)
        assert (caught.value.metadata["npm_code"], caught.value.metadata["permanent"]) == ("EALLOWGIT", "true")
        named = f'Refusing to fetch "x@{x}"' if npm == "new" else "a dependency from git"
        assert named in caught.value.message and "registry alone" in caught.value.message
    else:
        box, _ = await prepared(toolboxes, spec)
        modules = toolboxes.mounted(box.id).source / "node_modules"
        assert (modules / "evil").is_dir() and not (modules / "x").exists()
    assert not mark.exists()


@pytest.mark.requirement("R151")
async def test_an_npm_archive_with_another_integrity_is_refused(
    served: Index, toolboxes: Toolboxes, mark: Path
) -> None:
    _, spec = npm_tool(served, mark)
    served.files["/npm/scripted/-/scripted-1.0.0.tgz"] = npm_package(SCRIPTED, {"cli.js": "other"})
    with pytest.raises(Unavailable) as caught:
        await prepared(toolboxes, spec)
    assert caught.value.metadata["npm_code"] == "EINTEGRITY"


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (ToolboxSpec("task", npm_lock="{}"), "spec.npm_lock"),
        (ToolboxSpec("task", npm_lock=npm_lock({"../x": {"version": "1.0.0"}})), "spec.npm_lock"),
        (ToolboxSpec("task", python_target=PythonTarget("3", "manylinux_2_36_x86_64")), "spec.python_target.version"),
        (ToolboxSpec("task", python_target=PythonTarget("3.12", "--index-url=x")), "spec.python_target.platform"),
        (ToolboxSpec("task", python_packages=("a==1",), python_target=TARGET), "spec.python_packages[0]"),
    ],
)
async def test_what_is_no_lock_is_refused_before_an_installation(
    toolboxes: Toolboxes, spec: ToolboxSpec, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await prepared(toolboxes, spec)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.requirement("R151")
async def test_unused_toolboxes_above_the_bound_are_removed_oldest_first(tmp_path: Path) -> None:
    """What a sandbox holds stays, and so does what was prepared last."""
    made = Toolboxes(tmp_path / "toolboxes", Installer(None, _no_pause), max_bytes=40_000)
    made.open()
    specs = [ToolboxSpec(f"box{number}", files=(ToolboxFile("bin/x", bytes(2000)),)) for number in range(30)]
    first, _ = await prepared(made, specs[0])
    second, _ = await prepared(made, specs[1])
    made.hold([first.id])
    for spec in specs[2:]:
        await prepared(made, spec)
    left = {box.name for box in made.all()}
    assert "box0" in left and "box1" not in left
    assert len(left) == 20
    assert not (tmp_path / "toolboxes" / second.id).exists()
    made.release([first.id])
    again, lines = await prepared(made, specs[1])
    assert again.id == second.id and "box1" in {box.name for box in made.all()} and lines == []
