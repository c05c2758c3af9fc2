"""Python packages of a toolbox: by the real pip, from wheels that are made here, without a network."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_sandbox.domain.model import Runtime, RuntimeKind, Toolbox, ToolboxSpec
from penstock_sandbox.toolboxes import pip_settings, runtimes
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes, toolbox_hash

PYTHON = Runtime(RuntimeKind.PYTHON, "3.11")
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: never-installed>=1\n"
PROGRAM = "import sys, os\ndef main():\n    print('ran', sys.argv, os.environ.get('PYTHONPATH'), __name__)\n"


def wheel(folder: Path, name: str) -> str:
    """Make a wheel of a package with one program; answers its line of a requirements file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", PROGRAM)
        archive.writestr(f"{info}/METADATA", METADATA.format(name=name))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{info}/entry_points.txt", f"[console_scripts]\nrun-{name} = {name}:main\nbad;name = {name}:main\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    path.chmod(0o644)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def wheels(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index that is a folder."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(reachable))
    monkeypatch.setenv("PIP_TARGET", "/nowhere")
    return reachable


@pytest.fixture
def toolboxes(tmp_path: Path) -> Toolboxes:
    made = Toolboxes(tmp_path / "toolboxes", Installer(61235 if os.geteuid() == 0 else None, _no_pause))
    made.open()
    return made


def _no_pause(seconds: float) -> asyncio.Future[None]:
    raise AssertionError(f"tried again after {seconds} s")


async def install(toolboxes: Toolboxes, *packages: str) -> Path:
    spec = ToolboxSpec("agent", runtimes=(PYTHON,), python_packages=packages)
    boxes = [event async for event in toolboxes.prepare(spec) if isinstance(event, Toolbox)]
    return toolboxes.mounted(boxes[0].id).source


@pytest.mark.requirement("R10", "R63")
async def test_wheels_program_starts_with_its_own_packages_alone(wheels: Path, toolboxes: Toolboxes) -> None:
    """What is named is there, what depends on it unnamed is not, and what it starts inherits nothing."""
    content = await install(toolboxes, wheel(wheels, "tool"))
    assert sorted(path.name for path in (content / "python" / "bin").iterdir()) == ["python", "run-tool"]
    environment = {"PATH": f"{Path(os.__file__).parents[2] / 'bin'}:/usr/bin:/bin", "PYTHONPATH": "/elsewhere"}
    program = content / "python" / "bin" / "run-tool"
    done = subprocess.run([program, "a b", "$(c)"], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "ran ['run-tool', 'a b', '$(c)'] /elsewhere tool\n"
    script = content.parent / "script.py"
    script.write_text("import sys, tool\nprint(sys.argv[1:], tool.__name__, __name__)\n")
    interpreter = content / "python" / "bin" / "python"
    done = subprocess.run([interpreter, script, "-x"], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "['-x'] tool __main__\n"
    assert program.stat().st_mode & 0o777 == 0o755
    assert program.stat().st_uid == os.geteuid()


@pytest.mark.requirement("R56")
async def test_a_file_with_another_hash_is_refused_at_once(wheels: Path, toolboxes: Toolboxes) -> None:
    """The pin is the content, and trying again changes nothing."""
    named = wheel(wheels, "tool").partition("sha256:")[0] + "sha256:" + "0" * 64
    with pytest.raises(Unavailable) as caught:
        await install(toolboxes, named)
    assert caught.value.reason == "INSTALL_FAILED"
    assert caught.value.metadata["permanent"] == "true"
    assert caught.value.metadata["pip_code"] in ("HASH_MISMATCH", "NOT_FOUND")


@pytest.mark.requirement("R56")
async def test_a_package_that_is_not_there_is_not_tried_again(wheels: Path, toolboxes: Toolboxes) -> None:
    """The message says what to look at."""
    with pytest.raises(Unavailable) as caught:
        await install(toolboxes, f"absent==1.0 --hash=sha256:{'0' * 64}")
    assert caught.value.metadata["pip_code"] == "NOT_FOUND"
    assert "absent==1.0" in caught.value.message


@pytest.mark.requirement("R48")
async def test_only_a_python_of_the_range_will_do(toolboxes: Toolboxes) -> None:
    """What is missing is named with what to do."""
    old = Runtime(RuntimeKind.PYTHON, "3.11", "3.11.0")
    spec = ToolboxSpec("old", runtimes=(old,), python_packages=(f"tool==1.0 --hash=sha256:{'0' * 64}",))
    with pytest.raises(FailedPrecondition) as caught:
        await anext(toolboxes.prepare(spec))
    assert caught.value.reason == "RUNTIME_MISSING"
    assert "older than 3.11.0" in caught.value.message


@pytest.mark.requirement("R42", "R63")
@pytest.mark.parametrize(
    "package", ["tool", "tool==1.0", "tool>=1.0 --hash=sha256:" + "0" * 64, "-e . --hash=sha256:" + "0" * 64]
)
async def test_a_package_without_version_and_hash_is_refused(toolboxes: Toolboxes, package: str) -> None:
    """The pin is part of the content, and no option of pip's gets through."""
    with pytest.raises(InvalidArgument) as caught:
        await install(toolboxes, package)
    assert caught.value.violations[0].field == "spec.python_packages[0]"


@pytest.mark.requirement("R64")
async def test_packages_need_a_python_among_the_runtimes(toolboxes: Toolboxes) -> None:
    """Nothing is guessed."""
    with pytest.raises(InvalidArgument) as caught:
        await anext(toolboxes.prepare(ToolboxSpec("x", python_packages=(f"tool==1.0 --hash=sha256:{'0' * 64}",))))
    assert caught.value.violations[0].field == "spec.runtimes"


@pytest.mark.requirement("R52")
def test_a_toolbox_for_another_python_is_another_toolbox() -> None:
    """Packages fit one minor version only; without packages nothing depends on it."""
    spec = ToolboxSpec("x", runtimes=(PYTHON,), python_packages=("tool==1.0 --hash=sha256:" + "0" * 64,))
    assert toolbox_hash(spec, "3.11") != toolbox_hash(spec, "3.12")


@pytest.mark.requirement("R45")
def test_a_python_that_can_be_mounted_keeps_out_of_the_path() -> None:
    """The task's programs keep their own Python."""
    found = runtimes.python_for_packages(PYTHON, host_programs=False)
    assert found is not None
    assert found.path == ""
    assert runtimes.python_for_packages(PYTHON, "3.2") is None


@pytest.mark.requirement("R12")
def test_pip_gets_its_own_settings_and_none_of_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes and certificates are passed, where to install and what the service knows are not."""
    settings, certificate = tmp_path / "pip.conf", tmp_path / "ca.pem"
    certificate.write_text("a certificate")
    settings.write_text(f"[global]\nindex-url = https://index.test/simple\ncert = {certificate}\ntarget = /elsewhere\n")
    for name in ("PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_PREFIX", "/elsewhere")
    monkeypatch.setenv("PENSTOCK_SANDBOX_OPERATOR_TOKEN", "sk-service")
    home = tmp_path / "home"
    home.mkdir()
    given = pip_settings.environment(home)
    assert given["PIP_INDEX_URL"] == "https://index.test/simple"
    assert Path(given["PIP_CERT"]).read_text() == "a certificate"
    assert Path(given["PIP_CERT"]).parent == home
    assert "/elsewhere" not in given.values()
    assert "sk-service" not in str(given)
