"""A trainer's actor runs rollouts on a Ray cluster of three machines.

Either its stack has asked for three machines and two drivers, gates and engines, of which the second ones share two
machines. These are lost and come back, one by the end of its raylet and one by its cable. Or it has asked for as many
as it needs and one of each kind: Ray's autoscaler adds the third machine, and the engine's actor is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Final

from tests.clusters import machines, rollouts
from tests.clusters.away import Away, services_on
from tests.clusters.load import Load
from tests.clusters.ray_cluster import HEAD, Ray, ray_cluster
from tests.clusters.report import Report, backends, gpus_seen, is_service, judge, members_in, traces
from tests.hosts import engine, model
from tests.support.waiting import eventually

_NAMES: Final = (HEAD, "r1", "r2")
_SECOND: Final = {"d1": "drivers", "g1": "gates", "e1": "engines"}
"""Files of members, by names of services."""
_FIRST: Final = 0.2
"""Share of the rollouts after which a raylet is killed."""
_SECOND_AT: Final = 0.5
"""Share of them after which a machine is cut."""
_LIMIT_S: Final = 600.0
_BACK_S: Final = 120.0
_UIDS: Final = 1024
"""Users of each node's sandboxes: few, since the nodes of a test are one machine."""


async def run(folder: Path, load: Load, *, gpus: int, late: bool, first_uid: int) -> Report:
    """Run a trainer. `gpus`: of the engine, which then is on r1; `late`: the autoscaler adds r2; no machine is lost."""
    report = Report()
    folder.chmod(0o755)
    model.write(folder)
    engine.register(folder / engine.PLUGINS)
    (folder / "scratch").mkdir(mode=0o711)
    ends = folder / rollouts.ENDS
    ends.touch()
    async with ray_cluster(folder, {"r1": gpus}, _NAMES, first=2 if late else 3, scaled=late) as cluster:
        report.say("Ray is up")
        argv = [sys.executable, "-m", "tests.clusters.ray_trainer", f"--folder={folder}"]
        argv += [*load.arguments(), f"--gpus={gpus}", f"--nodes={0 if late else 3}"]
        # All at once take more than the share of a machine's places after which the stack asks for another one.
        argv += [f"--of-each={1 if late else 2}", f"--places={load.at_once + 1 if late else 0}"]
        argv += [f"--first-uid={first_uid}", f"--uids={_UIDS}"]
        head = cluster.hosts[HEAD]
        trainer = machines.spawn(head, argv, {**cluster.env, "RAY_ADDRESS": cluster.address}, folder / "trainer.log")

        def ended(least: int) -> Callable[[], bool]:
            def check() -> bool:
                if trainer.poll() is not None:
                    raise AssertionError((folder / "trainer.log").read_text(errors="replace")[-6000:])
                return _ended(ends) >= least

            return check

        await eventually(ended(1), "a rollout has ended", within=_LIMIT_S)
        report.say("a first rollout has ended")
        if gpus:
            seen = gpus_seen([cluster.hosts["r1"]])
            report.check(seen == [str(gpus)], f"the engine sees {seen} GPUs")
        if late:
            await _add(cluster, report, folder, ends)
            if gpus:
                await _lose_engine(cluster, report, ended, ends)
        else:
            members = members_in(folder)
            report.check(sorted(members) == ["n0", "n1", "n2"], f"members are {members}")
            report.check(len({one.partition(":")[0] for one in members.values()}) == 3, f"members are {members}")
            where = {name: _machine_of(cluster, folder, kind, name) for name, kind in _SECOND.items()}
            report.say(f"the second of each is on {where}")
            report.check(set(where.values()) == {"r1", "r2"}, f"services are not apart: {where}")
            first, second = where["d1"], next(name for name in ("r2", "r1") if name != where["d1"])
            await eventually(ended(ceil(_FIRST * load.rollouts)), "rollouts go on", within=_LIMIT_S)
            await _lose_raylet(cluster, report, folder, first)
            least = max(ceil(_SECOND_AT * load.rollouts), _ended(ends) + 6)
            await eventually(ended(least), "rollouts go on", within=_LIMIT_S)
            await _cut(cluster, report, folder, second)
            at = [one.rpartition(":")[0] for name, kind in _SECOND.items() for one in [members_in(folder, kind)[name]]]
            report.check(cluster.hosts[HEAD].address not in at, f"the second of each is on {at}")
        of_all = backends(folder, first_uid, _UIDS, sorted(members_in(folder)))
        report.check(bool(traces(of_all)), "sandboxes show nothing to their machines while rollouts run")
        least = max(load.rollouts, _ended(ends) + load.at_once)
        await eventually(ended(least), "rollouts go on", within=_LIMIT_S)
        (folder / rollouts.ENOUGH).touch()
        await eventually(lambda: trainer.poll() is not None, "the trainer has ended", within=_LIMIT_S)
        report.say(f"the trainer has ended with {trainer.returncode}")
        report.check(trainer.returncode == 0, (folder / "trainer.log").read_text(errors="replace")[-3000:])
        places = ("n0", "n1", "g0", *([] if late else ["n2", "g1"]))
        judge(folder, report, load, places, ["r1"] if late else ["r1", "r2"])
        await eventually(lambda: not [*_left(cluster, folder), *traces(of_all)], "nothing is left", within=60.0)
        report.say("nothing is left")
    return report


async def _add(cluster: Ray, report: Report, folder: Path, ends: Path) -> None:
    """Start Ray on the machine that the autoscaler asks for: it gets a sandbox service, and that one gets rollouts."""
    began = time.monotonic()

    def added() -> bool:
        cluster.start_asked()
        return len(members_in(folder)) == 2

    await cluster.until(lambda: len(members_in(folder)) == 1, "r1 has a service")
    await cluster.until(added, "r2 has a service")
    report.say(f"members are {members_in(folder)}")
    await eventually(lambda: '"node":"n1"' in ends.read_text(), "a rollout ran on n1", within=_LIMIT_S)
    report.say(f"a rollout ran on n1, {time.monotonic() - began:.1f} s after the first")


async def _lose_engine(cluster: Ray, report: Report, ended: Callable[[int], Callable[[], bool]], ends: Path) -> None:
    """Kill the engine's actor. Ray starts it again, and the gate learns where it is now."""
    (lost,) = _engines(cluster)
    os.kill(machines.parent_of(lost), signal.SIGKILL)
    report.lost(["e0"])
    report.ended(["e0"])
    report.say("the engine's actor is killed")
    await eventually(lambda: bool(set(_engines(cluster)) - {lost}), "the engine is back", within=_BACK_S)
    report.say(f"the engine is back after {report.away_s('e0'):.1f} s")
    await eventually(ended(_ended(ends) + 2), "rollouts go on", within=_LIMIT_S)


async def _lose_raylet(cluster: Ray, report: Report, folder: Path, name: str) -> None:
    """Kill a raylet. What was there returns under its name: the sandbox service there, others where there is room."""
    before, away = services_on(folder, cluster.hosts[name]), Away(folder, report)
    os.kill(cluster.raylet(name), signal.SIGKILL)
    away.lose(before)
    report.say(f"the raylet of {name} is killed, which has {sorted(before)}")
    await eventually(lambda: not _services(cluster, name), "its services have ended", within=_BACK_S)
    report.say("its services have ended")
    machines.kill(cluster.hosts[name])  # what ray start --block leaves of itself
    cluster.start(name)
    await cluster.until(away.all_back, f"{sorted(before)} are back")
    report.check(sorted(members_in(folder)) == ["n0", "n1", "n2"], f"members are {members_in(folder)}")


async def _cut(cluster: Ray, report: Report, folder: Path, name: str) -> None:
    """Cut a machine until Ray has given it up, and start Ray there anew."""
    host = cluster.hosts[name]
    before, away = services_on(folder, host), Away(folder, report)
    host.cut()
    report.lost(before)
    report.say(f"the cable of {name} is cut, which has {sorted(before)}")
    await eventually(lambda: cluster.alive() == len(_NAMES) - 1, "Ray sees the loss", within=_BACK_S)
    report.ended(before)
    report.say(f"Ray sees the loss; services on the cut machine: {len(_services(cluster, name))}")
    host.mend()
    await eventually(lambda: not _services(cluster, name), "the old raylet ends with its services", within=_BACK_S)
    # Since the cable was mended they answered again, and attempts began there: these are lost now.
    away.lose(before)
    report.say("mended: the old raylet has ended with its services")
    machines.kill(host)
    cluster.start(name)
    await cluster.until(away.all_back, f"{sorted(before)} are back")


def _machine_of(cluster: Ray, folder: Path, kind: str, name: str) -> str:
    host = members_in(folder, kind)[name].rpartition(":")[0]
    return next(machine for machine, one in cluster.hosts.items() if one.address == host)


def _engines(cluster: Ray) -> list[int]:
    return [
        pid
        for pid in machines.processes(cluster.hosts["r1"])
        if machines.command_of(pid).endswith("-m penstock_inference")
    ]


def _ended(ends: Path) -> int:
    return len(ends.read_text().splitlines())


def _services(cluster: Ray, name: str) -> list[int]:
    """Services of all kinds but the trainer's own."""
    kinds = ("sandbox", "driver", "interception", "inference")
    return [pid for pid in machines.processes(cluster.hosts[name]) for kind in kinds if is_service(pid, kind)]


def _left(cluster: Ray, folder: Path) -> list[str]:
    """What the stack has left: services, and state."""
    found = [
        command
        for host in cluster.hosts.values()
        for pid in machines.processes(host)
        if "penstock_" in (command := machines.command_of(pid))
    ]
    return found + [str(path) for path in (folder / "scratch").glob("*")]
