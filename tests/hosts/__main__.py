"""A fleet of Penstock on namespaces of this machine.

`run` drives rollouts on it, some of whose hosts are lost on the way, `grow` lets sandbox services appear meanwhile,
`uneven` has a full and a slow one, and one with many rollouts at once, `drain` drains one, `restart` restarts every
service in turn, `throughput` compares several hosts with one and several gates with each alone, `session` has one
trainer at two gates, `export` stores rollouts at a place that fails, `soak` loses processes and hosts at random among
many groups. They exit with 1 if something is not as it must be. `up` starts it and waits for Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from tests.hosts import dns, draining, growth, rolling, throughput, truths, unevenness, up
from tests.hosts.exporting import run as exporting
from tests.hosts.exporting import store
from tests.hosts.fleet import Size, fleet
from tests.hosts.losses import Loss
from tests.hosts.network import enter_hub
from tests.hosts.run import Run
from tests.hosts.session import run as session
from tests.hosts.soak.plan import TRAINER_HOST, Plan, write_lists
from tests.hosts.soak.plan import settings as soak_settings
from tests.hosts.soak.run import Soak
from tests.support.services import forking


def main() -> int:
    """Run the command; return 0 if nothing was wrong."""
    given = _parser().parse_args()
    size = Size(given.sandboxes, given.gates, given.drivers, given.engines)
    enter_hub()
    with (
        forking.installed() if given.forked else nullcontext(),
        tempfile.TemporaryDirectory(prefix="penstock-hosts-") as temporary,
    ):
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if given.command == "up":
            with fleet(folder, size) as started:
                up.wait(started)
            return 0
        lines, faults = _RUNS[given.command](folder, size, given)
    print("\n".join([*lines, *faults]))
    return 1 if faults else 0


def _run(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    more = {"interception": {"driver_lease_s": given.driver_lease}} if given.driver_lease else {}
    with fleet(folder, size, more) as started:
        run = Run(
            started,
            given.rollouts,
            given.work,
            given.max_attempts,
            given.lose,
            given.parts,
            given.environments,
            given.seed,
        )
        run.seen.noticed_s, run.seen.waited_s, run.seen.home_s = given.noticed, given.waited, given.waited
        seen = asyncio.run(run.go(given.at_once))
    return truths.lines(seen), truths.faults(seen, given.least)


def _grow(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    settings = growth.settings(folder, given.members)
    with (
        dns.served(growth.listing(folder), folder) if given.members == "dns" else nullcontext(),
        fleet(folder, size, settings, growth.LATER, growth.write_list) as started,
    ):
        run = growth.Growth(started, given.rollouts, given.work)
        asyncio.run(run.go(given.at_once))
        return run.lines(), run.faults(given.within)


def _uneven(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    with fleet(_part(folder, "uneven"), Size(3, size.gates, 1, size.engines), unevenness.SETTINGS) as started:
        run = unevenness.Unevenness(started, given.rollouts, given.work)
        asyncio.run(run.go(given.at_once))
    limit = {"driver": {"node_creates_per_s": given.creates}}
    with fleet(_part(folder, "burst"), Size(1, 1, 1, 1), limit) as started:
        burst = unevenness.Burst(started, given.burst, given.creates)
        asyncio.run(burst.go())
    return run.lines() + burst.lines(), run.faults() + burst.faults()


def _drain(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    with fleet(folder, size) as started:
        run = draining.Draining(started, given.rollouts, given.work)
        asyncio.run(run.go(given.at_once))
    return run.lines(), run.faults()


def _restart(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    with fleet(folder, size, rolling.SETTINGS) as started:
        run = rolling.Rolling(started, given.rollouts, given.work)
        asyncio.run(run.go(given.at_once))
    return run.lines(), run.faults()


def _throughput(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    lines, faults = [], []
    if "rollouts" in given.of:
        load = throughput.Load(given.at_once, given.times, given.work)
        readings = []
        for hosts in (1, size.sandboxes):
            with fleet(_part(folder, f"hosts-{hosts}"), Size(hosts, 1, 1, size.engines)) as started:
                readings.append(asyncio.run(throughput.rollouts(started, load)))
        lines += throughput.lines(*readings)
        faults += throughput.faults(*readings)
    if "calls" in given.of:
        with fleet(_part(folder, "gates"), Size(1, max(2, size.gates), 1, size.engines)) as started:
            turns = asyncio.run(throughput.calls(started, given.calls, given.turns))
        lines += throughput.call_lines(turns)
        faults += throughput.call_faults(turns)
    return lines, faults


def _part(folder: Path, name: str) -> Path:
    """The folder of one fleet of several."""
    (part := folder / name).mkdir()
    return part


def _session(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    plan = session.Plan(given.calls, given.at_once, given.rounds, given.budget)
    with fleet(folder, Size(size.sandboxes, 2, size.drivers, size.engines)) as started:
        account = asyncio.run(session.Run(started, plan).go())
    return account.lines(), account.faults()


def _export(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    place: store.Store = store.S3(folder) if given.to == "s3" else store.Directory(folder)
    with fleet(folder, size, exporting.settings(place), (store.HOST,), place.start) as started:
        account = asyncio.run(exporting.Run(started, place, given.rollouts, given.work).go(given.at_once))
    return account.lines(), account.faults()


def _soak(folder: Path, size: Size, given: argparse.Namespace) -> tuple[list[str], list[str]]:
    plan = Plan(
        given.rollouts,
        given.at_once,
        given.group,
        given.work,
        given.every,
        given.calm,
        given.seconds,
        given.noticed,
        int(given.memory * 2**30),
        given.seed,
    )
    with fleet(folder, size, soak_settings(folder), (TRAINER_HOST,), write_lists) as started:
        account = asyncio.run(Soak(started, plan).go())
    return account.lines(), account.faults()


_RUNS: Final = {
    "run": _run,
    "grow": _grow,
    "uneven": _uneven,
    "drain": _drain,
    "restart": _restart,
    "throughput": _throughput,
    "session": _session,
    "export": _export,
    "soak": _soak,
}


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
    size.add_argument("--forked", action="store_true", help="start services as the suite does: not for measurements")
    size.add_argument("--folder", type=Path, help="keep logs and journals here; default: a temporary directory")
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", parents=[size], help="start the hosts, and wait for Ctrl-C")
    load = argparse.ArgumentParser(add_help=False)
    load.add_argument("--rollouts", type=int, default=40)
    load.add_argument("--at-once", type=int, default=16)
    load.add_argument("--work", type=float, default=1.0, help="seconds that an agent's command takes")
    grow = commands.add_parser("grow", parents=[size, load], help="drive rollouts, and add sandbox services")
    grow.add_argument(
        "--within", type=float, default=5.0, help="seconds from the new list to the first sandbox at the new service"
    )
    grow.add_argument("--members", choices=["file", "dns"], default="file", help="where drivers find sandbox services")
    uneven = commands.add_parser(
        "uneven", parents=[size, load], help="drive rollouts with a full and a slow sandbox service, then many at once"
    )
    uneven.add_argument("--burst", type=int, default=150, help="rollouts at once on one sandbox service")
    uneven.add_argument("--creates", type=int, default=10, help="sandboxes a second that its driver may make there")
    commands.add_parser("drain", parents=[size, load], help="drive rollouts, and drain a sandbox service")
    commands.add_parser("restart", parents=[size, load], help="drive rollouts, and restart every service in turn")
    several = commands.add_parser("throughput", parents=[size], help="compare several hosts and gates with one of each")
    several.add_argument("--at-once", type=int, default=12, help="rollouts at once for each host")
    several.add_argument("--times", type=int, default=3, help="so many times as many rollouts")
    several.add_argument("--work", type=float, default=8.0, help="seconds that an agent sleeps")
    several.add_argument(
        "--calls", type=_calls, default=512, help=f"in flight at each gate, a multiple of {throughput.CALLS_OF_ROLLOUT}"
    )
    several.add_argument("--turns", type=int, default=10, help="of each gate alone, and of all gates together")
    several.add_argument("--of", nargs="+", choices=["rollouts", "calls"], default=["rollouts", "calls"])
    one = commands.add_parser("session", parents=[size], help="answer calls in one session; restart a gate, lose one")
    one.add_argument("--calls", type=int, default=2000)
    one.add_argument("--at-once", type=int, default=64)
    one.add_argument("--rounds", type=int, default=50, help="versions of the weights, each announced in a pause")
    one.add_argument("--budget", type=int, default=1000, help="calls of a run that has a budget")
    export = commands.add_parser(
        "export", parents=[size, load], help="store rollouts as they end; kill store and driver"
    )
    export.add_argument(
        "--to", choices=["s3", "file"], default="s3", help="an S3 server that fails and dies, or a disk"
    )
    run = commands.add_parser("run", parents=[size, load], help="drive rollouts, and lose hosts")
    run.add_argument("--parts", type=int, default=1, help="calls of a rollout but the last one, at most 4")
    run.add_argument(
        "--environments", type=int, default=1, help="environments that they run in: one is mostly at one sandbox host"
    )
    run.add_argument("--max-attempts", type=int, default=3)
    run.add_argument(
        "--lose",
        action="append",
        type=Loss.parse,
        default=[],
        metavar="NAME@SHARE[-SHARE][:kill|link|disk[=SECONDS]]",
        help="lose a host once this share of the rollouts has ended: cable and processes (kill), with its disk "
        "(disk), or the cable alone (link); SECONDS later it is back, a driver after 20. NAME may be a letter, any "
        "host of that kind. Repeat.",
    )
    run.add_argument("--seed", type=int, default=1, help="of the order of the rollouts, and of what --lose leaves open")
    run.add_argument(
        "--driver-lease", type=float, help="seconds that a gate keeps the rollouts of a driver which is not connected"
    )
    run.add_argument("--least", type=float, default=0.95, help="share of the rollouts that must have their reward")
    run.add_argument(
        "--noticed", type=float, default=8.0, help="seconds from a loss to the failure of 99%% of attempts"
    )
    run.add_argument("--waited", type=float, default=30.0, help="seconds that a rollout may wait for a lost host")
    soak = commands.add_parser("soak", parents=[size, load], help="groups of rollouts, while anything is lost")
    soak.set_defaults(rollouts=10_000, at_once=32, engines=2)
    soak.add_argument("--group", type=int, default=4, help="rollouts of a group")
    soak.add_argument("--every", type=float, default=20.0, help="seconds between two losses, on average")
    soak.add_argument("--calm", type=float, default=0.4, help="share of the run, at its end, in which nothing is lost")
    soak.add_argument("--seconds", type=float, default=7200.0, help="begin no group after this time")
    soak.add_argument("--noticed", type=float, default=10.0, help="seconds in which `doctor --live` names a lost host")
    soak.add_argument("--memory", type=float, default=8.0, help="GiB that all services may have together")
    soak.add_argument("--seed", type=int, default=1, help="of the dice")
    return parser


def _calls(text: str) -> int:
    number = int(text)
    if number <= 0 or number % throughput.CALLS_OF_ROLLOUT:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
