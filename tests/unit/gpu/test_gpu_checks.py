"""`make gpu` on machines that lack something, and what it makes of reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu import __main__ as program
from tests.gpu.checks import CHECKS, MOST_S, Check
from tests.gpu.machine import Machine, gpu_count, no_gpu, probe

ROOT = Path(__file__).resolve().parents[3]
ONE = Machine("0.32.0", "2.13.0", ("one",))


def test_the_checks_end_within_forty_minutes_and_their_files_exist() -> None:
    """Each has its own limit, and together they have one."""
    assert sum(check.limit_s for check in CHECKS) <= MOST_S == 40 * 60
    files = [part for check in CHECKS for part in check.arguments if part.startswith("tests/")]
    assert len(files) == len(CHECKS) - 1 and all((ROOT / file).exists() for file in files)


def test_one_sentence_names_what_a_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, a GPU that may be used, or vLLM."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    absent, devices = tmp_path / "absent", tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidiactl").touch()
    assert "driver" in no_gpu(absent, devices) and no_gpu(absent, devices).count(".") == 1
    (devices / "nvidia0").touch()  # gVisor has the device, and not the driver's folder
    assert (no_gpu(absent, devices), gpu_count(absent, devices)) == ("", 1)
    (devices / "nvidia0").unlink()
    driver = tmp_path / "driver"
    for number in ("0000:01", "0000:02"):
        (driver / number).mkdir(parents=True)
    assert (no_gpu(driver, devices), gpu_count(driver, devices)) == ("", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_count(driver, devices) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in no_gpu(driver, devices)
    lacking = probe(sys.executable)
    assert isinstance(lacking, str) and lacking.startswith("make gpu needs vLLM")


def test_the_command_ends_with_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with 2, so that nobody takes it for passed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2 and ran.stdout == "" and ran.stderr.count("\n") == 1 and "NVIDIA GPU" in ran.stderr


@pytest.mark.parametrize(
    ("code", "cases", "result"),
    [
        (0, "<testcase name='a'/><testcase name='b'><skipped message='two GPUs'/></testcase>", "passed"),
        (1, "<testcase name='a'/><testcase name='b'><failure/></testcase>", "failed"),
        (1, "<testcase name='a'><error/></testcase>", "failed"),
        (0, "<testcase name='a'><skipped message='two GPUs'/></testcase>", "not run"),
        (5, "", "not run"),
        (2, "<testcase name='a'/>", "failed"),
    ],
)
def test_only_what_ran_is_passed(code: int, cases: str, result: str) -> None:
    """A report of skips alone is not run."""
    assert program.judged(code, f"<testsuites><testsuite>{cases}</testsuite></testsuites>", "log")[0] == result


def test_checks_that_cannot_run_or_do_not_end_are_in_the_table(tmp_path: Path) -> None:
    """With the reason; a process that does not end is ended with its children."""
    ends = Check("ends", "it ends", 1, 30, ("-c", "pass"))
    hangs = Check("hangs", "it hangs", 1, 1, ("-c", "import signal; signal.pause()"))
    large = Check("large", "it is large", 2, 30, ("-c", "pass"))
    outcomes = [program.run(check, ONE, tmp_path, 100) for check in (ends, hangs, large)]
    outcomes.append(program.run(ends, ONE, tmp_path, 0))
    assert [(one.check, one.result) for one in outcomes] == [
        *(("ends", "passed"), ("hangs", "failed"), ("large", "not run"), ("ends", "not run"))
    ]
    program.write(tmp_path, ONE, outcomes)
    written = (tmp_path / "checks.md").read_text()
    assert "| large | it is large | 2 | not run | 0 | needs 2 GPUs; there is 1 |" in written
    assert "vLLM 0.32.0, torch 2.13.0, 1 GPUs: one." in written
