"""The scenario: rollouts end; the store dies, a driver dies meanwhile, and both come back."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import fsspec
import pyarrow.parquet as pq
from tests.hosts.exporting.account import Account
from tests.hosts.exporting.store import Store
from tests.hosts.fleet import ROOT, Fleet
from tests.hosts.following import Follower
from tests.support.waiting import eventually, eventually_async

from penstock.analysis.export import read_exports
from penstock.client import Penstock, connect

_RETENTION_S: Final = 2.0
"""How long gates have what they need not keep."""
_LIMIT_S: Final = 600.0
"""Guard on each step."""
_STORE_DIES: Final = 0.3
"""Share of the rollouts that has ended then."""
_DRIVER_DIES: Final = 0.6
_KILLED: Final = "d0"
_PARTS: Final = 2


def settings(store: Store) -> Mapping[str, Mapping[str, Any]]:
    """Small files, and gates that forget soon."""
    return {
        "driver": {"export_url": store.url, "export_rollouts": 8, "export_wait_s": 0.5},
        "interception": {"retention_s": _RETENTION_S},
    }


class Run:
    """One run."""

    def __init__(self, fleet: Fleet, store: Store, count: int, work_s: float) -> None:
        self.account = Account(store.url, store.can_die)
        self._fleet = fleet
        self._store = store
        self._count = count
        self._work_s = work_s
        self._ended = 0
        self._began = time.monotonic()
        self._drivers: dict[str, Penstock] = {}
        self._gates: dict[str, Penstock] = {}

    async def go(self, at_once: int) -> Account:
        """Run it."""
        fleet, account, slots = self._fleet, self.account, asyncio.Semaphore(at_once)
        async with AsyncExitStack() as stack:
            for name in fleet.size.names("driver"):
                self._drivers[name] = await stack.enter_async_context(connect(fleet.endpoints(driver=name)))
            for name in fleet.size.names("interception"):
                self._gates[name] = await stack.enter_async_context(connect(fleet.endpoints(gate=name, discover=False)))
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(self._one(number, slots))
                died = await self._deaths()
            if died is not None:
                await self._while_away()
                await asyncio.to_thread(self._store.start_again)
                account.away_s = time.monotonic() - died
                self._say("the store is back")
            await self._until_stored()
        await asyncio.to_thread(self._read)
        await self._verify()
        account.seconds = time.monotonic() - self._began
        return account

    async def _one(self, number: int, slots: asyncio.Semaphore) -> None:
        names = list(self._drivers)
        name = names[number % len(names)]
        async with slots:
            follower = Follower(self._drivers[name], name, self._work_s, 1, parts=_PARTS)
            story = follower.begin(number, 0)
            self.account.stories.append(story)
            await follower.follow(story)
        self._ended += 1

    async def _deaths(self) -> float | None:
        """The store's, if it can die, and a driver's, which comes back; returns when the store died."""
        died = None
        if self._store.can_die:
            await self._reached(_STORE_DIES)

            async def some_are_stored() -> bool:
                return bool((await self._listed())[0])

            await eventually_async(some_are_stored, "some are stored", within=_LIMIT_S)
            await asyncio.to_thread(self._store.die)
            died = time.monotonic()
            self._say("the store is killed")
        await self._reached(_DRIVER_DIES)
        await asyncio.to_thread(self._fleet.network.hosts[_KILLED].kill)
        self._fleet.spawn(_KILLED)
        await self._fleet.serving(_KILLED)
        self._say(f"{_KILLED} was killed, and is back")
        return died

    async def _while_away(self) -> None:
        """All have ended, and nothing is stored. Wait until gates had time to forget."""
        account = self.account
        stored, waiting = await self._listed()
        account.unstored = waiting.keys() & {story.rollout_id for story in account.stories}
        since = time.monotonic()

        async def are_forgotten() -> bool:
            return time.monotonic() > since + 2 * _RETENTION_S and not stored.keys() & await self._at_gates()

        await eventually_async(are_forgotten, "gates have forgotten what is stored", within=_LIMIT_S)
        account.forgotten = len(stored)
        account.forgotten_early = account.unstored - await self._at_gates()
        self._say(f"{len(stored)} are stored, {len(waiting)} wait for the store")

    async def _until_stored(self) -> None:
        account, since = self.account, time.monotonic()

        async def all_are() -> bool:
            stored, waiting = await self._listed()
            account.attempts, account.never_stored = stored | waiting, set(waiting)
            return not waiting

        async def all_are_forgotten() -> bool:
            account.at_gates = await self._at_gates()
            return not account.at_gates

        with suppress(AssertionError):  # the account has it
            await eventually_async(all_are, "all are stored", within=_LIMIT_S)
            account.stored_s = time.monotonic() - since
            self._say("all are stored")
            await eventually_async(all_are_forgotten, "gates have forgotten all", within=_LIMIT_S)
            account.forgotten_s = time.monotonic() - since - account.stored_s

    async def _listed(self) -> tuple[dict[str, int], dict[str, int]]:
        """Rollouts that drivers list: those that are stored, and all others, with their attempts."""
        stored: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for ps in self._drivers.values():
            async for one in ps.rollouts.list(run_id="hosts"):
                (waiting if one.export is None else stored)[one.rollout_id] = one.attempts
        return stored, waiting

    async def _at_gates(self) -> set[str]:
        return {one.rollout_id for ps in self._gates.values() async for one in ps.gate.list()}

    def _read(self) -> None:
        """What is at the place, in its files and for readers."""
        account, store = self.account, self._store
        account.requests = Counter(store.requests)
        store.open()
        filesystem, root = fsspec.core.url_to_fs(store.url)
        for name in filesystem.find(root):
            if name.endswith(".rollouts.parquet"):
                account.files += 1
                with filesystem.open(name, "rb") as file:
                    rows = pq.read_table(file, columns=["rollout_id", "attempt"]).to_pylist()
                account.in_files.update((row["rollout_id"], row["attempt"]) for row in rows)
        account.for_readers.update((row["rollout_id"], row["attempt"]) for row in read_exports(store.url, "rollouts"))
        for row in read_exports(store.url, "turns"):
            account.calls.setdefault(row["call_id"], []).append(row["completion_token_ids"])
        account.answers = self._fleet.answers()

    async def _verify(self) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", "verify", self._store.url]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)
        output, _ = await process.communicate()
        self.account.proof = " ".join(output.decode(errors="replace").split())[-300:]
        self.account.is_proven = process.returncode == 0

    async def _reached(self, share: float) -> None:
        await eventually(lambda: self._ended >= share * self._count, f"{share:.0%} have ended", within=_LIMIT_S)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
