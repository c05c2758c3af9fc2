"""Rollouts of the `shell` agent in gate mode, against the same agent program without Penstock, in one run.

Without Penstock means: a temporary directory, the agent as a plain subprocess that talks to a small HTTP server with
the same replies, and the same verifier command. Both do the same three model calls and two commands.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from typing import Final

from benchmarks import processes, world
from benchmarks.report import Row, Section, percentile
from benchmarks.timing import milliseconds, timed
from penstock.client import (
    Command,
    GroupHandle,
    InterceptSession,
    ModelCall,
    Phase,
    RewardFrom,
    RolloutResult,
    Task,
    Verifier,
)

LEVELS: Final = {1: 8, 8: 32, 32: 64, 64: 64}
"""Rollouts by how many run at once."""
STEPS: Final = 3
"""Steps of 8 groups of 8, of which the best and the middle one are told."""
GROUPS: Final = (8, 64)
GROUP_RUNS: Final = 3
"""Groups of each size, of which the best is told, here and without."""
ALONE: Final = 40
"""Rollouts one after another, for what the driver adds to one."""
INSTRUCTION: Final = "Copy the word in note.txt to out.txt"
CHECK: Final = f'test "$(cat out.txt)" = {world.NOTE}'
PYTHON: Final = "/usr/bin/python3"


async def measure(place: Path) -> list[Section]:
    """Rollouts per second at each level with and without, the CPU time of one by part, what the driver adds to an
    agent's own time, groups beside bare agents, and a step of the demo."""
    rows: list[Row] = []
    plain = {}
    bare = {}
    async with plain_agents(place) as run:
        for size in GROUPS:
            bare[size] = await _best(lambda size=size: asyncio.gather(*(run() for _ in range(size))))  # type: ignore[misc]
        for level, count in LEVELS.items():
            plain[level], used = await _level(run, level, count)
            rows.append(Row(f"{level} at once, without Penstock", plain[level], "/s", f"{1e3 * used:.1f} ms CPU each"))
    parts: list[Row] = []
    async with world.scripted(place) as running, running.ps.intercept(labels={"bench": "rollouts"}) as session:
        answering = asyncio.create_task(answer_calls(running, session))
        await _rollout(running)  # the snapshot is made and the codec loaded
        added = await _added(running)
        groups = [await _group(running, size, bare[size]) for size in GROUPS]
        for level, count in LEVELS.items():
            before = running.cpu_s()
            rate, _ = await _level(lambda: _rollout(running), level, count)
            after = running.cpu_s()
            ratio = f"{rate / plain[level]:.2f} of the rate without"
            rows.append(Row(f"{level} at once", rate, "/s", ratio))
            if level == max(LEVELS):
                costs = {name: 1e3 * (after[name] - before[name]) / count for name in after}
                parts += [Row(name, cost, "ms") for name, cost in costs.items()]
                parts.append(Row("sum", sum(costs.values()), "ms"))
        steps = []
        before = running.cpu_s()
        for index in range(STEPS):
            began = time.perf_counter()
            await _step(running, index)
            steps.append(time.perf_counter() - began)
        after = running.cpu_s()
        costs_of_step = sum(after[name] - before[name] for name in after) / STEPS
        session.finish()
        await answering
    step = [
        Row("best", min(steps), "s"),
        Row("middle", sorted(steps)[len(steps) // 2], "s"),
        Row("CPU", costs_of_step, "s", "all parts, the agents included"),
    ]
    return [
        Section("Rollouts per second: shell agent, gate mode, 3 calls and 2 commands each", rows),
        Section(f"CPU time of one rollout, {max(LEVELS)} at once, by part", parts),
        Section("One rollout after another: what is added to the agent's own time", added),
        Section("Groups, from the creating call to the last result, beside as many bare agents at once", groups),
        Section("A step: 8 groups of 8 rollouts", step),
    ]


async def answer_calls(running: world.World, session: InterceptSession) -> None:
    """A trainer: each call is answered with what the inference service samples."""

    async def answer(call: ModelCall) -> None:
        completion = await running.ps.inference.generate(
            call.prompt_token_ids, call.sampling, session_id=call.rollout_id
        )
        await call.deliver(completion)

    async with asyncio.TaskGroup() as tasks:
        async for call in session.calls():
            tasks.create_task(answer(call))


def task(index: int = 0) -> Task:
    """The task; each index is prepared by itself."""
    verifier = Verifier(
        commands=[Command(shell=f"{CHECK} && echo 1 > $PENSTOCK_REWARD_FILE || echo 0 > $PENSTOCK_REWARD_FILE")],
        reward=RewardFrom.FILE,
    )
    setup = [Command(shell=f"echo {world.NOTE} > note.txt; : {index}")]
    return Task(task_id=f"copy-{index}", instruction=INSTRUCTION, setup=setup, verifier=verifier)


async def _rollout(running: world.World) -> None:
    handle = await running.ps.rollouts.create(task(), "shell", labels={"bench": "rollouts"})
    _check(await handle.result())
    trajectory = await handle.trajectory(samples_only=True)
    if not trajectory.samples:
        raise RuntimeError(f"rollout {handle.rollout_id} has no samples")


async def _step(running: world.World, index: int) -> None:
    async def group(number: int) -> None:
        handle: GroupHandle = await running.ps.groups.create(
            task(number), "shell", 8, labels={"bench": "rollouts", "step": str(index)}
        )
        for result in await handle.results():
            _check(result)

    await asyncio.gather(*map(group, range(8)))


async def _added(running: world.World) -> list[Row]:
    """Wall time of a rollout without that of its agent's process, and what of it went by in which phase."""
    walls, agents = list[float](), list[float]()
    phases: dict[Phase, list[float]] = {}
    for _ in range(ALONE):
        began = time.perf_counter()
        handle = await running.ps.rollouts.create(task(), "shell", labels={"bench": "rollouts"})
        result = await handle.result()
        walls.append(time.perf_counter() - began)
        _check(result)
        agents.append(result.outcome.agent_exit.duration if result.outcome.agent_exit else 0.0)
        for phase, seconds in result.rollout.phase_times.items():
            phases.setdefault(phase, []).append(seconds)
    added = [wall - agent for wall, agent in zip(walls, agents, strict=True)]
    outside = [seconds - agent for seconds, agent in zip(phases[Phase.RUNNING], agents, strict=True)]
    return [
        *milliseconds("added", added, f"to the agent's own {1e3 * percentile(agents, 0.5):.0f} ms"),
        *milliseconds("the whole rollout", walls),
        *(
            Row(f"in phase {phase}, p50", 1e3 * percentile(seconds, 0.5), "ms")
            for phase, seconds in phases.items()
            if phase is not Phase.RUNNING
        ),
        Row("in phase running outside the agent, p50", 1e3 * percentile(outside, 0.5), "ms"),
    ]


async def _group(running: world.World, size: int, bare_s: float) -> Row:
    async def group() -> None:
        handle = await running.ps.groups.create(task(), "shell", size, labels={"bench": "rollouts"})
        for result in await handle.results():
            _check(result)

    took = await _best(group)
    return Row(f"group of {size}", took, "s", f"{took / bare_s:.1f} of the {bare_s:.2f} s of {size} bare agents")


async def _best(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds of the best of some runs."""
    times: list[float] = []
    for _ in range(GROUP_RUNS):
        await timed(times, work)
    return min(times)


def _check(result: RolloutResult) -> None:
    reward = result.outcome.reward
    if reward is None or reward.value != 1.0:
        raise RuntimeError(f"rollout {result.rollout_id} went wrong: {result.outcome}")


async def _level(run: Callable[[], Awaitable[None]], at_once: int, count: int) -> tuple[float, float]:
    """Rollouts per second, and the CPU seconds of one in our own ended children."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await run()

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    elapsed = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return count / elapsed, used / count


# The same without Penstock -------------------------------------------------------------------------------------------


@asynccontextmanager
async def plain_agents(place: Path) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Yields what runs one agent in a directory of its own, and verifies what it did."""
    spec = find_spec("penstock_driver")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("penstock_driver is not installed")
    agents = Path(spec.submodule_search_locations[0]) / "agents" / "catalog"
    for name, source in (
        ("bin/shell-agent", "shell_agent_main.py"),
        ("lib/shell_agent.py", "shell_agent.py"),
        ("lib/shell_agent_endpoint.py", "shell_agent_endpoint.py"),
    ):
        (place / name).parent.mkdir(exist_ok=True)
        copyfile(agents / source, place / name)
    async with http_server() as (port, _):

        async def run() -> None:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                await _plain(place, Path(folder), port)

        await run()  # leaves the compiled module behind
        yield run


async def _plain(place: Path, folder: Path, port: int) -> None:
    (folder / "note.txt").write_text(f"{world.NOTE}\n", "utf-8")
    (folder / "instruction.md").write_text(INSTRUCTION, "utf-8")
    config = {
        "base_url": f"http://127.0.0.1:{port}/v1",
        "key": "none",
        "model": "policy",
        "instruction_file": str(folder / "instruction.md"),
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    cache = f"pycache_prefix={place}/cache"
    argv = [PYTHON, "-I", "-S", "-X", cache, str(place / "bin/shell-agent"), str(folder / "config.json")]
    agent = await asyncio.create_subprocess_exec(*argv, cwd=folder, stdout=asyncio.subprocess.PIPE)
    await agent.communicate()
    verifier = await asyncio.create_subprocess_exec("bash", "-c", CHECK, cwd=folder)
    if agent.returncode or await verifier.wait():
        raise RuntimeError("an agent without Penstock went wrong")


@asynccontextmanager
async def http_server(*arguments: str) -> AsyncIterator[tuple[int, int]]:
    """The constant server as a process of its own: its port and its process id."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.constant_server", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        yield int(await server.stdout.readline()), server.pid
    finally:
        with suppress(ProcessLookupError):
            server.terminate()
        await server.wait()


def server_cpu_s(pid: int) -> float:
    """CPU seconds of a server so far."""
    return processes.cpu(pid).own
