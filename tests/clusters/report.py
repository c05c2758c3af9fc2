"""What a run on a cluster saw, and what must be true of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters import machines
from tests.hosts.network import Host


@dataclass
class Report:
    """What a run saw. `faults` is what is not as it must be."""

    faults: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print and keep a line."""
        self.lines.append(text)
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def check(self, holds: bool, fault: str) -> None:
        """Record a fault unless it holds."""
        if not holds:
            self.faults.append(fault)


def judge(ends: Path, count: int, report: Report) -> None:
    """Every rollout must have its reward, whatever was lost under it; one whose driver was lost, when created again."""
    found = [json.loads(line) for line in ends.read_text().splitlines()]
    rewards = Counter(str(one.get("reward")) for one in found)
    nodes = Counter(str(one.get("node")) for one in found)
    attempts = Counter(one.get("attempts") for one in found)
    reasons = Counter(one["reason"] for one in found if one["reason"])
    report.say(f"rewards {dict(rewards)}, attempts {dict(attempts)}, nodes {dict(nodes)}, failures {dict(reasons)}")
    for kind in ("driver", "gate"):
        report.say(f"by {kind} {dict(Counter(str(one.get(kind)) for one in found))}")
    created = Counter(why for one in found for why in one["created_again"])
    report.say(f"created again {sum(created.values())} {dict(created)}")
    report.check(set(rewards) == {"1.0"}, f"rewards are {dict(rewards)}, all must be 1")
    report.check(len(found) >= count, f"{len(found)} rollouts have ended, at least {count} must")
    report.check({"n0", "n1", "n2", "n3"} >= set(nodes) and len(nodes) > 1, f"rollouts ran on {dict(nodes)}")


def members_in(folder: Path, kind: str = "sandboxes") -> dict[str, Any]:
    """A membership file of the stack whose state is below `folder`/scratch."""
    (file,) = (folder / "scratch").glob(f"*-head/private/{kind}.json")
    members: dict[str, Any] = json.loads(file.read_text())
    return members


def is_service(pid: int, service: str = "sandbox") -> bool:
    """Whether a process is a service of this kind."""
    return machines.command_of(pid).endswith(f"-m penstock_{service}")


def has_service(host: Host, service: str) -> bool:
    """Whether a machine runs a service of this kind."""
    return any(is_service(pid, service) for pid in machines.processes(host))


def gpus_seen(hosts: Iterable[Host]) -> list[str]:
    """How many GPUs each inference service sees."""
    found = []
    for host in hosts:
        for pid in machines.processes(host):
            if machines.command_of(pid).endswith("-m penstock_inference"):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                seen = next((item for item in variables if item.startswith("CUDA_VISIBLE_DEVICES=")), "")
                found.append(str(len(seen.partition("=")[2].split(","))))
    return found
