"""What a run on a cluster saw, and what must be true of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.clusters import machines, rollouts
from tests.clusters.load import Load
from tests.hosts import engine, truths
from tests.hosts.left import traces_of
from tests.hosts.network import Host
from tests.hosts.records import Lost, Seen, Story

_HOST: Final = "{host}"


@dataclass
class Report:
    """What a run saw. `faults` is what is not as it must be.

    `losses` are services whose machines are lost, `disturbances` further ones whose processes are.
    """

    faults: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    losses: list[Lost] = field(default_factory=list)
    disturbances: list[Lost] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print and keep a line."""
        self.lines.append(text)
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def check(self, holds: bool, fault: str) -> None:
        """Record a fault unless it holds."""
        if not holds:
            self.faults.append(fault)

    def lost(self, names: Iterable[str]) -> None:
        """Record that the machine of these services is lost now."""
        self.losses += [Lost(name, time.time()) for name in names]

    def ended(self, names: Iterable[str]) -> None:
        """Record that lost services may be there again: work that begins from now on may be their next processes'."""
        for name in names:
            self._last(name).back = time.time()

    def served(self, name: str) -> None:
        """Record that a lost service serves again."""
        self._last(name).served = time.time()

    def away_s(self, name: str) -> float:
        """The seconds since a service was lost."""
        return time.time() - self._last(name).at

    def _last(self, name: str) -> Lost:
        return next(one for one in reversed(self.losses) if one.name == name)


def judge(folder: Path, report: Report, load: Load, places: tuple[str, ...], lost_machines: Collection[str]) -> None:
    """Every truth of `tests.hosts.truths` must hold of what the trainer saw. `places`: all nodes and gates."""
    seen = rollouts.RUNS.validate_json((folder / rollouts.SEEN).read_bytes())
    seen.places = places
    seen.noticed_s, seen.waited_s, seen.home_s = load.noticed_s, load.waited_s, load.home_s
    seen.losses = report.losses
    seen.disturbances = [*report.losses, *report.disturbances]
    seen.wiped = {loss.name: loss.at for loss in report.losses if loss.name.startswith("d")}
    for loss in report.losses:
        loss.running = sum(_ran_at(story, loss) for story in seen.stories)
    logs = {path.stem.removeprefix("answers-"): path for path in folder.glob(answers(folder, "*").name)}
    seen.take_answers(list(logs.values()))
    seen.undisturbed = _undisturbed(seen, [log for name, log in logs.items() if name not in lost_machines])
    nodes = Counter(attempt.node for story in seen.stories for attempt in story.attempts)
    for line in (*truths.lines(seen), f"attempts by node    {dict(sorted(nodes.items()))}"):
        report.say(line)
    report.faults += truths.faults(seen, load.least)
    ended = len(seen.final())
    report.check(ended >= load.rollouts, f"{ended} rollouts have ended, at least {load.rollouts} must")
    report.check(len(nodes.keys() - {""}) > 1, f"rollouts ran on {dict(nodes)}")


def answers(folder: Path, machine: str = _HOST) -> Path:
    """The log of the engines of a machine; the default is what the engine's option is."""
    return folder / f"answers-{machine}.jsonl"


@dataclass(frozen=True)
class Backend:
    """What a sandbox service has on its machine: its directory of sandboxes, and their users."""

    name: str
    local: Path
    users: range


def backends(folder: Path, first_uid: int, uids: int, names: Iterable[str]) -> list[Backend]:
    """Those of the running stack whose state is below `folder`/scratch; the order of the names is that of its nodes."""
    (head,) = (folder / "scratch").glob("*-head")
    stack = head.name.removesuffix("-head")
    return [
        Backend(
            name,
            head.with_name(f"{stack}-sandbox-{name}") / "sandbox" / "local",
            range(first_uid + number * uids, first_uid + (number + 1) * uids),
        )
        for number, name in enumerate(names)
    ]


def traces(of: Iterable[Backend]) -> list[str]:
    """What their sandboxes show to their machines."""
    return [f"{one.name}: {item}" for one in of for item in traces_of(one.local, one.users)]


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


def _ran_at(story: Story, loss: Lost) -> bool:
    """Whether a rollout ran at the lost service."""
    if loss.name.startswith("d"):
        return story.driver == loss.name and story.created <= loss.at < story.ended
    return any(
        loss.name in (one.node, one.gate) and one.began <= loss.at < (one.failed or one.graded or story.ended)
        for one in story.attempts
    )


def _undisturbed(seen: Seen, logs: list[Path]) -> dict[str, list[list[int]]]:
    """Answers of engines that were not lost to calls whose gates were not."""
    lost = {loss.name for loss in seen.losses}
    disturbed = {
        call
        for story in seen.stories
        if any(attempt.gate in lost for attempt in story.attempts)
        for call in seen.sampled.get(story.rollout_id, [])
    }
    return {call: found for call, found in engine.read(logs).items() if call not in disturbed}
