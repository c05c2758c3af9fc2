"""A fleet of Penstock on namespaces of this machine.

`run` drives rollouts on it, some of whose hosts are lost on the way, and exits with 1 if something is not as it must
be. `up` starts it and waits for Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.hosts import truths, up
from tests.hosts.fleet import Size, fleet
from tests.hosts.losses import Loss
from tests.hosts.network import enter_hub
from tests.hosts.run import Run


def main() -> int:
    """Run the command; return 0 if nothing was wrong."""
    given = _parser().parse_args()
    size = Size(given.sandboxes, given.gates, given.drivers, given.engines)
    enter_hub()
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if given.command == "up":
            with fleet(folder, size) as started:
                up.wait(started)
            return 0
        with fleet(folder, size) as started:
            run = Run(started, given.rollouts, given.work, given.max_attempts, given.lose)
            run.seen.noticed_s = given.noticed
            seen = asyncio.run(run.go(given.at_once))
    print("\n".join(truths.lines(seen)))
    faults = truths.faults(seen, given.least)
    print("\n".join(faults))
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    size = argparse.ArgumentParser(add_help=False)
    size.add_argument("--sandboxes", type=int, default=3, help="hosts with a sandbox service: n0, n1, ...")
    size.add_argument("--gates", type=int, default=2, help="hosts with a gate: g0, g1, ...")
    size.add_argument("--drivers", type=int, default=2, help="hosts with a driver: d0, d1, ...")
    size.add_argument(
        "--engines",
        type=int,
        default=1,
        help="hosts with an inference service: e0, ...; gate N has engine N modulo M",
    )
    size.add_argument("--folder", type=Path, help="keep logs and journals here; default: a temporary directory")
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", parents=[size], help="start the hosts, and wait for Ctrl-C")
    run = commands.add_parser("run", parents=[size], help="drive rollouts, and lose hosts")
    run.add_argument("--rollouts", type=int, default=40)
    run.add_argument("--at-once", type=int, default=16)
    run.add_argument("--work", type=float, default=1.0, help="seconds that an agent's command takes")
    run.add_argument("--max-attempts", type=int, default=3)
    run.add_argument(
        "--lose",
        action="append",
        type=Loss.parse,
        default=[],
        metavar="NAME@SHARE[:kill|link[=SECONDS]]",
        help="lose a host once this share of the rollouts has ended: cable and processes (kill), or the cable alone "
        "(link); SECONDS later it is back, a driver after 20. Repeat.",
    )
    run.add_argument("--least", type=float, default=0.95, help="share of the rollouts that must have their reward")
    run.add_argument(
        "--noticed", type=float, default=8.0, help="seconds from a loss to the failure of 99%% of attempts"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
