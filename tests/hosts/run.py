"""Rollouts on a fleet that loses hosts, and what must be true of all of them afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.hosts import model
from tests.hosts.fleet import Fleet
from tests.hosts.losses import How, Loss

from penstock.client import Mode, Penstock, RolloutResult, connect

_LIMIT_S = 600.0
"""Guard on one rollout, its retries included."""


@dataclass
class Report:
    """What came of all rollouts."""

    results: dict[int, RolloutResult] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Rollouts that could not be created, with the error."""
    lost_at: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The report, for people."""
        rewards = Counter("none" if item.reward is None else f"{item.reward.value:g}" for item in self.results.values())
        failures = Counter(
            item.outcome.failure.reason for item in self.results.values() if item.outcome.failure is not None
        )
        attempts = Counter(item.rollout.attempts for item in self.results.values())
        return [
            f"rollouts ended    {len(self.results)} in {self.seconds:.1f} s; refused {len(self.refused)}",
            f"rewards           {dict(sorted(rewards.items()))}",
            f"failures          {dict(failures.most_common())}",
            f"attempts          {dict(sorted(attempts.items()))}",
        ] + [f"refused           {text}" for text in sorted(set(self.refused.values()))[:5]]

    def faults(self, least: float) -> list[str]:
        """What must not be: a rollout that was refused, a reward that was not earned, fewer rewards than `least`.

        `least` is the share of the rollouts that must have their reward, which is 1: their policy earns it every time.
        """
        faults = [f"rollout {number} was refused: {why}" for number, why in sorted(self.refused.items())]
        faults += [
            f"rollout {number} has reward {item.reward.value:g}, earned is 1"
            for number, item in sorted(self.results.items())
            if item.reward is not None and item.reward.value != 1.0
        ]
        rewarded = sum(item.reward is not None for item in self.results.values())
        if rewarded < least * (len(self.results) + len(self.refused)):
            faults.append(f"{rewarded} of {len(self.results)} rollouts have a reward, at least {least:.0%} must")
        return faults


async def run(
    fleet: Fleet, count: int, *, at_once: int, work_s: float, max_attempts: int, losses: Sequence[Loss]
) -> Report:
    """Run `count` rollouts, `at_once` of them at a time, through the fleet's first driver; lose hosts on the way."""
    report, ended = Report(), 0
    began = time.monotonic()
    pending = sorted(losses, key=lambda loss: loss.share)
    returning: list[asyncio.Task[None]] = []
    slots = asyncio.Semaphore(at_once)

    async def one(ps: Penstock, number: int) -> None:
        nonlocal ended
        async with slots:
            while pending and ended >= pending[0].share * count:
                returning.append(asyncio.create_task(_lose(fleet, pending.pop(0), report, began)))
            try:
                async with asyncio.timeout(_LIMIT_S):
                    task = model.task(number, work_s)
                    handle = await ps.rollouts.create(
                        task, "shell", mode=Mode.TRANSPARENT_PROXY, max_attempts=max_attempts, run_id="hosts"
                    )
                    report.results[number] = await handle.result()
            except Exception as error:  # noqa: BLE001 - the report has it
                report.refused[number] = f"{type(error).__name__}: {error}"
            ended += 1

    async with connect(fleet.endpoints()) as ps, asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(one(ps, number))
    for work in returning:
        work.cancel()
    report.seconds = time.monotonic() - began
    return report


async def _lose(fleet: Fleet, loss: Loss, report: Report, began: float) -> None:
    host = fleet.network.hosts[loss.name]
    report.lost_at[loss.name] = time.monotonic() - began
    print(f"{report.lost_at[loss.name]:6.1f} s  {loss.name} is lost ({loss.how})", flush=True)
    host.cut()
    if loss.how is How.KILL:
        await asyncio.to_thread(host.kill)
    if loss.back_s is None:
        return
    await asyncio.sleep(loss.back_s)
    host.mend()
    if loss.how is How.KILL:
        fleet.spawn(loss.name)
    print(f"{time.monotonic() - began:6.1f} s  {loss.name} is back", flush=True)
