"""python -m benchmarks.assay: assays the corpus on a stack of its own, and prints how many defects it finds.

python -m benchmarks.assay [--seed N] [--of-each N] [--clean N] [--concurrency N] [--fail-fast]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from tests.support.services.stack import running

from benchmarks.assay.corpus import Maker, Planted, corpus
from penstock.assay import Assay, Terms, assay
from penstock.client import Penstock

SITE_PACKAGES = Path(str(distribution("pytest").locate_file("")))
PYTEST = f"env PYTHONPATH={SITE_PACKAGES} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest"


def missed(planted: Sequence[Planted], found: Sequence[Assay]) -> list[str]:
    """Which tasks were judged wrongly: defects that were not found or were given another name, and false alarms."""
    lines = []
    for task, result in zip(planted, found, strict=True):
        codes = {str(finding.code) for finding in result.defects}
        if task.defect and not codes & task.codes:
            lines.append(f"missed: {result.task_id} ({task.defect}): {', '.join(sorted(codes)) or 'passed'}")
        if not task.defect and codes:
            why = "; ".join(finding.message for finding in result.defects)
            lines.append(f"false alarm: {result.task_id}: {', '.join(sorted(codes))}: {why}")
    return lines


async def measured(
    ps: Penstock, planted: Sequence[Planted], terms: Terms, concurrency: int
) -> tuple[list[Assay], list[str]]:
    """The results of a corpus, and what is wrong with them."""

    def ended(result: Assay) -> None:
        codes = ", ".join(sorted({str(finding.code) for finding in result.defects})) or "passed"
        print(f"{result.task_id}: {codes}, {len(result.trials)} rollouts in {result.seconds:.1f} s", flush=True)

    found = await assay(ps, [item.task for item in planted], terms, concurrency=concurrency, ended=ended)
    return found, missed(planted, found)


async def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Assay a corpus of planted tasks.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--of-each", type=int, default=8)
    parser.add_argument("--clean", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--fail-fast", action="store_true", help="end a task's assay at its first defect")
    given = parser.parse_args()
    planted = corpus(given.seed, given.of_each, given.clean, PYTEST)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"sandbox": {"extra_read_only": [str(SITE_PACKAGES)]}}
        async with running(Path(folder), settings, agents=False) as stack:
            begin = time.monotonic()
            found, wrong = await measured(stack.ps, planted, Terms(fail_fast=given.fail_fast), given.concurrency)
            seconds = time.monotonic() - begin
    print("\n".join(wrong))
    count = sum(bool(item.defect) for item in planted)
    lost = sum(line.startswith("missed") for line in wrong)
    alarms = len(wrong) - lost
    ran = f"{sum(len(item.trials) for item in found)} rollouts in {seconds:.0f} s"
    share = f"{count - lost} of {count} defects of {len(Maker.DEFECTS)} classes found"
    print(f"seed {given.seed}: {share}; {alarms} false alarms in {given.clean} tasks; {ran}")


if __name__ == "__main__":
    asyncio.run(main())
