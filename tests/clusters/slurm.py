"""A real Slurm on machines of `tests.clusters.machines`: one controller, slurmd on each node, munge between them."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.clusters import machines
from tests.hosts.network import Host, Network
from tests.support.absent import absent
from tests.support.waiting import eventually

PROGRAMS: Final = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged")
NODE_LOST_S: Final = 10
"""How long the controller waits for a node that does not answer."""
_CONTROLLER: Final = "control"
_UP_S: Final = 60.0
_REQUESTS: Final = "power.txt"
_RESUME_S: Final = 120
_GPUS: Final = ("/dev/null", "/dev/zero")
"""Each node has these, which are GPUs in name only."""


@dataclass
class Slurm:
    """A running cluster. `env` is what its client programs need."""

    folder: Path
    network: Network
    nodes: Mapping[str, Host]
    env: Mapping[str, str]
    _powered: set[str] = field(default_factory=set)

    def run(self, *command: str) -> str:
        """What a client program prints, run on the controller's machine. Raises CalledProcessError."""
        holder = self.network.hosts[_CONTROLLER].holder
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--", *command],
            env=dict(self.env),
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=60,
        )
        return done.stdout

    def submit(self, script: Path, *options: str, then: Sequence[str]) -> str:
        """Submit a batch script with the arguments `then`; return the job's id."""
        return self.run("sbatch", "--parsable", f"--chdir={self.folder}", *options, str(script), *then).strip()

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING."""
        return self._field("job", job, "JobState")

    def node_state(self, node: str) -> str:
        """The node's state, such as IDLE, or DOWN* where it does not answer."""
        return self._field("node", node, "State")

    def all_are(self, state: str) -> bool:
        """Whether all nodes are in this state."""
        try:
            return all(self.node_state(node) == state for node in self.nodes)
        except subprocess.CalledProcessError:  # the controller starts
            return False

    def power(self) -> set[str]:
        """Start slurmd where Slurm has asked for a node, and end it where Slurm has given one back. Returns those on.

        Of a cluster that saves power, this has to be called again and again.
        """
        asked: set[str] = set()
        for line in self._requests.read_text().splitlines() if self._requests.exists() else []:
            what, _, nodes = line.partition(" ")
            named = self.run("scontrol", "show", "hostnames", nodes).split()
            asked = asked.union(named) if what == "resume" else asked.difference(named)
        for name in asked - self._powered:
            self.start(name)
        for name in self._powered - asked:
            machines.kill(self.nodes[name])
        self._powered = asked
        return asked

    def start(self, name: str) -> None:
        """Start slurmd on a node, which counts as booted now: Slurm awaits that of a node that it has asked for."""
        machines.spawn(self.nodes[name], ["slurmd", "-D", "-b"], self.env, self.folder / f"slurmd-{name}.out")

    @property
    def _requests(self) -> Path:
        return self.folder / _REQUESTS

    def _field(self, kind: str, name: str, field: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", kind, name)
        return next(item.partition("=")[2] for item in shown.split() if item.startswith(f"{field}="))


@asynccontextmanager
async def slurm(folder: Path, nodes: Sequence[str], *, saves_power: bool = False) -> AsyncIterator[Slurm]:
    """Start a cluster whose files are below `folder`. The caller is in a world (`machines.enter_world`).

    One that saves power has no node on, until a job needs it; see `Slurm.power`.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        absent(f"Slurm and munge ({', '.join(missing)})")
    with Network() as network:
        hosts = machines.machines(network, folder, [_CONTROLLER, *nodes])
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "SLURM_"))}
        env["SLURM_CONF"] = str(_configure(folder, hosts, nodes, saves_power))
        made = Slurm(folder, network, {name: hosts[name] for name in nodes}, env)
        try:
            await _munge(made, hosts[_CONTROLLER])
            machines.spawn(hosts[_CONTROLLER], ["slurmctld", "-D"], env, folder / "slurmctld.out")
            for name in nodes if not saves_power else ():
                made.start(name)
            state = "IDLE" if not saves_power else "IDLE+CLOUD+POWERED_DOWN"
            await eventually(lambda: made.all_are(state), f"all nodes are {state}", within=_UP_S)
            yield made
        finally:
            for host in hosts.values():
                machines.kill(host)


async def _munge(made: Slurm, host: Host) -> None:
    key, socket = made.folder / "munge.key", made.folder / "munge.socket"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = [f"--{what}-file={made.folder / what}.munge" for what in ("pid", "log", "seed")]
    argv = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files]
    machines.spawn(host, argv, made.env, made.folder / "munged.out")
    await eventually(socket.exists, "munge listens", within=_UP_S)


def _configure(folder: Path, hosts: Mapping[str, Host], nodes: Sequence[str], saves_power: bool) -> Path:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    cores = os.cpu_count() or 1
    each = f"CPUs={cores} Gres=gpu:{len(_GPUS)}{' State=CLOUD' if saves_power else ''}"
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={_CONTROLLER}({hosts[_CONTROLLER].address})",
        "SlurmctldPort=6817\nSlurmdPort=6818",
        f"AuthInfo=socket={folder / 'munge.socket'}",
        "SlurmUser=root\nSlurmdUser=root",
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none",
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core",
        "GresTypes=gpu\nReturnToService=2\nKillWait=30\nInactiveLimit=0",
        f"SlurmdTimeout={NODE_LOST_S}\nSlurmctldTimeout=60",
        f"StateSaveLocation={folder / 'state'}\nSlurmdSpoolDir={folder / 'spool'}/%n",
        f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd-%n.log",
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid",
        *(f"NodeName={name} NodeAddr={hosts[name].address} {each}" for name in nodes),
        *(_power_saving(folder) if saves_power else ()),
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
    ]
    devices = [f"NodeName={name} Name=gpu File={device}\n" for name in nodes for device in _GPUS]
    (folder / "gres.conf").write_text("".join(devices))
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    return conf


def _power_saving(folder: Path) -> list[str]:
    """Settings by which Slurm asks for nodes that jobs need, and gives back those that are idle, in a file."""
    programs = []
    for what in ("resume", "suspend"):
        program = folder / f"{what}.sh"
        program.write_text(f'#!/bin/sh\necho "{what} $1" >> {folder / _REQUESTS}\n')
        program.chmod(0o755)
        programs.append(f"{what.title()}Program={program}")
    return [*programs, f"ResumeTimeout={_RESUME_S}", "SuspendTime=10", "SuspendTimeout=10", "PrivateData=cloud"]
