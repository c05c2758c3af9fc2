"""A Slurm job of four nodes runs rollouts on two drivers, gates and engines.

A service and the nodes of a gate, a driver and an engine are lost on the way, or the job is cancelled.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.clusters import machines
from tests.clusters.report import Report, gpus_seen, has_service, is_service, judge, members_in
from tests.clusters.slurm import Slurm, slurm
from tests.hosts import model
from tests.support.waiting import eventually

_NODES: Final = ("n0", "n1", "n2", "n3")
_PLACED: Final = {"driver": "n2", "interception": "n1", "inference": "n3"}
"""Where Slurm has the second gate, driver and engine: the first of each is on n0."""
ROOT: Final = Path(__file__).parents[2]
_GONE: Final = ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT")
_LIMIT_S: Final = 600.0
_UIDS: Final = 64
"""Users of each node's sandboxes: few, since the nodes of a test are one machine."""


async def run(
    folder: Path, count: int, at_once: int, work_s: float, *, gpus: int, cancel: bool, first_uid: int
) -> Report:
    """Run a job. `gpus`: of the engine; `cancel`: `scancel` it in the middle, instead of losing a node."""
    report = Report()
    folder.chmod(0o755)
    model.write(folder)
    async with slurm(folder, _NODES) as cluster:
        report.say("Slurm is up")
        ends = folder / "ends.jsonl"
        ends.touch()
        trainer = [sys.executable, "-m", "tests.clusters.rollouts", "--at-once", str(at_once)]
        trainer += ["--work", str(work_s), "--ends", str(ends), "--enough", str(folder / "enough")]
        job = _submit(cluster, trainer, gpus, first_uid)
        await eventually(lambda: _ended(ends, job, cluster) >= 1, "a rollout has ended", within=_LIMIT_S)
        report.say("a first rollout has ended")
        directory = folder / f"penstock-{job}"
        for kind, first in (("sandboxes", "n"), ("drivers", "d"), ("gates", "g"), ("engines", "e")):
            names = list(_NODES) if first == "n" else [f"{first}0", f"{first}1"]
            members = members_in(folder, kind)
            report.check(sorted(members) == names, f"{kind} are {members}")
        if gpus:
            seen = gpus_seen(cluster.nodes.values())
            report.check(seen == [str(gpus)] * 2, f"the engines see {seen} GPUs")
        else:
            for service, node in _PLACED.items():
                report.check(has_service(cluster.nodes[node], service), f"{node} has no {service} service")
        if cancel:
            cluster.run("scancel", job)
        else:
            await _lose(cluster, report, ends, job, count)
        await eventually(lambda: cluster.state(job) in _GONE, "the job has ended", within=_LIMIT_S)
        state = cluster.state(job)
        report.say(f"the job is {state}")
        report.check(state == ("CANCELLED" if cancel else "COMPLETED"), f"the job is {state}")
        if not cancel:
            judge(ends, count, report)
        living = [name for name in cluster.nodes if cancel or name not in _PLACED.values()]
        await eventually(lambda: not _left(cluster, living), "nothing is left", within=60.0)
        report.say("nothing is left")
        report.check(not (directory / "orders").exists(), "the orders are left")
        report.check(not (directory / "connection.json").exists(), "the connection file is left")
    return report


def _submit(cluster: Slurm, trainer: Sequence[str], gpus: int, first_uid: int) -> str:
    folder = cluster.folder
    settings = [f"sandbox.first_uid={first_uid}", f"sandbox.uid_count={_UIDS}"]
    up = ["--model-dir", str(folder / "model"), "--engine", "scripted", "--script", str(folder / "script.yaml")]
    up += [word for setting in settings for word in ("--set", setting)]
    up += ["--drivers", "2", "--gates", "2", "--engines", "2"]
    up += ["--scratch", str(folder / "scratch"), *(["--gpus", str(gpus)] if gpus else [])]
    (folder / "scratch").mkdir(mode=0o711)
    script = ROOT / "deploy" / "slurm" / "penstock.sbatch"
    options = [f"--nodes={len(_NODES)}", f"--output={folder / 'job.log'}", *(["--gres=gpu:2"] if gpus else [])]
    exported = f"--export=ALL,PYTHONPATH={ROOT},PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    return cluster.submit(script, exported, *options, then=[*up, "--", *trainer])


async def _lose(cluster: Slurm, report: Report, ends: Path, job: str, count: int) -> None:
    """Kill a service, which comes back under its name, then cut nodes, which do not."""
    (service,) = [pid for pid in machines.processes(cluster.nodes["n1"]) if is_service(pid)]
    os.kill(service, signal.SIGKILL)
    report.say("the sandbox service of n1 is killed")
    host = cluster.nodes["n1"]
    others = lambda: any(is_service(pid) and pid != service for pid in machines.processes(host))  # noqa: E731
    await eventually(others, "the sandbox service of n1 is back", within=60.0)
    report.say("it is back")
    await _go_on(cluster, ends, job, 1)
    for kind, node in _PLACED.items():
        cluster.nodes[node].cut()
        report.say(f"the cable of {node} is cut, which has a {kind} service")
        await _go_on(cluster, ends, job, 6)
        report.say("rollouts go on")
    lost = _PLACED.values()
    seen = lambda: all("DOWN" in cluster.node_state(node) for node in lost)  # noqa: E731
    await eventually(seen, "Slurm sees the losses", within=120.0)
    report.say(f"Slurm sees the losses, and the job is {cluster.state(job)}")
    report.check(cluster.state(job) == "RUNNING", "the job does not go on")
    kinds = ("gates", "drivers", "engines")
    left = lambda: all(len(members_in(cluster.folder, kind)) == 1 for kind in kinds)  # noqa: E731
    await eventually(left, "the lost ones are no members", within=60.0)
    report.say("those that are lost are no members any more")
    await _go_on(cluster, ends, job, max(1, count - _ended(ends, job, cluster)))
    (cluster.folder / "enough").touch()


async def _go_on(cluster: Slurm, ends: Path, job: str, more: int) -> None:
    """Wait until so many more rollouts have ended."""
    least = _ended(ends, job, cluster) + more
    await eventually(lambda: _ended(ends, job, cluster) >= least, "rollouts go on", within=_LIMIT_S)


def _ended(ends: Path, job: str, cluster: Slurm) -> int:
    """How many rollouts have ended. AssertionError where the job has."""
    found = len(ends.read_text().splitlines())
    if cluster.state(job) in _GONE:
        logs = [
            path.read_text(errors="replace")[-3000:] for path in sorted(cluster.folder.glob("penstock-*/logs/**/*.log"))
        ]
        raise AssertionError("\n".join([(cluster.folder / "job.log").read_text()[-3000:], *logs]))
    return found


def _left(cluster: Slurm, nodes: Sequence[str]) -> list[str]:
    """What the job has left on these nodes: processes, and state on their disks."""
    found = [
        f"{name}: {command}"
        for name in nodes
        for pid in machines.processes(cluster.nodes[name])
        if (command := machines.command_of(pid)) and not command.startswith("slurmd") and "slurmd -D" not in command
    ]
    kept = [path for path in (cluster.folder / "scratch").glob("*") if _is_on(path.name, nodes)]
    return found + [str(path) for path in kept]


def _is_on(state: str, nodes: Sequence[str]) -> bool:
    """Whether a directory of state is on one of these nodes, all of which are one disk here."""
    service, _, name = state.split("-", 2)[2].partition("-")
    where = {"head": "n0"}.get(service) or (name if service == "sandbox" else _PLACED.get(service, ""))
    return where in nodes
