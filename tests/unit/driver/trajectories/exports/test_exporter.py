"""The exporter, killed at every step: what ends is stored, whole, under its own name, and once for a reader."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support.waiting import eventually

from penstock.analysis.export import read_exports
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2 as pb
from penstock.values import directory_urls
from penstock_chassis.aio.retry import Delays
from penstock_chassis.auth import acts_in
from penstock_chassis.errors import FailedPrecondition, NotFound, Unavailable
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.records import Record, RequestKey, RolloutEnd
from penstock_driver.status import ExportHealth
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.exports import ExportQueue
from penstock_driver.store.records import Records
from penstock_driver.trajectories.exports import exporter as module
from penstock_driver.trajectories.exports.destination import Destination
from penstock_driver.trajectories.exports.exporter import BatchLimits, Exporter, Failing, Sources, run_directory

NOW = Delays(0.001, 0.01)
AT_ONCE = BatchLimits(wait_s=0.0)


class Gates:
    """`ports.Captures` of gates that keep what is not said to be stored; those in `lost` do not answer, and those in
    `gone` are no members any more.
    """

    def __init__(self) -> None:
        self.kept: dict[str, pb.Trajectory] = {}
        self.reported: list[str] = []
        self.lost: set[str] = set()
        self.gone: set[str] = set()
        self.asked: Counter[str] = Counter()
        """How often each gate was asked for a capture."""
        self.discarded: set[str] = set()
        self.acted: dict[str, set[str | None]] = {}
        """In which namespaces a rollout's capture was read, or reported as stored."""

    async def capture(
        self, rollout_id: str, *, gate: str, include_bodies: bool, include_top: bool
    ) -> AsyncIterator[pb.Trajectory]:
        self.asked[gate] += 1
        self.acted.setdefault(rollout_id, set()).add(acts_in())
        if gate in self.lost:
            raise Unavailable("lost", reason="GATE_LOST")
        if gate in self.gone:
            raise NotFound("its gate is no member", reason="GATE_GONE", metadata={"gate": gate})
        if rollout_id in self.discarded:
            raise NotFound("beyond the limit of age", reason="CAPTURE_DISCARDED")
        if rollout_id not in self.kept:
            raise NotFound("none", reason="ROLLOUT_UNKNOWN")
        yield self.kept[rollout_id]

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        return ()

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[completion_pb2.TokenTensor]:
        return ()

    async def tool_results(self, rollout_id: str, *, gate: str) -> AsyncIterator[pb.HostToolCall]:
        for call in self.kept[rollout_id].host_tool_calls:
            yield call

    async def delete(self, rollout_id: str) -> None:
        self.kept.pop(rollout_id, None)

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        self.acted.setdefault(rollout_id, set()).add(acts_in())
        if self.lost & set(gates):
            raise Unavailable("lost", reason="GATE_LOST")
        for gate in self.gone & set(gates):
            raise NotFound("its gate is no member", reason="GATE_GONE", metadata={"gate": gate})
        self.reported.append(rollout_id)
        self.kept.pop(rollout_id, None)


class Died(BaseException):
    """The driver's process ends here."""


class Mortal:
    """Counts the steps of an exporter, and ends it at one of them: before or after each write that it makes."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps: list[str] = []

    def wrap(self, owner: Any, names: Sequence[str]) -> None:
        for name in names:
            setattr(owner, name, self._mortal(getattr(owner, name), name))

    def _mortal(self, work: Any, name: str) -> Any:
        async def stepped(*args: Any) -> Any:
            self._step(f"before {name}")
            result = await work(*args)
            self._step(f"after {name}")
            return result

        return stepped

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) == self.at:
            raise Died


class World:
    """A driver's journal and a directory for exports, over any number of exporters' lives."""

    def __init__(self, journal: Journal, place: Path, pool: ThreadPoolExecutor) -> None:
        self.records, self.queue = Records(journal), ExportQueue(journal)
        self.log = EventLog(journal, exports=True)
        self.place = place
        self.pool = pool
        self.gates = Gates()
        self.made = 0

    async def end(
        self, *, run: str | None = "run", gates: tuple[str, ...] = ("g0",), calls: int = 2, namespace: str = "default"
    ) -> str:
        """A rollout ends."""
        self.made += 1
        rollout_id = f"r{self.made}"
        spec = rollout_pb2.RolloutSpec()
        record = Record(
            rollout_id, None, 0, run, "task", "shell", "", {}, spec, time.time(), namespace=namespace,
            home=rollout_pb2.Home(gate=gates[-1] if gates else ""),
        )  # fmt: skip
        await self.records.create(RequestKey(f"q{self.made}", "d"), [record])
        if gates:
            self.gates.kept[rollout_id] = pb.Trajectory(
                rollout_id=rollout_id,
                calls=[pb.Call(call_id=f"{rollout_id}-{index}", index=index) for index in range(calls)],
            )
        self.log.end(rollout_id, None, RolloutEnd(rollout_pb2.Outcome(), {}, last_sequence=1, gates=gates))
        await self.log.flush()
        return rollout_id

    async def exporter(self, limits: BatchLimits = AT_ONCE) -> Exporter:
        destination = await Destination.opened(directory_urls.checked(f"file://{self.place}", "driver"), self.pool)
        return Exporter(
            self.queue, Sources(self.records, self.log, self.gates, Annotations(self.queue._journal)), destination,
            driver="d0-1", spool=self.place.parent / "spool", limits=limits, delays=NOW,
        )  # fmt: skip

    @asynccontextmanager
    async def running(
        self, limits: BatchLimits = AT_ONCE, *, exporter: Exporter | None = None
    ) -> AsyncIterator[Exporter]:
        exporter = exporter or await self.exporter(limits)
        task = asyncio.ensure_future(exporter.run())
        try:
            yield exporter
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def store_all(self, limits: BatchLimits = AT_ONCE) -> Exporter:
        """One life of an exporter, to the end of the queue."""
        async with self.running(limits) as exporter:
            await exporter.finish()
        return exporter

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.place)) for path in self.place.rglob("*") if path.is_file())

    def calls(self) -> Counter[str]:
        """How often each call is there, for a reader."""
        return Counter(row["call_id"] for row in read_exports(self.place, "turns"))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    with ThreadPoolExecutor(2) as pool:
        async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
            world = World(journal, tmp_path / "store", pool)
            yield world
            await world.log.aclose()


@pytest.mark.requirement("R124")
async def test_what_ends_is_stored_and_then_the_gate_may_forget_it(world: World) -> None:
    first, second = await world.end(), await world.end()
    unopened = await world.end(gates=())
    await world.store_all()
    assert world.files() == [
        "default/run/d0-1/00000001.rollouts.parquet",
        "default/run/d0-1/00000001.turns.parquet",
    ]
    assert world.calls() == {f"{name}-{index}": 1 for name in (first, second) for index in range(2)}
    stored = {row["rollout_id"]: row["attempt"] for row in read_exports(str(world.place), "rollouts")}
    assert stored == {first: 1, second: 1, unopened: 1}, "one that never reached a gate is there too"
    assert sorted(world.gates.reported) == [first, second, unopened]
    record = await world.records.get(first)
    assert record.export is not None
    assert record.export.location == f"file://{world.place}/default/run/d0-1/00000001"
    assert not await world.queue.unreported(0, 9)


@pytest.mark.requirement("R107", "R124")
async def test_a_rollout_is_exported_in_its_own_namespace(world: World) -> None:
    """At the gate its id may be another team's: one that was cancelled while it waited was never opened there."""
    ours, theirs = await world.end(namespace="team-a", gates=()), await world.end(namespace="team-b")
    await world.store_all()
    assert world.gates.acted == {ours: {"team-a"}, theirs: {"team-b"}}


@pytest.mark.requirement("R124")
async def test_a_kill_at_any_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Before and after each upload and each write of the journal, one after the other, until none is left."""
    steps: Counter[str] = Counter()
    for at in range(1, 200):
        with ThreadPoolExecutor(2) as pool:
            async with await Journal.open(tmp_path / f"{at}.db", MIGRATIONS) as journal:
                world = World(journal, tmp_path / f"store-{at}", pool)
                ended = [await world.end(run=run) for run in ("a", "a", "b", "a")]
                mortal = Mortal(at)
                exporter = await world.exporter(BatchLimits(rollouts=2, wait_s=0.0))
                mortal.wrap(exporter._queue, ["number", "stored", "done"])
                mortal.wrap(exporter._destination, ["put"])
                mortal.wrap(world.gates, ["stored"])
                work = asyncio.ensure_future(exporter.run())
                idle = asyncio.ensure_future(exporter.finish())
                await asyncio.wait([work, idle], return_when=asyncio.FIRST_COMPLETED)
                died = work.done()
                for task in (work, idle):
                    task.cancel()
                await asyncio.wait([work, idle])
                if died:
                    assert isinstance(work.exception(), Died)
                    steps[mortal.steps[at - 1]] += 1
                world.queue = ExportQueue(journal)
                del world.gates.__dict__["stored"]
                await world.store_all()
                assert world.calls() == {f"{name}-{index}": 1 for name in ended for index in range(2)}, mortal.steps
                keys = [(row["rollout_id"], row["attempt"]) for row in read_exports(world.place, "rollouts")]
                assert sorted(keys) == sorted((name, 1) for name in ended), mortal.steps
                assert not world.gates.kept and not await world.queue.unreported(0, 9), mortal.steps
                await world.log.aclose()
        if not died:
            break
    else:
        pytest.fail("the steps do not end")
    assert {name.split()[1] for name in steps} == {"number", "stored", "done", "put"}, steps


async def test_a_whole_batch_is_not_sent_again(world: World) -> None:
    """The journal may not know that a file was sent; its last table says so."""
    await world.end()
    exporter = await world.exporter()
    mortal = Mortal(3)
    mortal.wrap(exporter._queue, ["number", "stored"])  # before "stored": all is sent
    with pytest.raises(Died):
        await exporter.run()
    before = {path: path.stat().st_ino for path in world.place.rglob("*.parquet")}
    world.queue = ExportQueue(exporter._queue._journal)
    await world.store_all()
    assert {path: path.stat().st_ino for path in world.place.rglob("*.parquet")} == before


async def test_files_are_of_one_run_and_namespace_and_bounded(world: World) -> None:
    for run, namespace in (("a", "default"), ("a/../b", "default"), (None, "team"), ("a", "default"), ("a", "default")):
        await world.end(run=run, namespace=namespace)
    await world.store_all(BatchLimits(rollouts=2, wait_s=0.0))
    assert {name.rpartition("/")[0] for name in world.files()} == {
        *("default/a/d0-1", "default/a%2F..%2Fb/d0-1", "team/_/d0-1"),
    }
    counts = [pq.read_metadata(path).num_rows for path in world.place.rglob("default/a/*/*.rollouts.parquet")]
    assert sorted(counts) == [1, 2]
    world.made = 50
    await world.end(run="big")
    await world.end(run="big")
    await world.store_all(BatchLimits(size_bytes=1, wait_s=0.0))
    assert len(list(world.place.rglob("default/big/*/*.rollouts.parquet"))) == 2


@pytest.mark.parametrize("run", ["..", ".", "_", "_x", ".x", "", "a b/ü", "x" * 4000])
def test_any_run_id_is_one_directory_of_its_own(run: str) -> None:
    name = run_directory(run)
    assert name not in ("", ".", "..", "_") and "/" not in name and len(name) < 255
    assert not name.startswith(("_", ".")) and name != run_directory(run + "x")


async def test_a_lost_gate_keeps_back_its_own_rollouts_only(world: World) -> None:
    world.gates.lost = {"g1"}
    here, there = await world.end(), await world.end(gates=("g1",))
    moved = await world.end(gates=("g1", "g0"))  # its last attempt is at g0; g1 has one before
    async with world.running() as exporter:
        await eventually(lambda: here in world.gates.reported, "the living gate has the report")
        assert exporter.backlog.count == 1 and await world.queue.unstored([here, there, moved]) == [there]
        assert moved not in world.gates.reported, "g1 gets its report when it is back"
        world.gates.lost.clear()
        await exporter.finish()
    assert sorted(world.gates.reported) == [here, there, moved]


async def test_a_rollout_that_cannot_be_exported_keeps_back_no_other(world: World) -> None:
    broken = await world.end()
    world.gates.kept[broken].samples.add(input_ids=b"1234", loss_mask=b"")
    well = await world.end()
    exporter = await world.store_all()
    assert exporter.backlog.broken == (broken,) and set(world.gates.kept) == {broken}
    assert [row["rollout_id"] for row in read_exports(world.place, "rollouts")] == [well]
    (trouble,) = ExportHealth(exporter).troubles()
    assert (trouble.reason, trouble.subjects) == ("EXPORT_BROKEN", (broken,))


async def test_an_absent_store_is_told_and_waited_for(world: World) -> None:
    """For hours, if need be: what waits is in the journal."""
    exporter = await world.exporter()
    put, away = exporter._destination.put, True

    async def failing(*args: Any) -> None:
        if away:
            raise ConnectionError("no route to the store")
        await put(*args)

    exporter._destination.put = failing  # type: ignore[assignment,method-assign]
    async with world.running(exporter=exporter):
        await world.end()
        exporter.ended()
        await eventually(lambda: exporter.failing is not None, "a failure")
        assert exporter.failing is not None and "no route to the store" in exporter.failing.message
        exporter.failing = Failing(time.time() - 3600, exporter.failing.message)
        (trouble,) = ExportHealth(exporter).troubles()
        # About how many: one that ended while the queue was looked at counts twice until the next look.
        assert trouble.reason == "EXPORT_FAILING" and "to be stored at" in trouble.message
        assert exporter.pending >= 1 and ExportHealth(exporter).oldest_s() >= 0
        assert await exporter.settled(["r1"], 0.01) == ["r1"], "a deletion is refused meanwhile"
        away = False
        await exporter.finish()
        assert not list(ExportHealth(exporter).troubles()) and world.calls() == {"r1-0": 1, "r1-1": 1}


async def test_a_store_that_fails_for_the_next_file_keeps_back_no_report_of_the_first(world: World) -> None:
    """Gates kept what was stored for as long as the store was away, hours perhaps."""
    first, second = await world.end(), await world.end()
    exporter = await world.exporter(BatchLimits(rollouts=1, wait_s=0.0))
    put = exporter._destination.put

    async def failing(path: Path, name: str) -> None:
        if await world.queue.unstored([first]):
            await put(path, name)
        else:
            raise ConnectionError("the store is away")

    exporter._destination.put = failing  # type: ignore[assignment,method-assign]
    async with world.running(exporter=exporter):
        await eventually(lambda: world.gates.reported == [first], "the gate may forget what is stored")
        exporter._destination.put = put  # type: ignore[method-assign]
        await exporter.finish()
    assert world.gates.reported == [first, second]


async def test_a_batch_waits_for_more_and_a_full_one_for_none(world: World) -> None:
    async with world.running(BatchLimits(rollouts=2, wait_s=3600.0)) as exporter:
        await exporter.finish()
        exporter.drain(on=False)
        for _ in range(2):
            await world.end()
            exporter.ended()
        await eventually(lambda: len(world.gates.reported) == 2, "both are stored")
    assert len(world.files()) == 2


async def test_what_ends_during_an_export_waits_for_the_next_batch(world: World) -> None:
    """A busy driver stores no file for each rollout."""
    await world.end()
    exporter = await world.exporter(BatchLimits(wait_s=3600.0))
    put = exporter._destination.put

    async def meanwhile(*args: Any) -> None:
        await world.end()
        exporter.ended()
        await put(*args)

    exporter._destination.put = meanwhile  # type: ignore[assignment,method-assign]
    async with world.running(exporter=exporter):
        await eventually(lambda: bool(world.gates.reported), "the first is stored")
        exporter._destination.put = put  # type: ignore[method-assign]
        await exporter.finish()
        assert len(list(world.place.rglob("*.rollouts.parquet"))) == 2


async def test_an_export_that_was_turned_off_is_named(world: World) -> None:
    await world.end()
    (trouble,) = ExportHealth(None, (await world.queue.backlog()).count).troubles()
    assert trouble.reason == "EXPORT_OFF"


async def test_a_place_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with ThreadPoolExecutor(1) as pool:
        destination = await Destination.opened(f"file://{tmp_path}/file/below", pool)
        with pytest.raises(FailedPrecondition, match="cannot be written") as refused:
            await destination.check("d0", is_known=True)
        assert refused.value.reason == "EXPORT_NOT_WRITABLE"
        with pytest.raises(FailedPrecondition) as missing:
            await Destination.opened("nosuch://bucket/x", pool)
        assert missing.value.reason == "EXPORT_NOT_WRITABLE"
        well = await Destination.opened(f"file://{tmp_path}/store", pool)
        assert await well.check("d0", is_known=False) is None
        assert json.loads((tmp_path / "store/_penstock/d0.json").read_bytes())["driver"] == "d0"


async def test_a_missing_package_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setitem(sys.modules, "fsspec", None)
        with pytest.raises(FailedPrecondition, match=r"penstock-driver\[export\]") as missing:
            await Destination.opened("file:///x", pool)
    assert missing.value.reason == "EXPORT_PACKAGE_MISSING"


async def test_a_known_store_that_is_away_does_not_keep_a_driver_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_driver.trajectories.exports.destination.CHECK_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        destination = await Destination.opened(f"file://{tmp_path}", pool)

        async def away(work: object) -> None:
            raise FailingStore

        destination.run = away  # type: ignore[assignment,method-assign]
        assert isinstance(await destination.check("d0", is_known=True), FailingStore)
        with pytest.raises(FailedPrecondition):
            await destination.check("d0", is_known=False)


async def test_a_known_store_that_does_not_answer_delays_a_start_no_longer_than_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its filesystem repeats a request by itself, for longer than gates wait for a driver."""
    monkeypatch.setattr("penstock_driver.trajectories.exports.destination.CHECK_S", 0.01)
    with ThreadPoolExecutor(1) as pool:
        destination = await Destination.opened(f"file://{tmp_path}", pool)

        async def repeats(work: object) -> None:
            await asyncio.Event().wait()

        destination.run = repeats  # type: ignore[assignment,method-assign]
        assert isinstance(await destination.check("d0", is_known=True), TimeoutError)


class FailingStore(ConnectionError):
    """The store does not answer."""


@pytest.mark.requirement("R124")
async def test_a_capture_that_the_gate_discarded_is_a_finding_of_its_row(world: World) -> None:
    """A driver that was away too long says what is lost, and a rollout that never reached a gate says nothing of it."""
    lost, unopened = await world.end(), await world.end(gates=())
    world.gates.discarded.add(lost)
    await world.store_all()
    rows = {row["rollout_id"]: row["findings"] for row in read_exports(world.place, "rollouts")}
    [finding] = rows[lost]
    assert (finding["severity"], finding["reason"]) == ("fatal", "CAPTURE_DISCARDED")
    assert "limit of age" in finding["message"] and rows[unopened] == []


@pytest.mark.requirement("R124")
async def test_a_gate_that_is_no_member_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be replaced at this moment, and it has the only copy: nothing is stored without its calls meanwhile."""
    monkeypatch.setattr(module, "REPORT_AGAIN_S", 0.0)
    world.gates.gone = {"g1"}
    here, there = await world.end(), await world.end(gates=("g1",))
    moved = await world.end(gates=("g1", "g0"))
    async with world.running() as exporter:
        await eventually(lambda: world.gates.asked["g1"] > 2, "it is asked for again and again")
        assert await world.queue.unstored([here, there, moved]) == [there]
        assert moved not in world.gates.reported
        world.gates.gone.clear()
        await exporter.finish()
        await eventually(lambda: len(world.gates.reported) == 3, "all are reported")
    assert world.calls() == {f"{name}-{index}": 1 for name in (here, there, moved) for index in range(2)}


@pytest.mark.requirement("R124")
async def test_a_gate_that_stays_removed_does_not_block_the_export_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollouts are stored without their calls, and say so."""
    monkeypatch.setattr(module, "GONE_S", 0.0)
    world.gates.gone = {"g1"}
    lost = await world.end(gates=("g1",))
    moved = await world.end(gates=("g1", "g0"))
    await world.store_all()
    rows = {row["rollout_id"]: row["findings"] for row in read_exports(world.place, "rollouts")}
    [finding] = rows[lost]
    assert (finding["severity"], finding["reason"], rows[moved]) == ("fatal", "GATE_GONE", [])
    assert world.calls() == {f"{moved}-{index}": 1 for index in range(2)}
    assert not await world.queue.unreported(0, 9), "nobody is left to be informed"
