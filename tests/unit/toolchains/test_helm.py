"""The Helm and kubectl of the tests are those that were pinned, whatever an index offers under their names."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import helm


def test_helm_is_named_by_version_and_content_and_by_no_place() -> None:
    """Two packages, each with one content."""
    text = helm.TOOLCHAIN.read_text(encoding="utf-8")
    lines = text.replace("\\\n", " ").splitlines()
    pinned = [line for line in lines if re.match(r"\S+==[\d.]+ +--hash=sha256:[0-9a-f]{64}$", line)]
    assert len(pinned) == 2
    assert "://" not in text and "index" not in text


def test_both_living_versions_and_a_kubectl_run() -> None:
    """As they say themselves."""
    said = {name: subprocess.run([helm.program(name), *words], capture_output=True, text=True, check=True).stdout
            for name, words in {"helm": ["version"], "helm3": ["version"],
                                "kubectl": ["version", "--client"]}.items()}  # fmt: skip
    assert 'Version:"v4.' in said["helm"] and 'Version:"v3.' in said["helm3"] and "v1.34" in said["kubectl"]


def test_a_package_with_other_content_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is unpacked."""
    for name, version in re.findall(r"^(\S+)==([\d.]+)", helm.TOOLCHAIN.read_text(encoding="utf-8"), re.MULTILINE):
        name = re.sub(r"[-.]", "_", name)
        facts = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{facts}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(helm, "HOME", tmp_path / "home")
    with pytest.raises(SystemExit, match="is not what it was"):
        helm.install()
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "home" / "helm").exists()
