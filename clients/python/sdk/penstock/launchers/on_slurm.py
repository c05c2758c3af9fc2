"""A stack in a Slurm allocation: one step runs a sandbox service on each node, one the engines on nodes with GPUs.

The batch script's node has the first driver and gate. Each further one is a step on another node, which ends when Slurm
gives that node up; then the service starts again on another one, under its name and without its state. Orders stand in
a directory that all nodes share and that only this user can read. A node's process reports on its standard output,
which `srun` brings here. It reads members from its standard input, and ends with that, which ends when this process
does. `srun --no-kill` goes on without nodes that are lost.
"""

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.client.errors import ConfigurationError
from penstock.client.transport.atomic_files import writing
from penstock.client.transport.background import TaskOwner
from penstock.client.transport.endpoints import ServiceName
from penstock.client.transport.private_files import open_private, private_directory
from penstock.launchers.cluster import ClusterStack
from penstock.launchers.node import NODE_VARIABLE
from penstock.launchers.slurm_nodes import SlurmNode, nodes_of_job, service_names
from penstock.local.processes import StackFailed
from penstock.local.supervision import Deaths

_log = logging.getLogger("penstock.stack")
_JOB: Final = "SLURM_JOB_ID"
_STOP_S: Final = 45.0
"""Seconds for a step to end: its services have 10 and what they need to kill their sandboxes."""
_SERVICE_STOP_S: Final = 12.0
_TAIL_BYTES: Final = 2_000
_TASK: Final = "SLURM_PROCID"
"""Environment variable in which Slurm has a task's number in its step."""
_OF_THE_JOB: Final = ("SLURM_CPUS_PER", "SLURM_CPU_BIND", "SLURM_GPUS", "SLURM_MEM_", "SLURM_NTASKS", "SLURM_TRES_PER")
"""Variables by which the job's own options would become those of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step that runs, with the names of its services, all of one kind."""

    what: str
    kind: ServiceName
    names: Sequence[str]
    process: asyncio.subprocess.Process
    log: Path
    node: str = ""
    """That of its one service, which may start again on another; empty = it has several."""


class SlurmStack(ClusterStack):
    """See `ClusterStack`; `state_dir` is on a file system that all nodes share, by default `penstock-JOB` here."""

    def __init__(self, *, state_dir: Path | str | None = None, **options: Any) -> None:
        super().__init__(state_dir=state_dir or f"penstock-{os.environ.get(_JOB, '')}", **options)
        self._hosts: Mapping[str, str] = {}
        self._steps: list[_Step] = []
        self._ends: dict[str, Deaths] = {}
        """Ends of steps of one service, by its name."""
        self._following = TaskOwner()

    @property
    def _orders(self) -> Path:
        return self.directory / "orders"

    async def find(self) -> None:
        """See ClusterStack."""
        if not os.environ.get(_JOB):
            raise ConfigurationError(
                "There is no Slurm allocation here: start it in a batch script (sbatch deploy/slurm/penstock.sbatch is "
                "an example), or in a shell of `salloc --nodes=N`.",
                reason="SLURM_NO_ALLOCATION",
            )
        if absent := [name for name in ("srun", "scontrol") if shutil.which(name) is None]:
            raise ConfigurationError(
                f"Slurm's program {absent[0]} is not in PATH: install Slurm's client programs on this node, or load "
                "their module.",
                reason="SLURM_MISSING",
            )
        self._hosts = {node.name: node.address for node in await nodes_of_job()}
        wanted = self.nodes or len(self._hosts)
        if not 0 < wanted <= len(self._hosts):
            raise ConfigurationError(
                f"The allocation has {len(self._hosts)} nodes ({', '.join(self._hosts)}), not {wanted}: ask for more "
                "(sbatch --nodes=N), or for fewer sandbox services.",
                reason="SLURM_NODES",
            )
        self.nodes = wanted
        self.host = self.host or self._hosts.get(os.environ.get(NODE_VARIABLE, "")) or os.uname().nodename

    async def place(self, services: Mapping[str, ServiceName]) -> None:
        """See ClusterStack."""
        with_gpus = [name for name, kind in services.items() if kind == "inference" and self.gpus]
        if with_gpus:
            for number, name in enumerate(with_gpus):
                self._write_order("engines", str(number), self.order(name, "inference", self._hosts).dumps())
            # A step that overlaps has all GPUs of its node, if it is not one task of several.
            several = (f"--ntasks={len(with_gpus)}", f"--gpus-per-task={self.gpus}", "--no-kill")
            await self._srun("engines", "inference", with_gpus, several, ["--by", _TASK])
        here = os.environ.get(NODE_VARIABLE, "")
        nodes = [node for node in self._hosts if node != here] or [here]
        for number, name in enumerate(name for name in services if name not in with_gpus):
            await self._start_alone(name, services[name], nodes[number % len(nodes)])

    async def place_nodes(self) -> None:
        """See ClusterStack."""
        named = service_names(list(self._hosts))
        for number, (node, name) in enumerate(named.items()):
            order = self.order(name, "sandbox", {node: self._hosts[node]}, number)
            self._write_order("nodes", node, order.dumps())
        count = self.nodes or len(named)
        more = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--gres=none", "--no-kill")
        await self._srun("nodes", "sandbox", list(named.values()), more, [])

    async def remove(self, kinds: Collection[ServiceName]) -> None:
        """See ClusterStack."""
        await asyncio.gather(*(_ended(step.process) for step in self._steps if step.kind in kinds))

    async def close(self) -> None:
        """See ClusterStack."""
        await self._following.close()
        if self._is_ours:
            await asyncio.to_thread(shutil.rmtree, self._orders, ignore_errors=True)

    @property
    def stop_timeout(self) -> float:
        """See ServiceProcesses. A job that is cancelled is killed after 30 s (KillWait).

        Slurm signals its processes all at once, so the driver may wait in vain for a gate that has ended first.
        """
        return _SERVICE_STOP_S

    def log_dir_of(self, name: str) -> str | None:
        """See ClusterStack."""
        return str(self.log_dir / name)

    def hint(self) -> str:
        """See ClusterStack."""
        return f" What the nodes wrote is in {self.log_dir}."

    async def _start_alone(self, name: str, kind: ServiceName, node: str, start: int = 0) -> None:
        """Starts a step of one service, which ends with its node."""
        order = self.order(name, kind, {node: self._hosts[node]}, start=start)
        self._write_order(name, node, order.dumps())
        alone = (f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--gres=none", "--no-kill=off")
        await self._srun(name, kind, [name], alone, [], node)

    def _write_order(self, step: str, name: str, content: bytes) -> None:
        private_directory(self._orders)
        private_directory(self._orders / step)
        path = self._orders / step / f"{name}.json"
        with writing(path), os.fdopen(open_private(path, os.O_WRONLY | os.O_TRUNC), "wb") as stream:
            stream.write(content)

    async def _srun(
        self,
        what: str,
        kind: ServiceName,
        names: Sequence[str],
        more: Sequence[str],
        arguments: Sequence[str],
        node: str = "",
    ) -> None:
        """Starts a step of one task for each service, with all that the job has there but GPUs."""
        log = self.log_dir / f"{what}.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_JOB)}
        command = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--quiet", f"--job-name={what}")
        own = ("--overlap", "--mem=0", "--cpu-bind=none", *more)
        program = (sys.executable, "-m", "penstock.launchers.node", str(self._orders / what), *arguments)
        with os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                *own,
                *program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is ours
            )
        step = _Step(what, kind, names, process, log, node)
        if self._stopping:  # a start elsewhere that `remove` has not seen
            await _ended(process)
            return
        self._steps.append(step)
        self._following.start(self._follow(step), f"penstock-slurm-{what}")

    async def _follow(self, step: _Step) -> None:
        """Sends a step's tasks the members, and follows their reports, until the step ends."""
        telling = asyncio.create_task(self._tell(step), name=f"penstock-slurm-{step.what}-members")
        try:
            await self._read(step)
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        code = await step.process.wait()
        self._steps.remove(step)
        if self._stopping or await self._started_elsewhere(step, code):
            return
        tail = await asyncio.to_thread(_tail, step.log)
        for name in step.names:
            text = f"The Slurm step of {step.what}, which had {name}, ended with exit code {code}. {tail}"
            self.lost_for_good(name, step.kind, StackFailed(text, reason="SLURM_STEP_ENDED"))

    async def _started_elsewhere(self, step: _Step, code: int) -> bool:
        """Starts a step's service on another node, if it was ready once, has not failed, and did not end too often."""
        name, kind = step.what, step.kind
        if not step.node or not self.was_ready(name, kind):
            return False
        pause = self._ends.setdefault(name, Deaths()).pause()
        if pause is None:
            return False
        self.left(name, kind)
        await asyncio.sleep(pause)
        node = await self._node_for(step)
        if not self._stopping:
            text = "the Slurm step of %s on %s ended with exit code %d: it starts again on %s"
            _log.warning(text, name, step.node, code, node)
            await self._start_alone(name, kind, node, self._ends[name].total)
        return True

    async def _node_for(self, lost: _Step) -> str:
        """Returns the node in use with the fewest steps, this one only where there is no other.

        A shell on a login node is on no node of the job: for it the lost node is the last resort.
        """
        listed: Sequence[SlurmNode] = ()
        with suppress(ConfigurationError):  # then `srun` says so of the next step
            listed = await nodes_of_job()
        here = os.environ.get(NODE_VARIABLE, "")
        taken = [step.node for step in self._steps]
        usable = [node.name for node in listed if node.usable and node.name not in (here, lost.node)]
        return min(usable, key=taken.count, default=here or lost.node)

    async def _tell(self, step: _Step) -> None:
        if step.kind == "sandbox" or step.process.stdin is None:
            return
        async with aclosing(self.member_lists()) as changes:
            async for members in changes:
                with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `_follow` handles
                    step.process.stdin.write(members + b"\n")
                    await step.process.stdin.drain()

    async def _read(self, step: _Step) -> None:
        if step.process.stdout is None:
            raise AssertionError("started with a pipe")
        async for line in step.process.stdout:
            with suppress(orjson.JSONDecodeError):
                found = orjson.loads(line)
                if found.get("event") == "ready":
                    self.joined(found["name"], found["service"], found["address"])
                elif found.get("event") == "failed":
                    self.gave_up(found["name"], found["service"], found["error"])


async def _ended(step: asyncio.subprocess.Process) -> None:
    """Ends a step: by the end of its input, at last by a signal."""
    if step.stdin is not None:
        step.stdin.close()
    for end in (step.terminate, step.kill):
        try:
            async with asyncio.timeout(_STOP_S):
                await step.wait()
            return
        except TimeoutError:
            _log.warning("a Slurm step did not end within %.0f s and is ended", _STOP_S)
            with suppress(ProcessLookupError):
                end()
    await step.wait()


def _tail(log: Path) -> str:
    """Returns the end of a step's log, for an error."""
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"Its log ({log}) ends with:\n{text}" if text else f"Its log ({log}) is empty."
