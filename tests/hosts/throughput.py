"""The same load for each sandbox service, of one and of three; the same calls in flight at each gate, one or two.

Agents sleep, so that hosts which share two cores can show what the services between them add.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
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
"""Times one gate's CPU for a call that each of two may take."""
_ENVIRONMENTS: Final = 4
"""Prepared states for each host."""
_PROBE_S: Final = 0.5
_CALLS_OF_ROLLOUT: Final = 32
_ROUNDS: Final = 4
_BODY: Final[dict[str, Any]] = {"model": "any", "messages": [{"role": "user", "content": "Which number is it?"}]}


@dataclass(frozen=True)
class Load:
    """What a fleet gets: rollouts at once for each host, how often, an agent's sleep, calls in flight at each gate."""

    per_host: int
    times: int
    work_s: float
    calls: int


@dataclass
class Reading:
    """What one fleet gave."""

    hosts: int
    gates: int
    rollouts_per_s: float = 0.0
    create_ms: float = 0.0
    call_ms: dict[str, float] = field(default_factory=dict)
    """CPU of a call, by gate."""
    failures: list[str] = field(default_factory=list)


async def read(fleet: Fleet, load: Load) -> Reading:
    """Measure a fleet."""
    made = Reading(fleet.size.sandboxes, fleet.size.gates)
    await _rollouts(fleet, load, made)
    await _calls(fleet, load, made)
    return made


async def _rollouts(fleet: Fleet, load: Load, made: Reading) -> None:
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


async def _probe(ps: Penstock, creates: list[float]) -> None:
    """Creates a sandbox now and then, and notes how long that took."""
    while True:
        began = time.monotonic()
        async with await ps.sandboxes.create():
            creates.append(time.monotonic() - began)
        await asyncio.sleep(_PROBE_S)


async def _calls(fleet: Fleet, load: Load, made: Reading) -> None:
    """All calls are in flight before the first is answered, `_ROUNDS` times; the first time is not counted."""
    gates = fleet.size.names("interception")
    trusted = ssl.create_default_context(cafile=str(fleet.folder / "credentials" / "ca.pem"))
    reply = world.replies(fleet.folder / "model")[-1]
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        rollouts, sessions = [], []
        for gate in gates:
            ps = await stack.enter_async_context(connect(fleet.endpoints(gate=gate, discover=False)))
            sessions.append(await stack.enter_async_context(ps.intercept(run_id="calls", credits=load.calls)))
            opened = [await ps.gate.open(run_id="calls") for _ in range(load.calls // _CALLS_OF_ROLLOUT)]
            rollouts += [await stack.enter_async_context(one) for one in opened]
        await _round(http, rollouts, sessions, load.calls, reply)
        before = dict(_cpu(fleet, gates))
        for _ in range(_ROUNDS):
            await _round(http, rollouts, sessions, load.calls, reply)
        made.call_ms = {gate: 1e3 * (cpu - before[gate]) / (_ROUNDS * load.calls) for gate, cpu in _cpu(fleet, gates)}


async def _round(
    http: aiohttp.ClientSession,
    rollouts: list[GateRolloutHandle],
    sessions: list[InterceptSession],
    each: int,
    reply: Any,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        for rollout in rollouts:
            for _ in range(_CALLS_OF_ROLLOUT):
                tasks.create_task(_ask(http, rollout))
        async with asyncio.TaskGroup() as leasing:
            leased = [leasing.create_task(_lease(session, each)) for session in sessions]
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


def _cpu(fleet: Fleet, gates: list[str]) -> Iterator[tuple[str, float]]:
    for gate in gates:
        (process,) = fleet.network.hosts[gate].processes
        yield gate, processes.cpu(process.pid).own


def lines(one: Reading, several: Reading) -> list[str]:
    """The report, for people."""
    return [f"hosts, gates        {one.hosts} and {several.hosts}, {one.gates} and {several.gates}"] + [
        f"{name:<20}{before:.2f} and {after:.2f} {unit}, ratio {after / before:.2f}"
        for name, before, after, unit in (
            ("rollouts", one.rollouts_per_s, several.rollouts_per_s, "/s"),
            ("create, p50", one.create_ms, several.create_ms, "ms"),
            ("CPU of a call", _most(one), _most(several), "ms at a gate"),
        )
    ]


def faults(one: Reading, several: Reading) -> list[str]:
    """Everything that is not as it must be."""
    found = [*one.failures, *several.failures]
    if several.rollouts_per_s < LEAST * one.rollouts_per_s:
        found.append(f"{several.hosts} hosts gave less than {LEAST} times the rollouts of one")
    if several.create_ms > CREATE_MOST * one.create_ms:
        found.append(f"a create took more than {CREATE_MOST} times as long")
    if _most(several) > CALL_MOST * _most(one):
        found.append(f"a gate took more than {CALL_MOST} times the CPU for a call")
    return found


def _most(reading: Reading) -> float:
    return max(reading.call_ms.values())
