"""Many rollouts at once, without their agents' cost: what the services need for each, and what a kill loses.

Drivers, gates, streams and journals are real. Sandboxes are null: a command ends at once, and an agent is a coroutine
of another process that calls the gate. The model answers each call after 10 s, and the first calls not before all
agents wait, when memory is read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import processes
from benchmarks import world as demo
from benchmarks.gate.programs import Program, running
from benchmarks.report import Row, Section
from benchmarks.scale import load, null_backend, world
from benchmarks.scale.table import Costs, table
from benchmarks.timing import milliseconds
from penstock.client import Penstock, Unavailable, connect
from penstock.local.stack import LocalStack

ROLLOUTS: Final = 10_000
LATENCY_S: Final = 10.0
WAITING_S: Final = 10.0
"""How long all wait, for the CPU of that."""
WARM: Final = 100
"""Rollouts before anything is read: codecs, allocators, caches."""
START_S: Final = 420.0
START_EACH_S: Final = 0.2
"""Guard on the start of all rollouts: so much, and so much for each."""
START, WAIT, END = (0, 1), (1, 2), (2, 3)
"""Moments at which CPU is read: before all begin, when all wait, before the first answer, after the last end."""
LOOK_S: Final = 0.2
KILL_LOOK_S: Final = 0.02
BACK_S: Final = 120.0
"""Guard on the return of services that were killed, and on the release of what their rollouts held."""
SERVICES: Final = ("driver", "sandbox", "interception")
_LEAST_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run; `kill` are services, killed one after the other while the rollouts end.

    `running`: the driver's slots; None = one for each.
    """

    rollouts: int = ROLLOUTS
    latency_s: float = LATENCY_S
    waiting_s: float = WAITING_S
    kill: Sequence[str] = ()
    running: int | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The running services, the agents, and a client."""

    stack: LocalStack
    agents: Program
    ps: Penstock
    model: Path

    def pids(self) -> Mapping[str, int]:
        """Process ids by service; a restarted one has another."""
        pids: dict[str, int] = {}
        for pid in processes.children(os.getpid()):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                pids[demo.pid_name(pid)] = pid
        return {name: pids[name] for name in SERVICES if name in pids}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by service."""
        return {name: processes.cpu_s(pid) for name, pid in self.pids().items()}

    def resident(self) -> dict[str, int]:
        """Bytes by service."""
        return {name: processes.resident_bytes(pid) for name, pid in self.pids().items()}


@asynccontextmanager
async def fleet(place: Path, plan: Plan) -> AsyncIterator[Fleet]:
    """The services with null sandboxes in the empty directory `place`."""
    demo.raise_open_files()
    plugins, socket = place / "plugins", place / "agents.sock"
    null_backend.register(plugins)
    model = demo.write_demo_model(place / "model")
    most = plan.rollouts + WARM
    stack = LocalStack(
        model_dir=model,
        engine="scripted",
        engine_options={"script": str(_script(place))},
        state_dir=place / "state",
        settings={
            "driver": {"max_running": plan.running or max(plan.rollouts, WARM), "max_queued": 2 * most},
            "sandbox": {
                "default_backend": null_backend.NAME,
                "max_sandboxes": 3 * most,
                "max_queued": 3 * most,
                "min_free_bytes": 0,
            },
            "interception": {
                "max_rollouts": 3 * most,
                "max_connections": 65_536,
                "max_peer_connections": 65_536,
            },
        },
    )
    argv = (sys.executable, "-m", "benchmarks.scale.agents")
    async with running("the agents", argv, socket=str(socket), calls=world.CALLS) as agents:
        with _environment(
            {
                null_backend.SOCKET: str(socket),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH")])),
            }
        ):
            async with stack, connect(stack.endpoints) as ps:
                yield Fleet(stack, agents, ps, model)


@dataclass(slots=True)
class Figures:
    """What was read: seconds, CPU by service at four moments, bytes by service at two."""

    plan: Plan
    start_s: float = 0.0
    end_s: float = 0.0
    cpu: list[dict[str, float]] = field(default_factory=list)
    small: dict[str, int] = field(default_factory=dict)
    large: dict[str, int] = field(default_factory=dict)
    calls_s: list[float] = field(default_factory=list)
    """Of each call but the first of an agent, what it took beside the model's time."""
    probes_s: list[float] = field(default_factory=list)
    lost: list[Row] = field(default_factory=list)
    """After kills."""

    def cpu_s(self, begin: int, end: int) -> dict[str, float]:
        """CPU seconds between two of the moments."""
        return {name: self.cpu[end][name] - self.cpu[begin][name] for name in SERVICES}

    def cpu_ms(self) -> dict[str, float]:
        """CPU of one rollout by service, without the wait."""
        start, end = self.cpu_s(*START), self.cpu_s(*END)
        return {name: 1e3 * (start[name] + end[name]) / self.plan.rollouts for name in SERVICES}

    def waiting_kb(self) -> dict[str, float]:
        """Memory of one rollout that awaits its model by service."""
        return {name: (self.large[name] - self.small[name]) / self.plan.rollouts / 1e3 for name in SERVICES}


async def measure(place: Path, plan: Plan = Plan()) -> list[Section]:
    """The cost of a rollout by service, and what kills lose."""
    return sections(await figures(place, plan))


async def measure_table(place: Path, plan: Plan = Plan()) -> list[Section]:
    """The same, and what a fleet needs by it."""
    found = await figures(place, plan)
    # A rollout's opening and its first call: more than a call, and all that is in a gate's part of the start.
    gate_ms = 1e3 * found.cpu_s(*START)["interception"] / plan.rollouts
    costs = Costs(found.cpu_ms(), found.waiting_kb(), gate_ms)
    return [*sections(found), table(costs)]


async def figures(place: Path, plan: Plan) -> Figures:
    """Runs all of it. RuntimeError when a rollout is lost or ends wrongly."""
    if processes.available_bytes() < _LEAST_BYTES + 400_000 * plan.rollouts:
        raise RuntimeError("not enough memory is free for so many rollouts: use --rollouts")
    async with (
        fleet(place, plan) as run,
        run.ps.intercept(credits=2 * plan.rollouts + 64, credit_bytes=1 << 30) as session,
    ):
        model = load.Model(session, world.replies(run.model), plan.latency_s)
        answering = asyncio.create_task(model.answer_all())
        found = await _read(run, model, plan)
        session.finish()
        await answering
    return found


async def _read(run: Fleet, model: load.Model, plan: Plan) -> Figures:
    model.latency_s = 0.0
    await _warm(run, model)
    model.latency_s = plan.latency_s
    model.hold()
    warm_calls = len((await run.agents.tell("calls"))["calls_s"])
    ends, found = load.Ends(), Figures(plan, small=run.resident(), cpu=[run.cpu_s()])
    began = time.monotonic()
    groups = load.begin(run.ps, plan.rollouts, ends)
    await load.all_wait(run.agents, plan.rollouts, groups, ends, START_S + START_EACH_S * plan.rollouts)
    found.start_s, found.large = time.monotonic() - began, run.resident()
    found.cpu.append(run.cpu_s())
    await asyncio.sleep(plan.waiting_s)
    found.cpu.append(run.cpu_s())
    probing = asyncio.create_task(load.probe(run.ps, found.probes_s))
    released = time.monotonic()
    model.free(found.start_s)
    killed = await _ended(run, model, groups, ends, plan)
    found.end_s = time.monotonic() - released
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    said = await run.agents.tell("calls")
    found.calls_s = [one - plan.latency_s for one in said["calls_s"][warm_calls:]]
    if plan.kill:
        found.lost = await _lost(run, ends, killed)
    elif ends.wrong or ends.again:
        raise RuntimeError(f"{len(ends.wrong)} rollouts ended wrongly: {ends.wrong[:3]}")
    found.cpu.append(run.cpu_s())
    return found


def sections(found: Figures) -> list[Section]:
    """The tables."""
    plan, calls, probes = found.plan, found.calls_s, found.probes_s
    title = (
        f"{plan.rollouts} rollouts at once, null sandboxes, a model of {plan.latency_s:g} s, {world.CALLS} calls each"
    )
    speed = [
        Row("start, to the last one's first call", plan.rollouts / found.start_s, "/s", f"in {found.start_s:.0f} s"),
        Row("end, from the first answer", plan.rollouts / found.end_s, "/s", f"in {found.end_s:.0f} s, with the model"),
        *milliseconds("a call beside the model's time", calls, f"of {len(calls)}"),
        *milliseconds("a request to the driver meanwhile", probes, f"of {len(probes)}"),
    ]
    if plan.kill:
        return [Section(title, [*speed, *found.lost])]
    start, end, waiting = found.cpu_s(*START), found.cpu_s(*END), found.cpu_s(*WAIT)
    each = 1e3 / plan.rollouts
    return [
        Section(title, speed),
        Section(
            "CPU time of one rollout, by service",
            [
                *_each(
                    found.cpu_ms(), "ms", lambda name: f"start {each * start[name]:.1f}, rest {each * end[name]:.1f}"
                ),
                *(
                    Row(f"{name}, while it awaits its model", 1e3 * each * waiting[name] / plan.waiting_s, "us/s")
                    for name in SERVICES
                ),
            ],
        ),
        Section(
            "Memory of one rollout that awaits its model, by service",
            _each(found.waiting_kb(), "KB"),
        ),
    ]


async def _warm(run: Fleet, model: load.Model) -> None:
    model.hold()
    warming = load.begin(run.ps, WARM, ends := load.Ends())
    await load.all_wait(run.agents, WARM, warming, ends, START_S)
    model.free(0.0)
    await asyncio.gather(*warming)


def _each(values: Mapping[str, float], unit: str, note: Callable[[str], str] = lambda _: "") -> list[Row]:
    rows = [Row(name, value, unit, note(name)) for name, value in values.items()]
    return [*rows, Row("sum", sum(values.values()), unit)]


async def _ended(
    run: Fleet, model: load.Model, groups: Sequence[asyncio.Task[None]], ends: load.Ends, plan: Plan
) -> list[str]:
    """Waits for all groups; kills one service after the other, at even shares of the calls that are left to come.

    A service is killed when those before it are back. The result names it, with the number of rollouts that had ended.
    """
    killed: list[str] = []
    before, left = model.calls, plan.rollouts * (world.CALLS - 1)
    whole = asyncio.gather(*groups)
    while not whole.done():
        await asyncio.wait([whole], timeout=KILL_LOOK_S if plan.kill else LOOK_S)
        share = (len(killed) + 1) / (len(plan.kill) + 1)
        pids = run.pids()
        if len(killed) < len(plan.kill) and len(pids) == len(SERVICES) and model.calls - before >= left * share:
            name = plan.kill[len(killed)]
            os.kill(pids[name], signal.SIGKILL)
            killed.append(f"{name} at {len(ends.ended)}")
    await whole
    return killed


async def settled(run: Fleet) -> tuple[dict[str, bool], list[str]]:
    """Whether each rollout has an end, and what services still hold, once that is nothing; Unavailable after BACK_S."""
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            listed = {one.rollout_id: one.outcome is not None async for one in run.ps.rollouts.list(labels=load.LABELS)}
            left = [sandbox async for sandbox, _ in run.ps.sandboxes.list()]
            left += [one.rollout_id async for one in run.ps.gate.list(open_only=True)]
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        else:
            if not left or time.monotonic() > deadline:
                return listed, left
        await asyncio.sleep(LOOK_S)


async def _lost(run: Fleet, ends: load.Ends, killed: Sequence[str]) -> list[Row]:
    """What is not as it must be after kills, once all services are back. Raises RuntimeError when anything is lost."""
    listed, left = await settled(run)
    lost = ends.accepted - listed.keys()
    unended = [one for one in ends.accepted if not listed.get(one, False)]
    if lost or unended or left or ends.wrong or ends.accepted - ends.ended:
        raise RuntimeError(
            f"lost {len(lost)}, without an end {len(unended)}, "
            f"without a reported end {len(ends.accepted - ends.ended)}, left {len(left)}, "
            f"wrong {len(ends.wrong)}: {ends.wrong[:3]}"
        )
    return [
        Row("rollouts that ended with their reward", ends.done, "", f"killed: {', '.join(killed)} ended ones"),
        Row("ended without a reward, and created again", ends.again, "", _reasons(ends)),
        Row("lost, without an end, ended wrongly, or left behind", 0, ""),
    ]


def _reasons(ends: load.Ends) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in ends.by_reason.most_common() if reason)


def _script(place: Path) -> Path:
    """For the engine, which is asked for nothing: the model is a trainer."""
    script = place / "script.json"
    script.write_text('{"strict": false, "turns": [{"reply": "nothing"}]}', "utf-8")
    return script


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of the processes that are started, and restarted, inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
