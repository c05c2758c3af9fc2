"""The same load for each sandbox service, of one and of three; as many calls at each gate, alone and beside others.

Agents sleep, so that hosts which share two cores can show what the services between them add. The gates of one fleet
take turns: each of them alone, then all at once, and so on. So what else the machine does is in both sides of a ratio.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import aiohttp
from benchmarks import processes
from benchmarks.scale import world
from tests.hosts.fleet import Fleet
from tests.hosts.following import Follower

from penstock.client import GateRolloutHandle, InterceptSession, Penstock, connect

LEAST: Final = 2.7
"""Times the rollouts a second that three hosts must give."""
CREATE_MOST: Final = 1.3
"""Times the median of a create on one host that it may take on one of three."""
CALL_MOST: Final = 1.1
"""Times the CPU for a call that a gate takes alone, which it may take beside others: the median of its turns."""
_ENVIRONMENTS: Final = 4
"""Prepared states for each host."""
_PROBE_S: Final = 0.5
CALLS_OF_ROLLOUT: Final = 32
"""Calls that a rollout has in flight."""
_CONNECTING: Final = 2 * CALLS_OF_ROLLOUT
"""Connections that are opened at once to each gate, which closes those that bring no request in time."""
_KEPT_S: Final = 60.0
"""How long a connection may be idle, of the 75 s after which a gate closes it."""
_BODY: Final[dict[str, Any]] = {"model": "any", "messages": [{"role": "user", "content": "Which number is it?"}]}


@dataclass(frozen=True)
class Load:
    """What a fleet gets: rollouts at once for each host, how often, and an agent's sleep."""

    per_host: int
    times: int
    work_s: float


@dataclass
class Reading:
    """What one fleet gave."""

    hosts: int
    rollouts_per_s: float = 0.0
    create_ms: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass
class Turns:
    """The CPU of a call at each gate, in milliseconds, turn by turn: with all `calls` in flight there."""

    calls: int
    alone: dict[str, list[float]]
    together: dict[str, list[float]]

    def ratios(self, gate: str) -> Sequence[float]:
        """Of a gate's turns beside others to those alone, ascending."""
        pairs = zip(self.alone[gate], self.together[gate], strict=True)
        return sorted(together / alone for alone, together in pairs)


async def rollouts(fleet: Fleet, load: Load) -> Reading:
    """Measure the rollouts of a fleet."""
    made = Reading(fleet.size.sandboxes)
    at_once = load.per_host * made.hosts
    slots = asyncio.Semaphore(at_once)
    creates: list[float] = []
    async with AsyncExitStack() as stack:
        ps = await stack.enter_async_context(connect(fleet.endpoints()))
        node = await stack.enter_async_context(connect(fleet.endpoints(discover=False)))
        follower = Follower(ps, "d0", load.work_s, 1, environments=_ENVIRONMENTS * made.hosts)

        async def one(number: int) -> None:
            async with slots:
                story = follower.begin(number, 0)
                await follower.follow(story)
            if story.reward != 1.0:
                made.failures.append(f"{story.rollout_id}: {story.reason}, reward {story.reward}")

        async def several(numbers: range) -> float:
            began = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(one(number))
            return time.monotonic() - began

        await several(range(at_once))  # every state is prepared
        probing = asyncio.create_task(_probe(node, creates))
        count = at_once * load.times
        made.rollouts_per_s = count / await several(range(at_once, at_once + count))
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    made.create_ms = 1e3 * median(creates)
    return made


async def _probe(ps: Penstock, creates: list[float]) -> None:
    """Creates a sandbox now and then, and notes how long that took."""
    while True:
        began = time.monotonic()
        async with await ps.sandboxes.create():
            creates.append(time.monotonic() - began)
        await asyncio.sleep(_PROBE_S)


async def calls(fleet: Fleet, count: int, turns: int) -> Turns:
    """Measure the gates of a fleet, of which there are several, with `count` calls in flight at each.

    `count` is a multiple of CALLS_OF_ROLLOUT. All connections are there before the first turn.
    """
    gates = fleet.size.names("interception")
    trusted = ssl.create_default_context(cafile=str(fleet.folder / "credentials" / "ca.pem"))
    reply = world.replies(fleet.folder / "model")[-1]
    made = Turns(count, {gate: [] for gate in gates}, {gate: [] for gate in gates})
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(ssl=trusted, limit=0, keepalive_timeout=_KEPT_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        opened: dict[str, _Gate] = {}
        for gate in gates:
            ps = await stack.enter_async_context(connect(fleet.endpoints(gate=gate, discover=False)))
            session = await stack.enter_async_context(ps.intercept(run_id="calls", credits=count))
            handles = [await ps.gate.open(run_id="calls") for _ in range(count // CALLS_OF_ROLLOUT)]
            opened[gate] = _Gate(session, [await stack.enter_async_context(one) for one in handles])
        for some in (*range(_CONNECTING, count, _CONNECTING), count):
            await _round(http, list(opened.values()), some, reply)
        kinds = [[gate] for gate in gates] + [gates]
        for turn in range(turns):
            for busy in kinds if turn % 2 == 0 else reversed(kinds):
                before = _cpu_s(fleet, busy)
                await _round(http, [opened[gate] for gate in busy], count, reply)
                for gate, spent_s in _cpu_s(fleet, busy).items():
                    found = made.together if len(busy) > 1 else made.alone
                    found[gate].append(1e3 * (spent_s - before[gate]) / count)
    return made


@dataclass(frozen=True)
class _Gate:
    """A gate's session, and the rollouts that are open there."""

    session: InterceptSession
    rollouts: Sequence[GateRolloutHandle]


async def _round(http: aiohttp.ClientSession, gates: Sequence[_Gate], count: int, reply: Any) -> None:
    """All calls are in flight before the first is answered."""
    async with asyncio.TaskGroup() as tasks:
        for gate in gates:
            for rollout in gate.rollouts[: count // CALLS_OF_ROLLOUT]:
                for _ in range(CALLS_OF_ROLLOUT):
                    tasks.create_task(_ask(http, rollout))
        async with asyncio.TaskGroup() as leasing:
            leased = [leasing.create_task(_lease(gate.session, count)) for gate in gates]
        for task in leased:
            for call in task.result():
                tasks.create_task(call.deliver(reply))


async def _lease(session: InterceptSession, count: int) -> list[Any]:
    calls: AsyncIterator[Any] = session.calls()
    return [await anext(calls) for _ in range(count)]


async def _ask(http: aiohttp.ClientSession, rollout: GateRolloutHandle) -> None:
    headers = {"authorization": f"Bearer {rollout.token}"}
    url = f"{rollout.base_url('chat_completions')}/chat/completions"
    async with http.post(url, data=json.dumps(_BODY), headers=headers | {"content-type": "application/json"}) as answer:
        answer.raise_for_status()
        await answer.read()


def _cpu_s(fleet: Fleet, gates: Sequence[str]) -> Mapping[str, float]:
    """CPU seconds of the process of each gate so far."""
    return {gate: processes.cpu_s(fleet.network.hosts[gate].processes[-1].pid) for gate in gates}


def lines(one: Reading, several: Reading) -> list[str]:
    """The report on rollouts, for people."""
    return [f"hosts               {one.hosts} and {several.hosts}"] + [
        f"{name:<20}{before:.2f} and {after:.2f} {unit}, ratio {after / before:.2f}"
        for name, before, after, unit in (
            ("rollouts", one.rollouts_per_s, several.rollouts_per_s, "/s"),
            ("create, p50", one.create_ms, several.create_ms, "ms"),
        )
    ]


def faults(one: Reading, several: Reading) -> list[str]:
    """Everything about rollouts that is not as it must be."""
    found = [*one.failures, *several.failures]
    if several.rollouts_per_s < LEAST * one.rollouts_per_s:
        found.append(f"{several.hosts} hosts gave less than {LEAST} times the rollouts of one")
    if several.create_ms > CREATE_MOST * one.create_ms:
        found.append(f"a create took more than {CREATE_MOST} times as long")
    return found


def call_lines(turns: Turns) -> list[str]:
    """The report on calls, for people."""
    report = [
        f"calls               {turns.calls} in flight at each of {len(turns.alone)} gates, CPU of the gate per call"
    ]
    for gate, alone in turns.alone.items():
        ratios = turns.ratios(gate)
        report.append(
            f"{gate:<20}alone {median(alone):.2f} ms, together {median(turns.together[gate]):.2f} ms; "
            f"{len(ratios)} ratios, median {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return report


def call_faults(turns: Turns) -> list[str]:
    """Everything about calls that is not as it must be."""
    return [
        f"{gate} took {median(turns.ratios(gate)):.2f} times the CPU for a call beside others, at most {CALL_MOST}"
        for gate in turns.alone
        if median(turns.ratios(gate)) > CALL_MOST
    ]
