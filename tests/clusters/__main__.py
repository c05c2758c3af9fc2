"""Rollouts on services that a real cluster manager launches, on namespaces of this machine.

Judges the truths of `tests.hosts.truths`, and exits with 1 if something is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.clusters import on_ray, on_slurm
from tests.clusters.load import HOME_S, Load
from tests.clusters.machines import enter_world
from tests.support.services.stack import disjoint_uids

_LIMITS_S: Final = {"slurm": (8.0, 30.0), "ray": (45.0, 45.0)}
"""Of `--noticed` and `--waited`."""


def main() -> int:
    """Run the command; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters", description=__doc__)
    parser.add_argument("manager", choices=["slurm", "ray"])
    parser.add_argument("--rollouts", type=int, default=40, help="at least so many end")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--work", type=float, default=2.0, help="seconds that an agent's command takes")
    parser.add_argument("--max-attempts", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.95, help="share of the rollouts that must have their reward")
    parser.add_argument(
        "--noticed",
        type=float,
        help="seconds from a loss to the failure of 99%% of attempts; default: 8 on Slurm, whose machines are cut; 45 "
        "on Ray, where a gate's process ends on a machine that answers, and is awaited for 30 s",
    )
    parser.add_argument("--waited", type=float, help="seconds that a rollout may wait for a lost host; default: 30, 45")
    parser.add_argument(
        "--home",
        type=float,
        default=HOME_S,
        help="the same of its driver's; default: %(default)g, of which 40 see that it is silent, and 60 are patience",
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs (in name only) of the inference service")
    parser.add_argument("--late", action="store_true", help="ray: the autoscaler adds a machine; none is lost")
    parser.add_argument("--cancel", action="store_true", help="slurm: cancel the job in the middle; no node is lost")
    parser.add_argument("--power", action="store_true", help="slurm: all nodes are off before the job; none is lost")
    parser.add_argument("--folder", type=Path, help="keep all files here; default: a temporary directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        uids = disjoint_uids()
        enter_world(folder)
        noticed_s, waited_s = _LIMITS_S[given.manager]
        load = Load(
            given.rollouts,
            given.at_once,
            given.work,
            given.max_attempts,
            given.least,
            noticed_s if given.noticed is None else given.noticed,
            waited_s if given.waited is None else given.waited,
            given.home,
        )
        if given.manager == "slurm":
            work = on_slurm.run(folder, load, gpus=given.gpus, cancel=given.cancel, power=given.power, first_uid=uids)
        else:
            work = on_ray.run(folder, load, gpus=given.gpus, late=given.late, first_uid=uids)
        report = asyncio.run(work)
    print("\n".join(report.faults))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
