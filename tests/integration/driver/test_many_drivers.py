"""One client of two drivers and two gates, by the address of one driver."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import pytest
from playwright.async_api import expect
from tests.integration.driver.stack import TOKEN, Process
from tests.integration.driver.test_service import echo_agent
from tests.support.policy import Trainer, sampled
from tests.support.services.asking import ask, asking_agent
from tests.support.services.stack import disjoint_uids
from tests.support.terminal.browser import chromium, dashboard, looking
from tests.support.waiting import eventually_async

from penstock.client import (
    CallEnded,
    Completion,
    Endpoints,
    GateRolloutHandle,
    LogprobsMode,
    Penstock,
    PolicyConstraint,
    Rollout,
    RunBudgets,
    StalePolicy,
    Task,
    Tokenizer,
    Unavailable,
    connect,
)
from penstock.client.intercept import session as module

TASK: Final = Task(task_id="echo", instruction="hello there")
SOURCE: Final = Tokenizer("tiny")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two drivers, which share two gates and a sandbox service."""

    drivers: tuple[Process, Process]
    gates: tuple[Process, Process]
    sandbox: Process

    def at(self, driver: int) -> Penstock:
        """A client that knows one driver only, beside the first gate."""
        addresses = {
            "driver": self.drivers[driver].address,
            "interception": self.gates[0].address,
            "sandbox": self.sandbox.address,
            "inference": "",
        }
        return connect(addresses, TOKEN)

    def alone(self, gate: int) -> Penstock:
        """A client of one gate only, which asks no driver for others."""
        where = Endpoints(
            driver=self.drivers[0].address,
            interception=self.gates[gate].address,
            sandbox=self.sandbox.address,
            inference="",
            token=TOKEN,
            discover=False,
        )
        return connect(where)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Fleet]:
    """The drivers learn of each other from a file, as from a launcher."""
    directory = tmp_path_factory.mktemp("fleet")
    started: list[Process] = []

    def start(kind: str, name: str, **settings: str) -> Process:
        there = directory / name
        there.mkdir()
        process = Process(kind, there, {"name": name, **settings})
        process.start()
        started.append(process)
        return process

    try:
        tokenizers = json.dumps({"tiny": str(tokenizer_dir)})
        gates = [start("interception", name, inference_address="", tokenizers=tokenizers) for name in ("g0", "g1")]
        ingresses = [gate.endpoints["ingress"] for gate in gates]
        sandbox = start("sandbox", "n0", allowed_upstreams=json.dumps(ingresses), first_uid=str(disjoint_uids()))
        listed = directory / "drivers.json"
        shared = {
            "sandbox_members": f"static:n0={sandbox.address}",
            "sandbox_token": TOKEN,
            "interception_members": f"static:g0={gates[0].address},g1={gates[1].address}",
            "interception_token": TOKEN,
            "driver_members": f"file:{listed}",
        }
        drivers = (start("driver", "d0", **shared), start("driver", "d1", **shared))
        listed.write_text(json.dumps({"d0": drivers[0].address, "d1": drivers[1].address}))
        yield Fleet(drivers, (gates[0], gates[1]), sandbox)
    finally:
        for process in reversed(started):
            process.stop()


def answer_of(version: int) -> Completion:
    """An answer of these weights."""
    ids, logprobs = sampled("an answer")
    return Completion.of_tokens(
        np.array(ids), np.array(logprobs), policy_version=version, logprobs_mode=LogprobsMode.PROCESSED
    )


async def both_are_known(ps: Penstock) -> None:
    """The drivers have read the file, and have found each other up."""

    async def known() -> bool:
        members = await ps.operations.members("driver")
        return [(member.name, member.state) for member in members] == [("d0", "up"), ("d1", "up")]

    await eventually_async(known, "both drivers are listed as up")


async def all_of(rollouts: AsyncIterator[Rollout], into: list[str]) -> None:
    async for rollout in rollouts:
        into.append(rollout.rollout_id)  # noqa: PERF401 - it has what came before an error


async def test_any_driver_s_address_finds_every_rollout(fleet: Fleet) -> None:
    """Creations go round; lists, watches, reads and cancellations are of both drivers."""
    async with fleet.at(0) as at_0, fleet.at(1) as at_1:
        await both_are_known(at_0)
        await both_are_known(at_1)
        await at_0.agents.register(echo_agent())
        run = secrets.token_hex(4)
        made = [await at_0.rollouts.create(TASK, "echo", source=SOURCE, run_id=run) for _ in range(4)]
        homes = {handle.rollout_id: handle.rollout_id.split(".")[1] for handle in made}
        assert sorted(homes.values()) == ["d0", "d0", "d1", "d1"]
        for ps in (at_0, at_1):
            listed = [item.rollout_id async for item in ps.rollouts.list(run_id=run)]
            assert listed == [handle.rollout_id for handle in reversed(made)], "newest first"
            seen: set[str] = set()
            async for change in ps.rollouts.watch(run_id=run):
                assert not change.away
                seen |= {item.rollout_id for item in change.rollouts}
                if change.complete:
                    break
            assert seen == homes.keys()
            for rollout_id in homes:
                handle = await ps.rollouts.attach(rollout_id)
                await handle.cancel()
                assert (await handle.result()).rollout.rollout_id == rollout_id
        exported = {trajectory.rollout_id async for trajectory, _ in at_1.rollouts.export(run_id=run)}
        assert exported <= homes.keys()
        groups = [await at_1.groups.create(TASK, "echo", n=1, source=SOURCE, run_id=run) for _ in range(2)]
        assert [item.group_id async for item in at_0.groups.list(run_id=run)] == [
            group.group_id for group in reversed(groups)
        ]
        for group in groups:
            await (await at_0.groups.attach(group.group_id)).wait()


async def test_an_id_that_a_client_chose_is_found_and_is_at_one_driver(fleet: Fleet) -> None:
    async with fleet.at(0) as at_0, fleet.at(1) as at_1:
        await both_are_known(at_0)
        await both_are_known(at_1)
        await at_0.agents.register(echo_agent())
        homes = set()
        for number in range(4):  # of which both drivers get some, since the ids are the same in each run
            chosen = f"mine-{number}"
            await at_0.rollouts.create(TASK, "echo", source=SOURCE, rollout_id=chosen)
            handle = await at_1.rollouts.attach(chosen)
            await handle.result()
            assert handle.info.home is not None
            homes.add(handle.info.home.driver)
        assert homes == {"d0", "d1"}


async def test_budgets_of_a_run_are_counted_at_one_gate(fleet: Fleet) -> None:
    """Both drivers choose the same one."""
    async with fleet.at(0) as ps:
        await both_are_known(ps)
        await ps.agents.register(echo_agent())
        made = [
            await ps.rollouts.create(
                TASK, "echo", source=SOURCE, run_id="budgeted", run_budgets=RunBudgets(max_calls=5)
            )
            for _ in range(6)
        ]
        ended = [(await handle.result()).rollout.home for handle in made]
        assert {home.driver for home in ended if home is not None} == {"d0", "d1"}
        assert len({home.gate for home in ended if home is not None}) == 1


@pytest.mark.requirement("R122")
async def test_a_budget_of_a_run_ends_it_at_exactly_that_many_calls(fleet: Fleet) -> None:
    """Rollouts of both drivers ask without end, four at once. `python -m tests.hosts session` has more."""
    most, run = 60, secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.alone(0) as g0, fleet.alone(1) as g1:
        await both_are_known(ps)
        await ps.agents.register(asking_agent("asker"))
        async with ps.intercept(run_id=run, credits=8, policy_version=3) as session:
            trainer = Trainer(session, lambda prompt: "an answer")
            training = asyncio.create_task(trainer.run())
            made = [
                await ps.rollouts.create(
                    TASK, "asker", source=SOURCE, run_id=run, run_budgets=RunBudgets(max_calls=most)
                )
                for _ in range(4)
            ]
            ended = [(await handle.result()).rollout for handle in made]
            session.finish()
            await training
        homes = [rollout.home for rollout in ended if rollout.home is not None]
        assert {home.driver for home in homes} == {"d0", "d1"}
        (gate,) = {home.gate for home in homes}
        at = {"g0": g0, "g1": g1}[gate]
        delivered = [(await at.gate.get(rollout.rollout_id)).totals.delivered for rollout in ended]
        assert (sum(delivered), len(trainer.answers)) == (most, most)


@pytest.mark.requirement("R129")
async def test_branches_are_at_their_parent_s_driver_whoever_asks(fleet: Fleet) -> None:
    """By each driver's address, of parents at both drivers; at whichever gate, only what is their own is sampled."""
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.at(1) as other:
        await both_are_known(ps)
        await both_are_known(other)
        await ps.agents.register(asking_agent("thrice", 3))
        async with ps.intercept(run_id=run, credits=8, policy_version=3) as session:
            trainer = Trainer(session, lambda prompt: "an answer")
            training = asyncio.create_task(trainer.run())
            parents = [await ps.rollouts.create(TASK, "thrice", source=SOURCE, run_id=run) for _ in range(2)]
            for parent in parents:
                await parent.result()
            before = len(trainer.answers)
            groups = [await at.rollouts.branch(parent.rollout_id, 1, 2) for at in (ps, other) for parent in parents]
            ended = [one for group in groups for one in await group.results(samples_only=False)]
            session.finish()
            await training
    assert before == 6 and len(trainer.answers) == before + 2 * len(ended)
    for group, parent in zip(groups, parents * 2, strict=True):
        assert group.group_id.split(".")[1] == parent.rollout_id.split(".")[1]
    for one in ended:
        assert one.trajectory is not None
        assert [call.replayed_from is None for call in one.trajectory.calls] == [False, True, True]
        assert [call.branch_point for call in one.trajectory.calls] == [False, True, False]


async def test_metrics_of_a_run_are_at_one_driver_and_listed_whoever_asks(fleet: Fleet) -> None:
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.at(1) as other:
        await both_are_known(ps)
        await both_are_known(other)
        await ps.runs.log(run, {"loss": 1.0}, step=1)
        await other.runs.log(run, {"loss": 0.5}, step=1)
        for client in (ps, other):
            (metric,) = await client.runs.metrics(run)
            assert metric.values.tolist() == [0.5]
        assert await ps.runs.delete_metrics(run) == 1


async def test_a_lost_driver_is_named_and_avoided(fleet: Fleet) -> None:
    """Lists have what the other one has, and say that they are not whole."""
    async with fleet.at(0) as ps:
        await both_are_known(ps)
        await ps.agents.register(echo_agent())
        run = secrets.token_hex(4)
        made = [await ps.rollouts.create(TASK, "echo", source=SOURCE, run_id=run) for _ in range(2)]
        for handle in made:
            await handle.result()
        (kept,) = [handle.rollout_id for handle in made if handle.rollout_id.startswith("r.d0.")]
        fleet.drivers[1].kill()
        try:
            found: list[str] = []
            with pytest.raises(Unavailable, match="driver service d1 at"):
                await all_of(ps.rollouts.list(run_id=run), found)
            assert found == [kept]
            async for change in ps.rollouts.watch(run_id=run):
                if change.away:
                    assert change.away == ("d1",)
                    break

            async def is_lost() -> bool:
                return [member.state for member in await ps.operations.members("driver")] == ["up", "lost"]

            await eventually_async(is_lost, "the driver is lost")
            made = [await ps.rollouts.create(TASK, "echo", source=SOURCE, run_id=run) for _ in range(3)]
            assert all(handle.rollout_id.startswith("r.d0.") for handle in made)
        finally:
            fleet.drivers[1].start()
        await both_are_known(ps)
    async with fleet.at(0) as ps:  # the connection of the earlier client may still wait for its next try
        assert len([item async for item in ps.rollouts.list(run_id=run)]) == 5


async def test_a_trainer_answers_both_gates_once_over_a_restart(fleet: Fleet) -> None:
    """R24: each call has one answer, at the gate that it came from."""
    each, at_once, run = 100, 10, secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.alone(0) as g0, fleet.alone(1) as g1, aiohttp.ClientSession() as http:
        opened = [await to.gate.open(run_id=run, source=SOURCE) for to in (g0, g1)]
        async with ps.intercept(run_id=run, credits=16, policy_version=3) as session:
            trainer = Trainer(session, lambda prompt: "an answer")
            training = asyncio.create_task(trainer.run())
            halfway = asyncio.Event()

            async def agent(rollout: GateRolloutHandle, part: int) -> None:
                for number in range(part, each, at_once):
                    await ask(http, rollout, f"{rollout.rollout_id} {number}")
                    if len(trainer.answers) >= each:
                        halfway.set()

            async with asyncio.TaskGroup() as agents:
                for rollout in opened:
                    for part in range(at_once):
                        agents.create_task(agent(rollout, part))
                await halfway.wait()
                fleet.gates[1].kill()
                await asyncio.to_thread(fleet.gates[1].start)
            session.finish()
            await training
        delivered = []
        for to, rollout in zip((g0, g1), opened, strict=True):
            assert (await to.gate.get(rollout.rollout_id)).totals.delivered >= each
            delivered += [call.call_id async for call in to.gate.calls(rollout.rollout_id) if call.state == "delivered"]
            await to.gate.close(rollout.rollout_id)
        assert len(set(delivered)) == len(delivered)


async def test_a_pause_holds_both_gates(fleet: Fleet) -> None:
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.alone(0) as g0, fleet.alone(1) as g1, aiohttp.ClientSession() as http:
        opened = [await to.gate.open(run_id=run, source=SOURCE) for to in (g0, g1)]
        async with ps.intercept(run_id=run, policy_version=3) as session:
            trainer = Trainer(session, lambda prompt: "an answer")
            training = asyncio.create_task(trainer.run())
            assert await session.pause("weights") == 0
            asking = [asyncio.create_task(ask(http, rollout, "while paused")) for rollout in opened]
            for to in (g0, g1):

                async def is_held(to: Penstock = to) -> bool:
                    async for load in to.gate.watch(0.5):
                        return load.paused_calls == 1
                    return False

                await eventually_async(is_held, "the call is held")
            assert not trainer.calls
            await session.resume()
            await asyncio.gather(*asking)
            session.finish()
            await training
        assert sorted(call.rollout_id for call in trainer.calls) == sorted(rollout.rollout_id for rollout in opened)


@pytest.mark.requirement("R122")
async def test_both_gates_judge_by_a_version_that_was_announced_in_a_pause(fleet: Fleet) -> None:
    """Calls wait at both: when they flow again, each gate refuses answers of the weights before."""
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.alone(0) as g0, fleet.alone(1) as g1, aiohttp.ClientSession() as http:
        policy = PolicyConstraint(max_staleness=0)
        opened = [await to.gate.open(run_id=run, source=SOURCE, policy=policy) for to in (g0, g1)]
        async with ps.intercept(run_id=run, policy_version=3) as session:
            calls = session.calls()
            for version in range(4, 8):
                await session.pause("weights")
                text = f"for {version}"
                asking = [asyncio.create_task(ask(http, rollout, text)) for rollout in opened]
                for to, rollout in zip((g0, g1), opened, strict=True):

                    async def has_it(
                        to: Penstock = to, rollout_id: str = rollout.rollout_id, count: int = version
                    ) -> bool:
                        return len([call async for call in to.gate.calls(rollout_id)]) == count - 3

                    await eventually_async(has_it, "the gate has the call")
                session.announce(version)
                await session.resume()
                leased = [await anext(calls), await anext(calls)]
                assert [call.min_policy_version for call in leased] == [version, version]
                for call in leased:
                    with pytest.raises(StalePolicy):
                        await call.deliver(answer_of(version - 1))
                    await call.deliver(answer_of(version))
                assert await asyncio.gather(*asking) == ["an answer"] * 2
            await calls.aclose()


@pytest.mark.requirement("R119")
async def test_a_session_goes_on_at_one_gate_while_another_is_lost(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of the lost one are given up. When it is back, its calls come in again."""
    monkeypatch.setattr(module, "GONE_S", 0.0)
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps, fleet.alone(0) as g0, fleet.alone(1) as g1, aiohttp.ClientSession() as http:
        kept, lost = [await to.gate.open(run_id=run, source=SOURCE) for to in (g0, g1)]
        async with ps.intercept(run_id=run, policy_version=3) as session:
            calls = session.calls()
            asking = asyncio.create_task(ask(http, lost, "before"))
            call = await anext(calls)
            fleet.gates[1].kill()
            try:
                await call.wait_ended()
                with pytest.raises(CallEnded):
                    await call.deliver(answer_of(3))
                meanwhile = asyncio.create_task(ask(http, kept, "meanwhile"))
                await (await anext(calls)).deliver(answer_of(3))
                assert await meanwhile == "an answer"
            finally:
                fleet.gates[1].start()
            asking.cancel()
            after = asyncio.create_task(ask(http, lost, "after"))
            await (await anext(calls)).deliver(answer_of(3))
            assert await after == "an answer"
            await calls.aclose()


async def test_dashboard_shows_rollouts_and_services_of_both_drivers(fleet: Fleet) -> None:
    """One table has the rollouts of all drivers; a rollout's page is read from the driver that has it."""
    run = secrets.token_hex(4)
    async with fleet.at(0) as ps:
        await both_are_known(ps)
        await ps.agents.register(echo_agent())
        homes: dict[str, str] = {}
        count = 0
        while homes.keys() != {"d0", "d1"}:  # a chosen id decides
            made = await ps.rollouts.create(TASK, "echo", source=SOURCE, run_id=run, rollout_id=secrets.token_hex(8))
            await made.result()
            home = (await ps.rollouts.attach(made.rollout_id)).info.home
            assert home is not None
            homes[home.driver] = made.rollout_id
            count += 1
    where = Endpoints(
        driver=fleet.drivers[0].address,
        interception=fleet.gates[0].address,
        sandbox=fleet.sandbox.address,
        inference="",
    )
    async with dashboard(where) as address, chromium() as browser:
        async with looking(browser, address, TOKEN, f"/?q=run:{run}") as page:
            await expect(page.locator(".rollouts .line")).to_have_count(count)
            for driver, rollout_id in homes.items():
                line = page.locator(".rollouts .line", has_text=rollout_id)
                await expect(line).to_contain_text(f"at {driver}")
            await page.goto(f"{address}#/?q=run:{run}%20driver:d1")
            await expect(page.locator(".rollouts .line", has_text=homes["d1"])).to_be_visible()
            await expect(page.locator(".rollouts .line", has_text=homes["d0"])).to_have_count(0)
            # The filter holds for the pages that show it, and for no other.
            await page.get_by_role("link", name="Runs", exact=True).click()
            cell = page.get_by_role("row").filter(has=page.get_by_role("link", name=run)).get_by_role("cell").nth(2)
            await expect(cell).to_have_text(str(count))
        # A link has no driver's name: whichever has the rollout is found.
        async with looking(browser, address, TOKEN, f"/rollouts/{homes['d1']}") as page:
            await expect(page.get_by_role("heading", level=1)).to_contain_text(homes["d1"])
            await expect(page.locator(".chip", has_text="completed").first).to_be_visible()
        async with looking(browser, address, TOKEN, "/services") as page:
            table = page.get_by_role("table", name="All services")
            for name in ("d0", "d1", "g0", "g1", "n0"):
                line = table.get_by_role("row").filter(has=page.get_by_role("cell", name=name, exact=True))
                await expect(line).to_contain_text("up")
                await expect(line).to_contain_text("late")  # its own status was read
