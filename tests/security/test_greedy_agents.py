"""Agents that print and call without end: what is kept of it is bounded, and a neighbour is served all the same.

The amounts are small in the suite; PENSTOCK_FLOODS=full has those of the requirement. With `-s` the full form shows the
99th percentile of a neighbour's calls beside an agent that is as busy and says nothing ("silent"), beside this one
("greedy"), and beside the silent one and plain processes that burn what the services burnt for the greedy one
("burnt"): what any service suffers from so busy a machine. It asserts that the second is within twice the larger of
the others, and is for a machine that does nothing else. The small form runs the greedy agents alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from tests.support.loads.burners import burning
from tests.support.loads.memory import Peak
from tests.support.loads.neighbour import Neighbour, p99
from tests.support.services.stack import Running

from penstock.client import Inference, Mode, Task
from penstock.driver.v1 import agent_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from penstock.sandbox.v1 import toolbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2

SCRIPT = Path(__file__).with_name("greedy_agent.py")
FULL: Final = os.environ.get("PENSTOCK_FLOODS") == "full"
MIB: Final = 1 << 20
GREED: Final = {
    # plain bytes, events, calls, characters of each event's text
    "output": (64 * MIB if FULL else 16 * MIB, 0, 0, 4),
    "events": (0, 1_000_000 if FULL else 100_000, 0, 4),
    "calls": (0, 0, 10_000 if FULL else 200, 4),
}
WATCHED_EVENTS: Final = 1_000_000 if FULL else 2_000
WATCHED: Final = {"watched": (0, WATCHED_EVENTS, 0, 4 if FULL else 600)}
"""Long events where they are few: what counts is how many bytes wait for each watcher."""
KINDS: Final = ("greedy", "silent", "burnt") if FULL else ("greedy",)
"""Agents that are as busy; the output of all but the first goes nowhere, and they run again until as much time is over:
a percentile of few calls is the longest of them. Nothing is compared with the first in the small form."""
SERVICES: Final = ("driver", "interception", "sandbox", "inference")
TURNS: Final = 3 if FULL else 1
KEPT: Final = 128 * MIB
"""Of a rollout in the journal: 32 MiB of its agent's output and as much of its calls, each written twice, since
SQLite has a log of its writes."""
SLOW: Final = 100 if FULL else 50
"""Watchers that do not read, while there are a million events for them together."""
MOST_MEMORY: Final = 128 * MIB
MOST_FOR_WATCHERS: Final = (128 if FULL else 48) * MIB
"""Less than the events of all of them take."""


def spec(kind: str, greed: str) -> agent_pb2.AgentSpec:
    """The greedy agent as anybody may register one."""
    config = Struct()
    config.update({"base_url": "{{base_url}}", "key": "{{api_key}}"})
    said = agent_pb2.EventMapping(
        source=agent_pb2.EventMapping.SOURCE_STDOUT_JSON_LINES,
        rules=[
            agent_pb2.EventRule(
                when="type == 'say'", kind=agent_pb2.AGENT_EVENT_KIND_ASSISTANT, fields={"text": "text"}
            ),
            agent_pb2.EventRule(when="type == 'end'", kind=agent_pb2.AGENT_EVENT_KIND_DONE),
        ],
    )
    return agent_pb2.AgentSpec(
        name=f"{kind}-{greed}",
        version="1",
        toolbox=toolbox_service_pb2.ToolboxSpec(
            runtimes=[toolbox_service_pb2.Runtime(kind=toolbox_service_pb2.RUNTIME_KIND_PYTHON)],
            files=[toolbox_service_pb2.ToolboxFile(path="bin/greedy", content=SCRIPT.read_bytes())],
        ),
        argv=["python3", "{{toolbox}}/bin/greedy", "{{home}}/config.json", kind, *map(str, (GREED | WATCHED)[greed])],
        instruction=agent_pb2.InstructionDelivery(
            method=agent_pb2.InstructionDelivery.METHOD_FILE, path="instruction.md"
        ),
        files=[agent_pb2.ConfigFile(path="config.json", json=config)],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        events=said,
    )


def journal(running: Running) -> int:
    """Bytes of the driver's journal, its log of writes included."""
    files = [path for path in (running.state_dir / "driver").iterdir() if path.name.startswith("driver.db")]
    assert files
    return sum(path.stat().st_size for path in files)


def cpu_s(running: Running) -> dict[str, float]:
    """CPU seconds of each service so far."""
    spent = {}
    for service in SERVICES:
        fields = Path(f"/proc/{running.pid(service)}/stat").read_text().rpartition(")")[2].split()
        spent[service] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


class Spent:
    """What the services spent while a neighbour called: CPU seconds of each, seconds, and rounds of his calls."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(SERVICES, 0.0)
        self.took_s = 0.0
        self.rounds = 0

    def beyond(self, other: Spent) -> Iterable[float]:
        """The share of a core that each service burnt for something else than the rounds, of which `other` had more."""
        for service, cpu in self.cpu_s.items():
            rounds = other.cpu_s[service] / max(other.rounds, 1) * self.rounds
            yield max(cpu - rounds, 0.0) / self.took_s


async def rollout(stack: Running, agent: str, neighbour: Neighbour) -> None:
    """Runs one of these agents to its end; how long the neighbour's calls took meanwhile."""
    handle = await stack.ps.rollouts.create(
        Task(task_id=agent, instruction="Say all."), agent, mode=Mode.TRANSPARENT_PROXY, source=Inference()
    )
    ended = asyncio.create_task(handle.result())
    await neighbour.during(ended)
    outcome = (await ended).outcome
    assert outcome.failure is None, outcome


@pytest.mark.requirement("R96")
@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize("greed", GREED)
async def test_a_greedy_agent_leaves_a_bounded_journal_and_a_neighbour_in_peace(stack: Running, greed: str) -> None:
    """64 MiB of output, a million events, 10,000 calls of one rollout."""
    for kind in KINDS[:2]:
        await stack.ps.agents.register(spec(kind, greed))
    neighbour = Neighbour(stack)
    if FULL:
        await rollout(stack, f"silent-{greed}", neighbour)  # which installs what both need
    spans: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    spent = {kind: Spent() for kind in KINDS}
    for _ in range(TURNS):
        for kind in KINDS:
            before, peak, this = journal(stack), Peak(stack.pid("driver")), spent[kind]
            cpu, began = cpu_s(stack), time.monotonic()
            with burning(spent["greedy"].beyond(spent["silent"]) if kind == "burnt" else ()):
                while True:
                    await rollout(stack, f"{'greedy' if kind == 'greedy' else 'silent'}-{greed}", neighbour)
                    this.rounds += min(map(len, neighbour.took_s.values()))
                    for who, took in neighbour.took_s.items():
                        spans[kind].setdefault(who, []).extend(took)
                    took_s = time.monotonic() - began
                    if not FULL or this.took_s + took_s >= spent["greedy"].took_s:
                        break
            this.took_s += took_s
            for service, now in cpu_s(stack).items():
                this.cpu_s[service] += now - cpu[service]
            grown, memory = journal(stack) - before, peak.grown()
            told = {service: round(cpu, 1) for service, cpu in this.cpu_s.items()}
            print(f"\n{kind}-{greed}: journal {grown >> 10} KiB, memory {memory >> 20} MiB, CPU so far {told}")
            assert grown <= KEPT and memory < MOST_MEMORY
    if not FULL:
        return
    greedy, silent, burnt = ({who: p99(took) for who, took in spans[kind].items()} for kind in KINDS)
    for who in silent:
        counts = ", ".join(f"{len(spans[kind][who])} {kind}" for kind in KINDS)
        print(
            f"{who}: p99 silent {silent[who] * 1e3:.1f}, greedy {greedy[who] * 1e3:.1f}, burnt {burnt[who] * 1e3:.1f}"
            f" ms ({counts}); greedy/silent {greedy[who] / silent[who]:.2f},"
            f" greedy/burnt {greedy[who] / burnt[who]:.2f}"
        )
    assert all(greedy[who] <= 2 * max(silent[who], burnt[who]) for who in silent)


@pytest.mark.requirement("R96")
async def test_watchers_that_stop_reading_cost_no_memory_and_block_nobody(stack: Running) -> None:
    """Each of them holds what the connection's window does, and no more."""
    await stack.ps.agents.register(spec("greedy", "watched"))
    handle = await stack.ps.rollouts.create(
        Task(task_id="watched", instruction="Say all."),
        "greedy-watched",
        mode=Mode.TRANSPARENT_PROXY,
        source=Inference(),
    )
    await handle.result()
    metadata = (("authorization", f"Bearer {stack.stack.operator_token}"),)
    peak = Peak(stack.pid("driver"))
    async with grpc.aio.insecure_channel(stack.stack.address("driver")) as channel:
        stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        request = rollout_service_pb2.WatchRolloutRequest(rollout_id=handle.rollout_id)
        watches = [stub.WatchRollout(request, metadata=metadata) for _ in range(SLOW)]
        for watch in watches:
            await watch.read()
        events = sum([1 async for _ in handle.events()])
        # A driver keeps 50,000 of a rollout's events.
        assert events >= (40_000 if FULL else 1_600)
        assert peak.grown() < MOST_FOR_WATCHERS
        for watch in watches:
            watch.cancel()
