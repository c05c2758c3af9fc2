"""A trainer's actor runs rollouts on a Ray cluster of three machines.

Either its stack has asked for three machines and two drivers, gates and engines, of which the second ones share two
machines. These are lost and come back, one by the end of its raylet and one by its cable. Or it has asked for all of
them and one of each kind, the third machine comes later, and the engine's actor is lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.clusters import machines
from tests.clusters.ray_cluster import HEAD, Ray, ray_cluster
from tests.clusters.report import Report, gpus_seen, is_service, judge, members_in
from tests.hosts import model
from tests.support.waiting import eventually

_NAMES: Final = (HEAD, "r1", "r2")
_SECOND: Final = {"d1": "drivers", "g1": "gates", "e1": "engines"}
"""Files of members, by names of services."""
_LIMIT_S: Final = 600.0
_BACK_S: Final = 120.0
_UIDS: Final = 1024
"""Users of each node's sandboxes: few, since the nodes of a test are one machine."""


async def run(
    folder: Path, count: int, at_once: int, work_s: float, *, gpus: int, late: bool, first_uid: int
) -> Report:
    """Run a trainer. `gpus`: of the engine, which then is on r1; `late`: r2 comes later, and nothing else is lost."""
    report = Report()
    folder.chmod(0o755)
    model.write(folder)
    (folder / "scratch").mkdir(mode=0o711)
    ends = folder / "ends.jsonl"
    ends.touch()
    async with ray_cluster(folder, {"r1": gpus}, _NAMES, first=2 if late else 3) as cluster:
        report.say("Ray is up")
        argv = [sys.executable, "-m", "tests.clusters.ray_trainer", f"--folder={folder}"]
        argv += [f"--at-once={at_once}", f"--work={work_s}", f"--gpus={gpus}", f"--nodes={0 if late else 3}"]
        argv += [f"--of-each={1 if late else 2}"]
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
            await _lose_raylet(cluster, report, folder, first)
            await eventually(ended(_ended(ends) + 6), "rollouts go on", within=_LIMIT_S)
            await _cut(cluster, report, folder, second)
            at = [one.rpartition(":")[0] for name, kind in _SECOND.items() for one in [members_in(folder, kind)[name]]]
            report.check(cluster.hosts[HEAD].address not in at, f"the second of each is on {at}")
        await eventually(ended(max(count, _ended(ends) + 1)), "rollouts go on", within=_LIMIT_S)
        (folder / "enough").touch()
        await eventually(lambda: trainer.poll() is not None, "the trainer has ended", within=_LIMIT_S)
        report.say(f"the trainer has ended with {trainer.returncode}")
        report.check(trainer.returncode == 0, (folder / "trainer.log").read_text(errors="replace")[-3000:])
        judge(ends, count, report)
        await eventually(lambda: not _left(cluster, folder), "nothing is left", within=60.0)
        report.say("nothing is left")
    return report


async def _add(cluster: Ray, report: Report, folder: Path, ends: Path) -> None:
    """Start Ray on a third machine: it gets a sandbox service, and that one gets rollouts."""
    members = members_in(folder)
    cluster.start("r2")
    report.say(f"r2 is started; members are {sorted(members)}")
    await cluster.until(lambda: len(members_in(folder)) == len(members) + 1, "r2 has a service")
    (added,) = members_in(folder).keys() - members.keys()
    report.say(f"{added} is a member")
    await eventually(lambda: f'"node": "{added}"' in ends.read_text(), f"a rollout ran on {added}", within=_LIMIT_S)
    report.say(f"a rollout ran on {added}")


async def _lose_engine(cluster: Ray, report: Report, ended: Callable[[int], Callable[[], bool]], ends: Path) -> None:
    """Kill the engine's actor. Ray starts it again, and the gate learns where it is now."""
    (engine,) = _engines(cluster)
    os.kill(machines.parent_of(engine), signal.SIGKILL)
    report.say("the engine's actor is killed")
    await eventually(lambda: bool(set(_engines(cluster)) - {engine}), "the engine is back", within=_BACK_S)
    report.say("the engine is back")
    await eventually(ended(_ended(ends) + 2), "rollouts go on", within=_LIMIT_S)


async def _lose_raylet(cluster: Ray, report: Report, folder: Path, name: str) -> None:
    """Kill a raylet. What was there returns under its name: the sandbox service there, others where there is room."""
    before = _on(cluster, folder, name)
    os.kill(cluster.raylet(name), signal.SIGKILL)
    report.say(f"the raylet of {name} is killed, which has {sorted(before)}")
    await eventually(lambda: not _services(cluster, name), "its services have ended", within=_BACK_S)
    report.say("its services have ended")
    machines.kill(cluster.hosts[name])  # what ray start --block leaves of itself
    cluster.start(name)
    await _back(cluster, report, folder, before)
    report.check(sorted(members_in(folder)) == ["n0", "n1", "n2"], f"members are {members_in(folder)}")


async def _cut(cluster: Ray, report: Report, folder: Path, name: str) -> None:
    """Cut a machine until Ray has given it up, and start Ray there anew."""
    host, before = cluster.hosts[name], _on(cluster, folder, name)
    host.cut()
    report.say(f"the cable of {name} is cut, which has {sorted(before)}")
    await eventually(lambda: cluster.alive() == len(_NAMES) - 1, "Ray sees the loss", within=_BACK_S)
    report.say(f"Ray sees the loss; services on the cut machine: {len(_services(cluster, name))}")
    host.mend()
    await eventually(lambda: not _services(cluster, name), "the old raylet ends with its services", within=_BACK_S)
    report.say("mended: the old raylet has ended with its services")
    machines.kill(host)
    cluster.start(name)
    await _back(cluster, report, folder, before)


def _on(cluster: Ray, folder: Path, name: str) -> dict[str, tuple[str, str]]:
    """Files of members and addresses of the services on a machine, by their names."""
    host = cluster.hosts[name].address
    return {
        service: (kind, address)
        for kind in ("sandboxes", *_SECOND.values())
        for service, address in members_in(folder, kind).items()
        if address.startswith(f"{host}:")
    }


async def _back(cluster: Ray, report: Report, folder: Path, before: dict[str, tuple[str, str]]) -> None:
    """Wait until services have other addresses than before."""

    def changed() -> bool:
        return all(members_in(folder, kind).get(name) not in (None, old) for name, (kind, old) in before.items())

    await cluster.until(changed, f"{sorted(before)} are back")
    for name, (kind, address) in before.items():
        report.say(f"{name} is back at {members_in(folder, kind)[name]}, before at {address}")


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
