"""A Slurm job of four nodes runs rollouts on two drivers, gates and engines.

A service and the nodes of a gate, a driver and an engine are lost on the way, which start again on nodes that are left;
or the job is cancelled. Or nothing is lost, and all nodes are off before the job and after it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.clusters import machines, rollouts
from tests.clusters.away import Away, services_on
from tests.clusters.load import Load
from tests.clusters.report import (
    Report,
    answers,
    backends,
    gpus_seen,
    has_service,
    is_service,
    judge,
    members_in,
    traces,
)
from tests.clusters.slurm import Slurm, slurm
from tests.hosts import engine, model
from tests.hosts.fleet import ROOT
from tests.hosts.records import Lost
from tests.support.waiting import eventually

_NODES: Final = ("n0", "n1", "n2", "n3")
_PLACED: Final = {"driver": "n2", "interception": "n1", "inference": "n3"}
"""Where Slurm has the second gate, driver and engine: the first of each is on n0."""
_LOSSES: Final = {"interception": 0.3, "driver": 0.5, "inference": 0.7}
"""The share of the rollouts after which the nodes of the second gate, driver and engine are lost."""
_AGAIN: Final = ("drivers", "gates", "engines")
"""Files of members of the services that start again elsewhere."""
_STATE: Final = re.compile(r"penstock-[0-9a-f]+-(?P<service>[a-z]+)(-(?P<name>[a-z]\d+))?(-(?P<start>\d+))?")
_GONE: Final = ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT")
_LIMIT_S: Final = 600.0
_UIDS: Final = 512
"""Users of each node's sandboxes."""


async def run(folder: Path, load: Load, *, gpus: int, cancel: bool, power: bool, first_uid: int) -> Report:
    """Run a job. `gpus`: of the engine; `cancel`: `scancel` it in the middle, instead of losing a node.

    `power`: the cluster saves power, and no node is lost.
    """
    report = Report()
    folder.chmod(0o755)
    model.write(folder)
    engine.register(folder / engine.PLUGINS)
    # What a cancelled job leaves, it leaves of one of each as of two.
    nodes, of_each = (_NODES[:2], 1) if cancel else (_NODES, 2)
    async with slurm(folder, nodes, saves_power=power) as cluster:
        report.say("Slurm is up")
        ends = folder / rollouts.ENDS
        ends.touch()
        trainer = [sys.executable, "-m", "tests.clusters.rollouts", *load.arguments(), f"--folder={folder}"]
        job = _submit(cluster, trainer, gpus, first_uid, of_each)
        if power:
            await eventually(lambda: cluster.power() == set(_NODES), "Slurm asks for all nodes", within=_LIMIT_S)
            report.say("Slurm asks for all nodes")
        await eventually(lambda: _ended(ends, job, cluster) >= 1, "a rollout has ended", within=_LIMIT_S)
        report.say("a first rollout has ended")
        directory = folder / f"penstock-{job}"
        for kind, first in (("sandboxes", "n"), ("drivers", "d"), ("gates", "g"), ("engines", "e")):
            names = list(nodes) if first == "n" else [f"{first}{number}" for number in range(of_each)]
            members = members_in(folder, kind)
            report.check(sorted(members) == names, f"{kind} are {members}")
        if gpus:
            seen = gpus_seen(cluster.nodes.values())
            report.check(seen == [str(gpus)] * of_each, f"the engines see {seen} GPUs")
        else:
            for service, node in _PLACED.items():
                report.check(has_service(cluster.nodes[node], service), f"{node} has no {service} service")
        last: set[str] = set()
        living = [name for name in cluster.nodes if cancel or power or name not in _PLACED.values()]
        of_all = backends(folder, first_uid, _UIDS, nodes)
        report.check(bool(traces(of_all)), "sandboxes show nothing to their machines while rollouts run")
        if cancel:
            cluster.run("scancel", job)
        elif power:
            await _finish(cluster, ends, job, load)
        else:
            last = await _lose(cluster, report, ends, job, load)
        await eventually(lambda: cluster.state(job) in _GONE, "the job has ended", within=_LIMIT_S)
        state = cluster.state(job)
        report.say(f"the job is {state}")
        report.check(state == ("CANCELLED" if cancel else "COMPLETED"), f"the job is {state}")
        if not cancel:
            places = (*_NODES, "g0", "g1")
            judge(folder, report, load, places, [node for node in cluster.nodes if node not in living])
        of_living = [one for one in of_all if one.name in living]

        def left() -> list[str]:
            return [*_left(cluster, living, last), *traces(of_living)]

        await eventually(lambda: not left(), "nothing is left", within=60.0)
        report.say("nothing is left")
        if power:
            await eventually(lambda: not cluster.power(), "Slurm gives all nodes back", within=_LIMIT_S)
            report.say("Slurm gives all nodes back")
        report.check(not (directory / "orders").exists(), "the orders are left")
        report.check(not (directory / "connection.json").exists(), "the connection file is left")
    return report


def _submit(cluster: Slurm, trainer: Sequence[str], gpus: int, first_uid: int, of_each: int) -> str:
    folder = cluster.folder
    settings = [f"sandbox.first_uid={first_uid}", f"sandbox.uid_count={_UIDS}", f"inference.engine={engine.NAME}"]
    up = ["--model-dir", str(folder / "model"), "--engine", "scripted", "--script", str(folder / "script.yaml")]
    up += ["--engine-option", f"{engine.OPTION}={answers(folder)}"]
    up += [word for setting in settings for word in ("--set", setting)]
    up += [word for kind in ("drivers", "gates", "engines") for word in (f"--{kind}", str(of_each))]
    up += ["--scratch", str(folder / "scratch"), *(["--gpus", str(gpus)] if gpus else [])]
    (folder / "scratch").mkdir(mode=0o711)
    script = ROOT / "deploy" / "slurm" / "penstock.sbatch"
    options = [f"--nodes={len(cluster.nodes)}", f"--output={folder / 'job.log'}", *(["--gres=gpu:2"] if gpus else [])]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    exported = f"--export=ALL,PYTHONPATH={machines.python_path(folder)},PATH={path}"
    return cluster.submit(script, exported, *options, then=[*up, "--", *trainer])


async def _lose(cluster: Slurm, report: Report, ends: Path, job: str, load: Load) -> set[str]:
    """Kill a service, which comes back on its port, then cut nodes, whose others come back elsewhere.

    Returns the names of the directories of these others' state.
    """
    (service,) = [pid for pid in machines.processes(cluster.nodes["n1"]) if is_service(pid)]
    os.kill(service, signal.SIGKILL)
    report.disturbances.append(killed := Lost("n1", time.time()))
    report.say("the sandbox service of n1 is killed")
    host = cluster.nodes["n1"]
    others = lambda: any(is_service(pid) and pid != service for pid in machines.processes(host))  # noqa: E731
    await eventually(others, "the sandbox service of n1 is back", within=60.0)
    killed.back = time.time()
    report.say("it is back")
    away = Away(cluster.folder, report)

    async def meanwhile(check: Callable[[], bool], what: str, within: float = _LIMIT_S) -> None:
        """Wait, and record when services are back."""

        def looked() -> bool:
            away.all_back()
            return check()

        await eventually(looked, what, within=within)

    for kind, share in _LOSSES.items():
        # What ran at the last loss has ended by then: else the end of one attempt may have to wait for two losses.
        least = max(share * load.rollouts, _ended(ends, job, cluster) + load.at_once)
        await meanwhile(partial(_have_ended, ends, job, cluster, least), "rollouts go on")
        node = _PLACED[kind]
        there = services_on(cluster.folder, cluster.nodes[node], _AGAIN)
        cluster.nodes[node].cut()
        report.lost([node])
        away.lose(there)
        report.say(f"the cable of {node} is cut, which has a {kind} service: {sorted(there)}")
    lost = _PLACED.values()
    await meanwhile(
        lambda: all("DOWN" in cluster.node_state(node) for node in lost), "Slurm sees the losses", within=120.0
    )
    report.say(f"Slurm sees the losses, and the job is {cluster.state(job)}")
    report.check(cluster.state(job) == "RUNNING", "the job does not go on")
    await eventually(away.all_back, "what is lost is back", within=_LIMIT_S)
    on_first = services_on(cluster.folder, cluster.nodes["n0"], _AGAIN)
    report.check(len(on_first) == 2 * len(_AGAIN), f"the node that is left has {sorted(on_first)}")
    last = _last_states(cluster.folder)
    await _finish(cluster, ends, job, load)
    return last


def _last_states(folder: Path) -> set[str]:
    """Names of the directories of state of the last start of each service that has started again."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for path in (folder / "scratch").glob("*"):
        match = _STATE.fullmatch(path.name)
        if match is not None and match["start"]:
            key = match["service"], match["name"]
            found[key] = max(found.get(key, (0, "")), (int(match["start"]), path.name))
    return {name for _, name in found.values()}


async def _finish(cluster: Slurm, ends: Path, job: str, load: Load) -> None:
    """Let the trainer end once enough rollouts have ended, some of them after all losses."""
    await _until(cluster, ends, job, max(load.rollouts, _ended(ends, job, cluster) + load.at_once))
    (cluster.folder / rollouts.ENOUGH).touch()


async def _until(cluster: Slurm, ends: Path, job: str, least: float) -> None:
    """Wait until so many rollouts have ended."""
    await eventually(partial(_have_ended, ends, job, cluster, least), "rollouts go on", within=_LIMIT_S)


def _have_ended(ends: Path, job: str, cluster: Slurm, least: float) -> bool:
    return _ended(ends, job, cluster) >= least


def _ended(ends: Path, job: str, cluster: Slurm) -> int:
    """How many rollouts have ended. AssertionError where the job has."""
    found = len(ends.read_text().splitlines())
    if cluster.state(job) in _GONE:
        logs = [
            path.read_text(errors="replace")[-3000:] for path in sorted(cluster.folder.glob("penstock-*/logs/**/*.log"))
        ]
        raise AssertionError("\n".join([(cluster.folder / "job.log").read_text()[-3000:], *logs]))
    return found


def _left(cluster: Slurm, nodes: Sequence[str], last: Collection[str]) -> list[str]:
    """What the job has left on these nodes: processes, and state on their disks, of which `last` is.

    All nodes are one disk here.
    """
    found = [
        f"{name}: {command}"
        for name in nodes
        for pid in machines.processes(cluster.nodes[name])
        if (command := machines.command_of(pid)) and not command.startswith("slurmd") and "slurmd -D" not in command
    ]
    kept = [path for path in (cluster.folder / "scratch").glob("*") if path.name in last or _is_on(path.name, nodes)]
    return found + [str(path) for path in kept]


def _is_on(state: str, nodes: Sequence[str]) -> bool:
    """Whether a directory of the state of a first start is on one of these nodes."""
    match = _STATE.fullmatch(state)
    if match is None or match["start"]:
        return match is None
    service = match["service"]
    where = {"head": "n0"}.get(service) or (match["name"] if service == "sandbox" else _PLACED.get(service, ""))
    return where in nodes
