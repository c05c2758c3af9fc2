"""`make gpu`, or `python -m tests.gpu`: runs the checks one after another, and writes a table of them.

Exits with 1 if one failed, and with 2 if this machine lacks what they need, which one sentence names. A check that
needs more GPUs than there are, or that is not reached in time, is in the table as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu.checks import CHECKS, MOST_S, Check
from tests.gpu.machine import Machine, no_gpu, probe

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check's line: `result` is passed, failed or not run."""

    check: str
    shows: str
    gpus: int
    result: str
    seconds: float
    detail: str


def main() -> int:
    """Runs what can be run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(c.name for c in CHECKS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-checks"), help="for the table and the logs")
    parser.add_argument("--missing", action="store_true", help="only say what this machine lacks")
    given = parser.parse_args()
    if unknown := set(given.names) - {check.name for check in CHECKS}:
        parser.error(f"NAME: unknown: {', '.join(sorted(unknown))}")
    if sentence := no_gpu():
        print(sentence, file=sys.stderr)
        return 2
    if given.missing:
        return 0
    machine = probe(sys.executable)
    if isinstance(machine, str):
        print(machine, file=sys.stderr)
        return 2
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + MOST_S
    outcomes = []
    for check in CHECKS:
        if not given.names or check.name in given.names:
            outcomes.append(outcome := run(check, machine, out, end - time.monotonic()))
            print(f"{outcome.check}: {outcome.result} {outcome.detail}", flush=True)
            write(out, machine, outcomes)
    print((out / "checks.md").read_text("utf-8"))
    return int(any(outcome.result == "failed" for outcome in outcomes))


def run(check: Check, machine: Machine, out: Path, left_s: float) -> Outcome:
    """Runs a check in a process group of its own, which is ended when its time, or that of all, is over."""

    def outcome(result: str, detail: str, seconds: float = 0.0) -> Outcome:
        return Outcome(check.name, check.shows, check.gpus, result, round(seconds, 1), detail)

    if check.gpus > len(machine.gpus):
        return outcome("not run", f"needs {check.gpus} GPUs; there is {len(machine.gpus)}")
    if left_s <= 0:
        return outcome("not run", f"the {MOST_S // 60} minutes were over")
    report = out / f"{check.name}.xml"
    report.unlink(missing_ok=True)
    results = out / f"{check.name}-run"
    shutil.rmtree(results, ignore_errors=True)  # it would go on with a run that has ended
    last = f"--junitxml={report}" if "pytest" in check.arguments else str(results)
    began, limit_s = time.monotonic(), min(check.limit_s, left_s)
    with (out / f"{check.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *check.arguments, last], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return outcome("failed", f"ended after {limit_s:.0f} s: {check.name}.log", time.monotonic() - began)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    if not report.exists():
        return outcome(
            "failed" if code else "passed", "" if code == 0 else f"exit code {code}: {check.name}.log", seconds
        )
    return outcome(*judged(code, report.read_text("utf-8"), f"{check.name}.log"), seconds)


def judged(code: int, report: str, log: str) -> tuple[str, str]:
    """The result of a pytest run by its exit code and its JUnit report; a run that skipped everything is not run."""
    cases = [*ElementTree.fromstring(report).iter("testcase")]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = [skipped.get("message", "") for case in cases if (skipped := case.find("skipped")) is not None]
    passed = len(cases) - len(bad) - len(skips)
    detail = f"{passed} passed" + (f", {len(skips)} skipped ({skips[0]})" if skips else "")
    if bad or code not in (0, 5):
        return "failed", f"{detail}, {len(bad)} failed: {log}"
    return ("passed", detail) if passed else ("not run", detail)


def write(out: Path, machine: Machine, outcomes: list[Outcome]) -> None:
    """Writes `checks.md` and `checks.json`."""
    lines = ["| check | shows | GPUs | result | seconds | detail |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one.check} | {one.shows} | {one.gpus} | {one.result} | {one.seconds:.0f} | {one.detail} |"
        for one in outcomes
    ]
    about = f"vLLM {machine.vllm}, torch {machine.torch}, {len(machine.gpus)} GPUs: {', '.join(machine.gpus)}."
    (out / "checks.md").write_text("\n".join([*lines, "", about, ""]), "utf-8")
    content = {"machine": asdict(machine), "checks": [asdict(one) for one in outcomes]}
    (out / "checks.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
