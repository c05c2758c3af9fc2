"""`python -m tests.hosts run`: rollouts on a fleet of namespaces, some of whose hosts are lost on the way."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.hosts.fleet import Size, fleet
from tests.hosts.losses import Loss
from tests.hosts.network import enter_hub
from tests.hosts.run import run


def main() -> int:
    """Run the command; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--sandboxes", type=int, default=3, help="hosts with a sandbox service: n0, n1, ...")
    parser.add_argument("--gates", type=int, default=2, help="hosts with a gate: g0, g1, ...")
    parser.add_argument("--drivers", type=int, default=2, help="hosts with a driver: d0, d1, ...")
    parser.add_argument("--engines", type=int, default=1, help="hosts with an inference service: e0, e1, ...")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--work", type=float, default=1.0, help="seconds that an agent's command takes")
    parser.add_argument("--max-attempts", type=int, default=3)
    parser.add_argument(
        "--lose",
        action="append",
        type=Loss.parse,
        default=[],
        metavar="NAME@SHARE[:kill|link[=SECONDS]]",
        help="lose a host once this share of the rollouts has ended: cable and processes (kill), or the cable alone "
        "(link); SECONDS later it comes back. Repeat.",
    )
    parser.add_argument("--least", type=float, default=0.95, help="share of the rollouts that must have their reward")
    parser.add_argument("--folder", type=Path, help="keep logs and journals here; default: a temporary directory")
    given = parser.parse_args()
    size = Size(given.sandboxes, given.gates, given.drivers, given.engines)
    enter_hub()
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with fleet(folder, size) as started:
            report = asyncio.run(
                run(
                    started,
                    given.rollouts,
                    at_once=given.at_once,
                    work_s=given.work,
                    max_attempts=given.max_attempts,
                    losses=given.lose,
                )
            )
    print("\n".join(report.lines()))
    faults = report.faults(given.least)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
