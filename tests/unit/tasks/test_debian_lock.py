"""Locks of Debian packages, by the real apt with a repository in a directory."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from tests.support.endpoints.debian import package
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.client.errors import ConfigurationError, FailedPrecondition, InvalidArgument
from penstock.tasks.debian import lock
from penstock.values.locks import debian_lock

DEPENDS = {"hello": "greeting (>= 1), base", "greeting": "base", "base": ""}


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The status of a base that has the package `base`; apt knows the repository alone."""
    pool = tmp_path / "repository"
    pool.mkdir()
    stanzas = []
    for name, depends in DEPENDS.items():
        content = package(pool, name, {f"usr/share/{name}": name})
        fields = {"Package": name, "Version": "1.0", "Architecture": "all", "Maintainer": "T <t@example.com>"}
        fields |= {"Depends": depends} if depends else {}
        fields |= {
            "Filename": f"./{name}.deb",
            "Size": str(len(content)),
            "SHA256": hashlib.sha256(content).hexdigest(),
        }
        (pool / f"{name}.deb").rename(pool / f"{name}_1.0_all.deb")
        fields["Filename"] = f"./{name}_1.0_all.deb"
        stanzas.append("".join(f"{field}: {value}\n" for field, value in fields.items()) + "Description: of a test\n")
    (pool / "Packages").write_text("\n".join(stanzas))
    root = tmp_path / "apt"
    for folder in (
        "etc/apt/preferences.d",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/partial",
        "var/lib/dpkg",
    ):
        (root / folder).mkdir(parents=True)
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{pool} ./\n")
    installed = root / "var/lib/dpkg/status"
    installed.write_text(
        "Package: base\nStatus: install ok installed\nVersion: 1.0\nArchitecture: all\n"
        "Maintainer: T <t@example.com>\nDescription: of a test\n"
    )
    settings = tmp_path / "apt.conf"
    settings.write_text(
        f'Dir "{root}";\nDir::State::status "{installed}";\nAPT::Sandbox::User "root";\n'
        'Dir::Etc::parts "none";\nDir::Etc::sourceparts "none";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(settings))
    subprocess.run(["apt-get", "update", "-qq"], check=True, capture_output=True)
    return installed


@pytest.mark.requirement("R151")
async def test_a_lock_has_what_the_base_lacks_and_nothing_is_installed(status: Path) -> None:
    before = status.read_text()
    assert [package.name for package in await lock(["hello"])] == ["greeting", "hello"]
    assert [package.name for package in await lock(["hello", "base=1.0"])] == ["base", "greeting", "hello"]
    other = status.with_name("other")
    other.write_text("")
    assert [package.name for package in await lock(["greeting"], other)] == ["base", "greeting"]
    assert status.read_text() == before


@pytest.mark.requirement("R151")
async def test_what_apt_cannot_install_is_refused(status: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("absent", "hello=2.0"):
        with pytest.raises(FailedPrecondition, match=name.partition("=")[0]) as refused:
            await lock([name])
        assert refused.value.reason == "LOCK_FAILED"
    for names in ([], ["--reinstall"], ["hello", "a b"], ["hello/testing"]):
        with pytest.raises(InvalidArgument, match="names of Debian packages"):
            await lock(names)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigurationError) as missing:
        await lock(["hello"])
    assert missing.value.reason == "APT_MISSING"


@pytest.mark.requirement("R151")
@pytest.mark.usefixtures("status")
def test_the_command_writes_what_a_task_takes(tmp_path: Path) -> None:
    to = tmp_path / "debian.txt"
    done = CliRunner().invoke(app, ["tasks", "lock", "hello", "--to", str(to), "--json"])
    assert done.exit_code == 0, done.output
    (first, second) = debian_lock(to.read_text())
    assert [json.loads(text)["path"] for text in done.stdout.splitlines()] == [first.path, second.path]
    assert first.path == "greeting_1.0_all.deb"
