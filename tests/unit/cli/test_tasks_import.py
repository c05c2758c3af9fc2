"""`penstock tasks import`: a task that cannot be imported is refused alone, and nothing else is held up by it."""

from pathlib import Path

import pytest
from tests.support import foreign_tasks
from typer.testing import CliRunner

from penstock.cli.main import app


@pytest.mark.requirement("R63")
def test_a_task_that_would_be_invalid_is_refused_and_the_images_of_the_others_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, as docs/guides/imports.md promises, and how many there were of each."""
    for name in ("a-good", "b-bad", "c-good"):
        foreign_tasks.harbor(tmp_path / "all" / name)
    config = tmp_path / "all" / "b-bad" / "task.toml"
    config.write_text(config.read_text().replace("timeout_sec = 90.0", "timeout_sec = 900000.0"))
    docker = f'#!/bin/sh\n[ "$1" = build ] || exit 1\necho "$4" >>{tmp_path}/built\n'  # build --tag IMAGE FOLDER
    foreign_tasks.write(tmp_path / "bin", {"docker": docker})
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    done = CliRunner().invoke(
        app, ["tasks", "import", "harbor", str(tmp_path / "all"), str(tmp_path / "out"), "--build"]
    )
    assert done.exit_code == 1, done.output
    assert "b-bad: limits.agent" in done.output and "2 tasks imported, 1 refused" in done.output
    built = [Path(line).parent.name for line in (tmp_path / "built").read_text().splitlines()]
    assert built == ["a-good", "c-good"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a-good", "c-good"]
