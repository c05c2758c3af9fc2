"""Every service's start where its disk takes nothing: the kernel refuses each byte that it writes to a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from penstock_inference.testing import random_config, random_tensors, write_model

NOTHING_MAY_BE_WRITTEN: Final = (
    sys.executable,
    "-c",
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])",
)
"""As a full disk: files can be made, and stay empty. Not between fork and exec: gRPC's poller, if this process has one,
can abort the child there (grpc/grpc#43055)."""

pytestmark = pytest.mark.usefixtures("genuine_starts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some weights."""
    config = random_config("llama", num_hidden_layers=1)
    return write_model(tmp_path_factory.mktemp("model"), config, random_tensors(config))


def command(name: str, state: Path, model: Path) -> tuple[list[str], dict[str, str]]:
    """What starts a service, and its environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    prefix = f"PENSTOCK_{name.upper()}_"
    given = {"STATE_DIR": str(state), "PORT": "0", "ANONYMOUS": "true", "LOG_LEVEL": "error"}
    given |= {"interception": {"INGRESS_PORT": "0"}, "inference": {"MODEL_DIR": str(model)}}.get(name, {})
    return [sys.executable, "-m", f"penstock_{name}"], kept | {prefix + key: value for key, value in given.items()}


@pytest.mark.requirement("R50", "R146")
@pytest.mark.parametrize("name", ["interception", "driver", "sandbox"])
def test_full_disk_at_start_is_one_line_and_harmless_later(name: str, tmp_path: Path, model: Path) -> None:
    """The line names the file and says what to do; once there is room the same directory serves."""
    argv, environment = command(name, tmp_path / "state", model)
    refused = subprocess.run(
        [*NOTHING_MAY_BE_WRITTEN, *argv], env=environment, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert last.startswith(f"penstock-{name}: {tmp_path}/state/") and "Free space" in last and "state_dir" in last
    if name != "interception":
        return  # they open the same kind of journal; each start takes seconds
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        _, told = process.communicate(timeout=60)
    assert '"ready"' in line, told


@pytest.mark.requirement("R50")
def test_a_state_directory_that_is_none_is_one_line(tmp_path: Path, model: Path) -> None:
    """A file above it, where a service has no journal."""
    (tmp_path / "state").write_text("")
    argv, environment = command("inference", tmp_path / "state" / "below", model)
    refused = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert str(tmp_path / "state") in last and "state_dir" in last
