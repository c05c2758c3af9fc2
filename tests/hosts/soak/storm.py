"""Losses at random moments: SIGKILL of services, spawners, agents and the trainer; hosts that are cut or without power.

One thing is lost at a time. Processes are started again at once, hosts are back on their disks after a while, and not
before `penstock doctor --live` has named them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.hosts import left
from tests.hosts.fleet import ROOT, Fleet
from tests.hosts.records import Lost
from tests.hosts.soak.plan import TRAINER_HOST, Plan
from tests.support.services.restarting import spawner_if_any

from penstock.cli.commands.doctor.live import examine
from penstock.client import PenstockError

_BACK_S: Final = (8.0, 20.0)
"""How long a host is away, at least."""
_LOOK_S: Final = 0.3
_KINDS: Final = {"service": 4, "host": 3, "link": 3, "spawner": 1, "agent": 1, "trainer": 1}
"""What is lost, and how often of 13."""
_SERVICES: Final = ("sandbox", "interception", "driver", "inference")


@dataclass
class Disturbance:
    """Something that was lost, from `at` until `back`. `name` is a host's."""

    kind: str
    name: str
    at: float
    back: float = 0.0


@dataclass
class Storm:
    """All losses of one run."""

    fleet: Fleet
    plan: Plan
    progress: Callable[[], float]
    """Share of the run that is over."""
    say: Callable[[str], None]
    disturbances: list[Disturbance] = field(default_factory=list)
    hosts: list[Lost] = field(default_factory=list)
    """Hosts that were away, as `truths` has them."""
    named_s: list[float] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    async def blow(self) -> None:
        """Until the calm. Each kind comes once before any comes at random."""
        dice = random.Random(self.plan.seed)
        first = dice.sample(list(_KINDS), len(_KINDS))
        while True:
            await asyncio.sleep(dice.uniform(0.5, 1.5) * self.plan.every_s)
            if not first and self.progress() >= 1 - self.plan.calm:
                return
            kind = first[-1] if first else dice.choices(list(_KINDS), list(_KINDS.values()))[0]
            if await self._lose(kind, dice) and first:
                first.pop()
            elif self.progress() >= 1:
                return  # there is no agent any more

    def counts(self) -> Counter[str]:
        """How often each kind happened, by kind and, of services and hosts, by the service."""
        return Counter(
            f"{one.kind} {self.fleet.kind(one.name)}" if one.kind in ("service", "host", "link") else one.kind
            for one in self.disturbances
        )

    def start_trainer(self) -> None:
        """On its host. It is told what it needs by a file."""
        fleet, host = self.fleet, self.fleet.network.hosts[TRAINER_HOST]
        order = fleet.folder / "trainer.json"
        endpoints = fleet.endpoints()
        addresses = {name: getattr(endpoints, name) for name in _SERVICES}
        order.write_text(
            json.dumps(
                {
                    "addresses": addresses,
                    "token": endpoints.token,
                    "ca": str(fleet.folder / "credentials" / "ca.pem"),
                    "log": str(fleet.answers_file(TRAINER_HOST)),
                }
            )
        )
        order.chmod(0o600)
        host.start_module("tests.hosts.soak.trainer", [str(order)], fleet.folder / f"{TRAINER_HOST}.log", ROOT)

    async def _lose(self, kind: str, dice: random.Random) -> bool:
        """One loss; False if there is nothing of its kind."""
        service = dice.choice([one for one in _SERVICES if kind == "service" or self._has_two(one)])
        name = dice.choice(self.fleet.size.names(service))
        if kind == "spawner":
            name = dice.choice(self.fleet.size.names("sandbox"))
        elif kind == "trainer":
            name = TRAINER_HOST
        lost = Disturbance(kind, name, time.time())
        if kind in ("host", "link"):
            self.disturbances.append(lost)
            await self._host(lost, dice.uniform(*_BACK_S))
        elif await self._process(lost, dice):
            self.disturbances.append(lost)
        else:
            return False
        lost.back = time.time()
        return True

    def _has_two(self, service: str) -> bool:
        return len(self.fleet.size.names(service)) > 1

    async def _process(self, lost: Disturbance, dice: random.Random) -> bool:
        """SIGKILL of one process; False if there is none of its kind."""
        host = self.fleet.network.hosts[lost.name]
        if lost.kind == "spawner":
            spawner = spawner_if_any(host.processes[-1].pid)
            if spawner is None:
                return False
            os.kill(spawner, signal.SIGKILL)
        elif lost.kind == "agent":
            found = [pid for node in self.fleet.size.names("sandbox") for pid in left.processes(node)]
            agents = [pid for pid in found if _is_agent(pid)]
            if not agents:
                return False
            with suppress(ProcessLookupError):  # it has ended
                os.kill(dice.choice(agents), signal.SIGKILL)
        elif lost.kind == "trainer":
            await asyncio.to_thread(host.kill)
            self.start_trainer()
        else:
            await asyncio.to_thread(host.kill)
            self.fleet.spawn(lost.name)
            await self.fleet.serving(lost.name)
        self.say(f"{lost.name}: {lost.kind} is killed")
        return True

    async def _host(self, lost: Disturbance, back_s: float) -> None:
        host = self.fleet.network.hosts[lost.name]
        host.cut()
        away = Lost(lost.name, time.time())
        self.hosts.append(away)
        if lost.kind == "host":
            await asyncio.to_thread(host.kill)
        took = await self._named(lost.name)
        if took is None:
            self.unnamed.append(f"{lost.name} was lost, and `doctor --live` did not name it in {self._patience_s:g} s")
        else:
            self.named_s.append(took)
        await asyncio.sleep(max(0.0, back_s - (time.time() - away.at)))
        host.mend()
        if lost.kind == "host":
            self.fleet.spawn(lost.name)
        away.back = time.time()
        await self.fleet.serving(lost.name)
        named = "not" if took is None else f"after {took:.1f} s"
        self.say(f"{lost.name}: {lost.kind} was lost for {away.back - away.at:.0f} s, named {named}")

    @property
    def _patience_s(self) -> float:
        return max(60.0, self.plan.named_s)

    async def _named(self, name: str) -> float | None:
        """Seconds until `doctor --live` names a lost host; None = it does not."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        others = {service: next(one for one in self.fleet.size.names(service) if one != name) for service in _SERVICES}
        endpoints = self.fleet.endpoints(
            driver=others["driver"],
            gate=others["interception"],
            sandbox=others["sandbox"],
            engine=others["inference"],
        )
        while loop.time() - began < self._patience_s:
            with suppress(PenstockError):
                found = await examine(endpoints)
                if any(name in trouble.subjects for trouble in found.troubles if trouble.reason == "MEMBER_LOST"):
                    return loop.time() - began
            await asyncio.sleep(_LOOK_S)
        return None


def _is_agent(pid: int) -> bool:
    with suppress(OSError):
        return b"shell-agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
