"""The scenario: questions over a restart and a loss of a gate, a pause, announcements, and a run with a budget."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import aiohttp
from tests.hosts.fleet import Fleet
from tests.hosts.session.account import Account, Pause
from tests.hosts.session.agents import LABELS, Agents
from tests.hosts.session.trainer import Trainer, answer, question
from tests.support.services.asking import asking_agent
from tests.support.waiting import eventually, eventually_async

from penstock.client import InterceptSession, Penstock, RunBudgets, Task, connect

RESTARTED, LOST = "g0", "g1"
_LIMIT_S: Final = 600.0
"""Guard on each step."""
_FIRST: Final = 1
"""The first version of the weights."""
_ASKERS: Final = 4
"""Rollouts of the run with a budget, for each driver."""


@dataclass(frozen=True)
class Plan:
    """`calls` in all, `at_once` of them; `rounds` of announcements; the `budget` of a run."""

    calls: int
    at_once: int
    rounds: int
    budget: int


class Run:
    """One run."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.account = Account(plan.calls, plan.budget)
        self._fleet = fleet
        self._plan = plan
        self._each = plan.at_once // 2
        """Agents at each gate."""
        self._began = time.monotonic()
        self._gates: dict[str, Penstock] = {}
        self._drivers: dict[str, Penstock] = {}

    async def go(self) -> Account:
        """Run it."""
        fleet = self._fleet
        trusted = ssl.create_default_context(cafile=str(fleet.folder / "credentials" / "ca.pem"))
        async with AsyncExitStack() as stack:
            for name in fleet.size.names("interception"):
                self._gates[name] = await stack.enter_async_context(connect(fleet.endpoints(gate=name, discover=False)))
            for name in fleet.size.names("driver"):
                self._drivers[name] = await stack.enter_async_context(connect(fleet.endpoints(driver=name)))
            connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            session = await stack.enter_async_context(
                next(iter(self._drivers.values())).intercept(
                    labels=LABELS, credits=self._plan.at_once, policy_version=_FIRST
                )
            )
            trainer = Trainer(session, self.account, _FIRST)
            agents = Agents(http, self._gates, self.account)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(trainer.run())
                await self._questions(session, trainer, agents)
                await self._announcements(session, trainer, agents)
                await self._budget()
                session.finish()
            await agents.read()
        self.account.seconds = time.monotonic() - self._began
        return self.account

    async def _questions(self, session: InterceptSession, trainer: Trainer, agents: Agents) -> None:
        """A half over the restart, a quarter over the loss, and a quarter once the lost gate is back, over a pause."""
        numbers = range(self._plan.calls)
        half, quarter = len(numbers) // 2, len(numbers) // 4
        for name in (RESTARTED, LOST):
            await agents.prepare(name, self._each)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agents.work(deque(numbers[:half]), self._each))
            await self._answered(agents, quarter)
            await self._restart()
        await self._lose(deque(numbers[half:-quarter]), trainer, agents)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agents.work(deque(numbers[-quarter:]), self._each))
            await self._answered(agents, len(numbers) - quarter // 4 * 3)
            await self._pause(session)
            trainer.version += 1
            session.announce(trainer.version)
            await session.resume()
            self.account.announced.append((time.time(), trainer.version))

    async def _restart(self) -> None:
        began = time.monotonic()
        await asyncio.to_thread(self._fleet.network.hosts[RESTARTED].kill)
        self._say(f"{RESTARTED} is killed")
        before = self.account.answered_at[RESTARTED]
        self._fleet.spawn(RESTARTED)
        await self._fleet.serving(RESTARTED)
        await eventually(
            lambda: self.account.answered_at[RESTARTED] > before, f"{RESTARTED} answers again", within=_LIMIT_S
        )
        self.account.restart_s = time.monotonic() - began

    async def _lose(self, numbers: deque[int], trainer: Trainer, agents: Agents) -> None:
        """The gate is cut off and killed while the trainer has calls of it; later it is back on its disk."""
        account, host = self.account, self._fleet.network.hosts[LOST]
        rollouts = await agents.prepare(LOST, self._each)
        kept = trainer.keep(rollouts)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agents.work(numbers, self._each))
            await eventually(lambda: kept.qsize() >= max(1, self._each // 2), "the trainer has calls", within=_LIMIT_S)
            host.cut()
            await asyncio.to_thread(host.kill)
            self._say(f"{LOST} is lost")
            began, answered = time.monotonic(), agents.answered
            agents.lose(LOST)
            calls = [kept.get_nowait() for _ in range(kept.qsize())]
            reasons = await asyncio.gather(*(trainer.answer(call) for call in calls))
            account.given_up = {call.call_id: reason for call, reason in zip(calls, reasons, strict=True)}
            account.lost_s, account.meanwhile = time.monotonic() - began, agents.answered - answered
        self._say(f"its calls are given up; {agents.answered} answered")
        trainer.keep_no_more(rollouts)
        host.mend()
        self._fleet.spawn(LOST)
        await self._fleet.serving(LOST)
        await agents.close(LOST, rollouts)
        await agents.prepare(LOST, self._each)
        await agents.one(await agents.open(LOST), question(0))  # the session is there again

    async def _pause(self, session: InterceptSession) -> None:
        """Until all agents wait at both gates."""
        leased = await session.pause("weights")
        pause = Pause(time.time(), leased)
        self.account.pauses.append(pause)
        for name, ps in self._gates.items():

            async def is_held(name: str = name, ps: Penstock = ps) -> bool:
                async for load in ps.gate.watch(0.5):
                    pause.held[name] = load.paused_calls
                    return load.paused_calls == self._each and not load.leased_calls
                return False

            await eventually_async(is_held, f"the calls of {name} are held", within=_LIMIT_S)
        pause.ended = time.time()
        self._say(f"calls are held: {pause.held}")

    async def _announcements(self, session: InterceptSession, trainer: Trainer, agents: Agents) -> None:
        """Each gate has a call in a pause, which ends with an announcement."""
        rollouts = {gate: await agents.open(gate) for gate in self._gates}
        kept = trainer.keep(rollout.rollout_id for rollout in rollouts.values())
        for number in range(self._plan.rounds):
            await session.pause("weights")
            asking = [
                asyncio.create_task(agents.one(rollout, question(self._plan.calls + number)))
                for rollout in rollouts.values()
            ]
            for gate in rollouts:

                async def has_it(gate: str = gate, number: int = number) -> bool:
                    return await agents.calls(gate, rollouts[gate]) > number

                await eventually_async(has_it, f"{gate} has the call", within=_LIMIT_S)
            old, trainer.version = trainer.version, trainer.version + 1
            session.announce(trainer.version)
            await session.resume()
            calls = [await kept.get() for _ in rollouts]
            for call in calls:
                if call.min_policy_version != trainer.version:
                    self.account.misjudged.append(f"{call} was for version {call.min_policy_version}")
            refused = await asyncio.gather(*(trainer.is_too_old(call, old) for call in calls))
            for call, was_refused in zip(calls, refused, strict=True):
                if not was_refused:
                    self.account.misjudged.append(f"{call} was answered by version {old}, not {trainer.version}")
            await asyncio.gather(*(trainer.answer(call) for call in calls))
            answers = set(await asyncio.gather(*asking))
            if answers != {answer(self._plan.calls + number)}:
                self.account.misjudged.append(f"agents were answered {answers}")
            self.account.rounds += 1
        self._say(f"{self.account.rounds} announcements")

    async def _budget(self) -> None:
        """Agents of rollouts of all drivers ask without end, until the run's budget is used up."""
        before = sum(self.account.accepted.values())
        made = []
        for ps in self._drivers.values():
            await ps.agents.register(asking_agent("asker"))
            made += [
                await ps.rollouts.create(
                    Task(task_id="ask", instruction="Ask."),
                    "asker",
                    run_id="budget",
                    labels=LABELS,
                    run_budgets=RunBudgets(max_calls=self._plan.budget),
                )
                for _ in range(_ASKERS)
            ]
        async with asyncio.timeout(_LIMIT_S):
            ended = [(await handle.result()).rollout for handle in made]
        for rollout in ended:
            if rollout.home is None:
                continue
            self.account.budget_homes.append((rollout.home.driver, rollout.home.gate))
            totals = (await self._gates[rollout.home.gate].gate.get(rollout.rollout_id)).totals
            self.account.budget_delivered.append(totals.delivered)
        self.account.budget_answered = sum(self.account.accepted.values()) - before
        self._say(f"the budget is used up: {self.account.budget_delivered}")

    async def _answered(self, agents: Agents, count: int) -> None:
        await eventually(lambda: agents.answered >= count, f"{count} answers", within=_LIMIT_S)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
