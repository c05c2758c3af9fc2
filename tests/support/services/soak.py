"""A soak: many rollouts on a real stack whose services and agents are killed by a seeded dice, all accounted for.

`python -m tests.support.services.soak --count 1000 --kills 60 --seed 1` runs a long one and prints its account;
tests/faults/test_soak.py runs a short one. Kills come after counts of ended rollouts and not after times, so that a
slow machine is killed as often. Each service is started again on its state. Nothing here depends on the order in which
things happen; what must hold is in `Account.faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from tests.support.policy import bash, once_done, prompt_text, sampled
from tests.support.services.restarting import RestartableStack, Traces, descendants, restartable, spawner_of
from tests.support.services.stack import Running
from tests.support.waiting import eventually_async

from penstock.client import (
    Command,
    Completion,
    Ended,
    Inference,
    LogprobsMode,
    Mode,
    ModelCall,
    PenstockError,
    RewardFrom,
    RolloutHandle,
    RolloutOptions,
    RolloutResult,
    SeedFile,
    Task,
    Verifier,
)
from penstock.client.errors import AlreadyExists, NotFound
from penstock.client.intercept.session import InterceptSession
from penstock.client.transport.endpoints import ServiceName
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect as channel_to

AT_ONCE: Final = 12
GUARD_S: Final = 180.0
"""A rollout that has not ended by then, or a service that does not answer, is a fault and not patience."""
_AWAY: Final = frozenset({"UNREACHABLE", "DRAINING", "SANDBOX_UNREACHABLE", "INTERCEPTION_UNREACHABLE"})
_AWAY_CODES: Final = frozenset({"Unavailable", "DeadlineExceeded", "ResourceExhausted"})
_PAUSE_S: Final = 0.05
_REPLY: Final = once_done(lambda _: bash("bash work.sh"), "The word is copied.")
_SERVICES: Final[tuple[ServiceName, ...]] = ("sandbox", "interception", "driver", "inference")
GROWTH_BYTES: Final = 6 << 20
GROWTH_FILES: Final = 12
"""What a service may have more after the last third of the calm than after the second: allocators and connections."""
GRADED: Final = frozenset({"agent", "timeout", "budget"})

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """`count` rollouts among which `kills` happen, then `calm` more without one, over which nothing may grow."""

    count: int
    kills: int
    calm: int
    seed: int


@dataclass
class Account:
    """What became of everything."""

    plan: Plan
    ends: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[Mapping[str, tuple[int, int]]] = field(default_factory=list)
    """Resident bytes and open files by service, after each third of the calm."""
    seconds: float = 0.0

    def take(self, result: RolloutResult) -> None:
        """One rollout has ended."""
        failure, reward = result.failure, result.reward
        self.attempts[result.rollout.attempts] += 1
        if failure is None:
            self.ends["completed"] += 1
            if reward is None or reward.value != 1.0:
                self.faults.append(f"{result.rollout_id} completed with {reward}")
            return
        self.ends[f"{failure.cause}, caused by {failure.caused_by}: {failure.reason}"] += 1
        if reward is not None and failure.cause not in GRADED:
            self.faults.append(f"{result.rollout_id} was rewarded after {failure}")
        if failure.caused_by is None:
            self.faults.append(f"{result.rollout_id} failed by nobody: {failure}")

    def judge(self) -> None:
        """What only shows when all has ended."""
        total = self.plan.count + self.plan.calm
        if self.ends.total() != total:
            self.faults.append(f"{self.ends.total()} ends of {total} rollouts")
        by_agents = sum(count for end, count in self.ends.items() if end.startswith("agent,"))
        if by_agents > self.killed["agent"]:
            self.faults.append(f"{by_agents} failures of agents, and {self.killed['agent']} were killed")
        _, middle, last = self.memory
        for name, (before, files) in middle.items():
            after, files_after = last[name]
            if after > before + GROWTH_BYTES or files_after > files + GROWTH_FILES:
                self.faults.append(f"{name} grew: {before} to {after} bytes, {files} to {files_after} open files")

    def __str__(self) -> str:
        lines = [f"{self.ends.total()} rollouts in {self.seconds:.0f} s, seed {self.plan.seed}"]
        lines += [f"  killed {what}: {count}" for what, count in sorted(self.killed.items())]
        lines += [f"  {end}: {count}" for end, count in self.ends.most_common()]
        lines += [f"  begun {often} times: {count}" for often, count in sorted(self.attempts.items())]
        for name in self.memory[0]:
            told = ", ".join(f"{size / 2**20:.1f} MiB {files} files" for size, files in (m[name] for m in self.memory))
            lines.append(f"  {name}: {told}")
        lines += [f"  FAULT {fault}" for fault in self.faults]
        return "\n".join(lines)


class Soak:
    """One run of a plan."""

    def __init__(self, running: Running, stack: RestartableStack, plan: Plan) -> None:
        self._running = running
        self._ps = running.ps
        self._stack = stack
        self._plan = plan
        self._dice = random.Random(plan.seed)
        self._traces = Traces(stack)
        self._ended = 0
        self._progress = asyncio.Event()
        self._label = f"soak-{plan.seed}-{os.getpid()}"
        self.account = Account(plan)

    async def run(self) -> Account:
        """All of it."""
        began = time.monotonic()
        async with self._ps.intercept(labels={"soak": self._label}) as session:
            trainer = asyncio.ensure_future(self._train(session))
            chaos = asyncio.ensure_future(self._kill_now_and_then())
            try:
                await self._rollouts(0, self._plan.count)
                await chaos
                third, first = self._plan.calm // 3, self._plan.count
                for part in (third, third, self._plan.calm - 2 * third):
                    await self._rollouts(first, part)
                    self._measure()
                    first += part
            finally:
                for task in (trainer, chaos):
                    task.cancel()
                await asyncio.wait([trainer, chaos])
        await self._look_for_leaks()
        self.account.judge()
        self.account.seconds = time.monotonic() - began
        return self.account

    # Rollouts ---------------------------------------------------------------------------------------------------------

    async def _rollouts(self, first: int, count: int) -> None:
        numbers = iter(range(first, first + count))
        plans = {number: self._options() for number in range(first, first + count)}

        async def worker() -> None:
            for number in numbers:
                await self._rollout(number, *plans[number])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(worker())

    def _options(self) -> tuple[Task, RolloutOptions]:
        options: RolloutOptions = {"labels": {"soak": self._label}, "max_attempts": self._dice.choice((1, 1, 2, 4))}
        if self._dice.random() < 0.4:
            options["mode"], options["source"] = Mode.TRANSPARENT_PROXY, Inference()
        return task(self._dice.randrange(4)), options

    async def _rollout(self, number: int, work: Task, options: RolloutOptions) -> None:
        rollout_id = f"{self._label}-{number}"
        handle = await insisting(lambda: self._create(rollout_id, work, options), f"creating {rollout_id}")
        try:
            async with asyncio.timeout(GUARD_S):
                result = await insisting(handle.result, f"the result of {rollout_id}")
                sequences = await insisting(lambda: self._sequences(handle), f"the events of {rollout_id}")
        except TimeoutError:
            self.account.faults.append(f"{rollout_id} has not ended: {await handle.refresh()}")
        else:
            self.account.take(result)
            if sequences != list(range(1, result.rollout.last_sequence + 1)):
                self.account.faults.append(f"{rollout_id} has the events {sequences}")
            await insisting(handle.delete, f"deleting {rollout_id}")
        self._ended += 1  # or the kills that wait for it never come
        if self._ended % 100 == 0:
            print(f"{self._ended} have ended", file=sys.stderr, flush=True)
        self._progress.set()

    async def _create(self, rollout_id: str, work: Task, options: RolloutOptions) -> RolloutHandle:
        try:
            return await self._ps.rollouts.create(work, "shell", rollout_id=rollout_id, **options)
        except AlreadyExists:  # the answer to an earlier try was lost, the rollout was not
            return await self._ps.rollouts.attach(rollout_id)

    async def _sequences(self, handle: RolloutHandle) -> list[int]:
        events = [event async for event in handle.events()]
        if not isinstance(events[-1].payload, Ended):
            self.account.faults.append(f"{handle.rollout_id} has no end among its events")
        return [event.sequence for event in events]

    async def _train(self, session: InterceptSession) -> None:
        async def answer(call: ModelCall) -> None:
            ids, logprobs = sampled(_REPLY(prompt_text(call)))
            completion = Completion.of_tokens(
                np.array(ids), np.array(logprobs), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
            )
            with suppress(PenstockError):  # the gate was killed, or the call has ended meanwhile
                await call.deliver(completion)

        async with asyncio.TaskGroup() as tasks, aclosing(session.calls()) as calls:
            async for call in calls:
                tasks.create_task(answer(call))

    # Kills ------------------------------------------------------------------------------------------------------------

    async def _kill_now_and_then(self) -> None:
        kinds = [*_SERVICES, "spawner", "agent", "agent", "agent"]
        moments = sorted(self._dice.randrange(1, max(2, self._plan.count - 1)) for _ in range(self._plan.kills))
        chosen = [self._dice.choice(kinds) for _ in moments]
        if self._plan.kills >= len(kinds):
            chosen[: len(kinds)] = self._dice.sample(kinds, len(kinds))  # each at least once
        for moment, kind in zip(moments, chosen, strict=True):
            while self._ended < moment:
                self._progress.clear()
                await self._progress.wait()
            self._traces.note(self._stack.pid("sandbox"))
            if await self._kill(kind):
                self.account.killed[kind] += 1

    async def _kill(self, kind: str) -> bool:
        if kind == "agent":
            return self._kill_an_agent()
        if kind == "spawner":
            os.kill(spawner_of(self._stack.pid("sandbox")), signal.SIGKILL)
            return True
        await self._stack.restart(next(name for name in _SERVICES if name == kind))
        return True

    def _kill_an_agent(self) -> bool:
        """One of those that run at this moment; False when none does."""
        found = []
        for pid in descendants(self._stack.pid("sandbox")):
            with suppress(OSError):
                if b"shell-agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        if not found:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._dice.choice(found), signal.SIGKILL)
        return True

    # Leaks ------------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        figures = {}
        pids = {str(name): self._stack.pid(name) for name in _SERVICES}
        for name, pid in {**pids, "spawner": spawner_of(pids["sandbox"])}.items():
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            figures[name] = resident, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        self.account.memory.append(figures)

    async def _look_for_leaks(self) -> None:
        async def nothing_left() -> bool:
            return not await self._left()

        try:
            await eventually_async(nothing_left, "nothing is left", within=120.0)
        except AssertionError:
            self.account.faults += await self._left()

    async def _left(self) -> list[str]:
        """Everything that should be gone when every rollout is deleted."""
        left = [*self._traces.left()]
        # Of one that a killed service lost there is an entry that says so for a while, and nothing else.
        left += [f"sandbox {name} {state}" async for name, state in self._ps.sandboxes.list() if state != "lost"]
        left += [f"rollout {item.rollout_id}" async for item in self._ps.rollouts.list(labels={"soak": self._label})]
        async with channel_to(self._stack.address("interception"), self._stack.operator_token) as channel:
            stub = gate_grpc.RolloutGateServiceStub(channel)
            answer = await stub.ListRollouts(gate_pb.ListRolloutsRequest())
            left += [f"rollout {item.rollout_id} at the gate" for item in answer.rollouts]
        return left


def task(number: int) -> Task:
    """Copies a word; each number is prepared by itself."""
    return Task(
        task_id=f"soak-{number}",
        instruction="Run work.sh with bash: it copies the word in note.txt to out.txt.",
        files=[SeedFile("work.sh", b"cat note.txt > out.txt\n")],
        setup=[Command(shell=f"echo kiwi > note.txt; : {number}")],
        verifier=Verifier(
            commands=[Command(shell='[ "$(cat out.txt)" = kiwi ] && r=1 || r=0; echo $r > "$PENSTOCK_REWARD_FILE"')],
            reward=RewardFrom.FILE,
        ),
    )


async def insisting(work: Callable[[], Awaitable[T]], what: str) -> T:
    """Does it until the services are there to do it; AssertionError when they are away for too long."""
    until = time.monotonic() + GUARD_S
    while True:
        try:
            return await work()
        except NotFound:
            raise
        except PenstockError as error:
            if type(error).__name__ not in _AWAY_CODES and error.reason not in _AWAY:
                raise
            if time.monotonic() > until:
                raise AssertionError(f"{what}: {error!r}") from error
        await asyncio.sleep(_PAUSE_S)  # the back-off of a client whose server is away


async def soak(plan: Plan, folder: Path) -> Account:
    """Starts a stack under `folder` and runs the plan on it."""
    async with restartable(folder) as (running, stack):
        account = await Soak(running, stack, plan).run()
    journal = sqlite3.connect(folder / "state" / "driver" / "driver.db")  # the driver, which owned it, has stopped
    for table in ("owed", "events", "rollouts"):
        [(rows,)] = journal.execute(f"SELECT COUNT(*) FROM {table}")
        account.faults += [f"{rows} rows of {table}"] if rows else []
    journal.close()
    return account


def main() -> None:
    """The long one."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.services.soak", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="rollouts among which the kills happen (default 1000)")
    parser.add_argument("--kills", type=int, default=60, help="kills of services, spawners and agents (default 60)")
    parser.add_argument("--calm", type=int, default=300, help="rollouts after the last kill (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the dice (default 1)")
    given = parser.parse_args()
    plan = Plan(given.count, given.kills, given.calm, given.seed)
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        account = asyncio.run(soak(plan, Path(folder)))
    print(account)
    print(json.dumps({"load_1min": os.getloadavg()[0], "cores": os.cpu_count()}))
    raise SystemExit(bool(account.faults))


if __name__ == "__main__":
    main()
