"""Each operation on the files that the client writes is refused once, by a full disk and by a broken one (R146).

Nothing is lost and nothing is doubled: what was there stays, what failed may be done again, and errors name the file.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tests.support.absent import absent
from tests.support.disks.failing_files import Files, failing
from tests.support.disks.refused_writes import sweep

from penstock.analysis.export_files import Format, new_file
from penstock.cli.commands import credentials
from penstock.client.errors import AlreadyExists, ConfigurationError
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.tasks.spec import AgentChoice, Verifier
from penstock.client.tasks.task import Task
from penstock.client.transport.atomic_files import write_whole
from penstock.client.transport.endpoints import Endpoints, read_connection, write_connection
from penstock.client.types.results import Ended, Outcome, RolloutEvent
from penstock.client.types.trajectories import Reward
from penstock.evaluation import Attempt, Book, Evaluation, read_attempts, read_config
from penstock.tables.columns import Table

CODES = pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "io error"])
TORN = pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
CONFIG: dict[str, Any] = {"agent": "a", "attempts": 2, "tasks": {"t": "digest"}}


def attempt(index: int, *, said: str = "") -> Attempt:
    """A result."""
    return Attempt(task_id="t", index=index, again=0, rollout_id=f"r-{index}", reward=1.0, said=said)


def insisting(work: Callable[[], Any], *files: Path) -> Any:
    """As a user does: makes room and runs it again; the error named one of these files."""
    try:
        return work()
    except ConfigurationError as error:
        assert error.reason == "FILE_NOT_WRITTEN" and any(str(file) in str(error) for file in files), error
    return work()


@pytest.mark.requirement("R146")
@TORN
@CODES
async def test_refused_write_keeps_each_evaluation_result_once(tmp_path: Path, code: int, torn: bool) -> None:
    """Opening, the configuration, each line, its sync; at once, or by the same command again."""

    async def play(directory: Path, disk: Files) -> None:
        folder, eval_id = directory / "eval", ""
        directory.mkdir(parents=True)
        with failing(disk):
            for first in (0, 2):  # the second one goes on with what the first one has
                book = insisting(lambda: Book(folder, CONFIG), folder)
                with book:
                    eval_id = book.eval_id
                    for index in (first, first + 1):
                        try:
                            book.add(attempt(index))
                        except ConfigurationError as error:
                            assert str(folder / "attempts.jsonl") in str(error)
                            assert [each.index for each in book.attempts] == list(range(index))
                            assert [each.index for each in read_attempts(folder)] == list(range(index))
                            book.add(attempt(index))
        assert [each.index for each in read_attempts(folder)] == [0, 1, 2, 3]
        assert read_config(folder)["eval_id"] == eval_id
        assert sorted(path.name for path in folder.iterdir()) == ["attempts.jsonl", "eval.json"]

    swept = await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at, torn=torn))
    assert {"mkdir", "open", "write", "fsync", "replace"} <= set(swept.refused)


@pytest.mark.requirement("R146")
@CODES
def test_unremovable_partial_line_is_cut_off_by_the_next_write(tmp_path: Path, code: int) -> None:
    """A disk that refuses everything for a while; what the book then holds is read by the next command."""
    with Book(tmp_path / "eval", CONFIG) as book:
        book.add(attempt(0))
        with failing(Files(code, tmp_path, torn=True)) as disk:
            disk.fill()
            for _ in range(3):
                with pytest.raises(ConfigurationError):
                    book.add(attempt(1, said="x" * 100_000))
        book.add(attempt(1))
    with (tmp_path / "eval" / "attempts.jsonl").open("ab") as file:
        file.write(attempt(2).line()[:40])  # of a process that died
    with Book(tmp_path / "eval", CONFIG) as book:
        book.add(attempt(2))
    assert [each.index for each in read_attempts(tmp_path / "eval")] == [0, 1, 2]


@pytest.mark.requirement("R146")
@TORN
@CODES
@pytest.mark.parametrize("format_", [Format.JSONL, Format.PARQUET])
async def test_refused_export_is_the_old_one_or_the_new_one(
    tmp_path: Path, code: int, torn: bool, format_: Format
) -> None:
    """Never a part of one, and nothing beside it."""
    if format_ is Format.PARQUET and importlib.util.find_spec("pyarrow") is None:
        absent("Parquet is not tested here: pip install pyarrow")

    async def play(directory: Path, disk: Files) -> None:
        file = directory / "below" / "rows.out"
        directory.mkdir(parents=True)

        def write() -> None:
            with new_file(file, Table.SEQUENCES, format_) as sink:
                if format_ is Format.JSONL:
                    sink.write([{"text": "x" * 10_000} for _ in range(3)])

        with failing(disk):
            insisting(write, file)
            whole = file.read_bytes()
            try:
                write()
            except ConfigurationError as error:
                assert str(file) in str(error)
        assert file.read_bytes() == whole
        assert [path.name for path in file.parent.iterdir()] == [file.name]

    swept = await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at, torn=torn))
    assert {"mkdir", "open", "write", "fsync", "replace"} <= set(swept.refused)


@pytest.mark.requirement("R146")
@TORN
@CODES
async def test_refused_report_or_spec_is_the_old_one_or_the_new_one(tmp_path: Path, code: int, torn: bool) -> None:
    """Reports, artifacts, specs to start from."""

    async def play(directory: Path, disk: Files) -> None:
        file = directory / "below" / "report.html"
        directory.mkdir(parents=True)
        with failing(disk):
            insisting(lambda: write_whole(file, b"old" * 10_000), file)
            try:
                write_whole(file, b"new")
            except ConfigurationError as error:
                assert str(file) in str(error)
                assert file.read_bytes() == b"old" * 10_000
            else:
                assert file.read_bytes() == b"new"
        assert [path.name for path in file.parent.iterdir()] == [file.name]

    await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at, torn=torn))


@pytest.mark.requirement("R146")
@TORN
@CODES
async def test_refused_connection_file_is_whole_or_absent(tmp_path: Path, code: int, torn: bool) -> None:
    """A half of one would be what the next command reads."""
    endpoints = Endpoints(token="t")

    async def play(directory: Path, disk: Files) -> None:
        file = directory / "state" / "connection.json"
        directory.mkdir(parents=True, mode=0o700)
        with failing(disk):
            try:
                write_connection(file, endpoints, pid=None)
            except ConfigurationError as error:
                assert str(file.parent) in str(error)
                assert not file.parent.exists() or not [*file.parent.iterdir()]
                write_connection(file, endpoints, pid=None)
        assert read_connection(file) is not None
        assert [path.name for path in file.parent.iterdir()] == [file.name]

    await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at, torn=torn))


@pytest.mark.requirement("R5", "R146")
@CODES
async def test_refused_credentials_are_the_old_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Whole directories; services that hold the old ones go on."""
    monkeypatch.setattr(credentials, "_certificates", lambda hosts, days: {"ca.pem": b"ca"})

    async def play(directory: Path, disk: Files) -> None:
        place = directory / "credentials"
        directory.mkdir(parents=True)
        disk.armed = False
        credentials.make(place, (), 1)
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        disk.armed = True
        with failing(disk):
            try:
                credentials.make(place, (), 1)
            except (OSError, ConfigurationError):
                assert {path.name: path.read_bytes() for path in place.iterdir()} == before
            else:
                after = {path.name: path.read_bytes() for path in place.iterdir()}
                assert after.keys() == before.keys() and after["trainer.token"] != before["trainer.token"]
        assert [path.name for path in directory.iterdir()] == ["credentials"]

    swept = await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at))
    assert {"open", "write", "rename"} <= set(swept.refused)


@pytest.mark.requirement("R146")
def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    """What the file has is what was added."""
    with Book(tmp_path, CONFIG) as book:
        for index in range(3):
            book.add(attempt(index, said="é\n"))
    assert [orjson.loads(line)["said"] for line in (tmp_path / "attempts.jsonl").read_bytes().splitlines()] == [
        "é\n"
    ] * 3


class Rollouts:
    """What a driver knows, which outlives those who ask; each rollout ends at once."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def list(self, run_id: str) -> AsyncIterator[Any]:
        for name in self.made:
            yield SimpleNamespace(rollout_id=name, outcome=Outcome())

    async def create(self, task: Task, agent: AgentChoice, *, rollout_id: str, **options: Any) -> Any:
        if rollout_id in self.made:
            raise AlreadyExists("there", reason="ROLLOUT_EXISTS")
        self.made.append(rollout_id)
        return await self.attach(rollout_id)

    async def attach(self, rollout_id: str) -> Any:
        async def events() -> AsyncIterator[RolloutEvent]:
            await asyncio.sleep(0)
            yield RolloutEvent(1, rollout_id, None, Ended(Outcome(reward=Reward(1.0))))

        async def refresh() -> Any:
            return SimpleNamespace(phase_times={})

        async def cancel(reason: str) -> None:
            """It has ended."""

        return SimpleNamespace(rollout_id=rollout_id, events=events, refresh=refresh, cancel=cancel)


class Nobody:
    """Is told what happens."""

    def event(self, task_id: str, index: int, event: RolloutEvent) -> None: ...

    def ended(self, attempt: Attempt) -> None: ...


@pytest.mark.requirement("R146")
@TORN
@CODES
async def test_refused_evaluation_continues_without_a_repeated_rollout(tmp_path: Path, code: int, torn: bool) -> None:
    """The result that could not be written down is taken from the rollout that has it."""
    config = {**CONFIG, "tasks": {"s": "1", "t": "2"}}
    tasks = [Task(task_id=name, instruction="do", verifier=Verifier(commands=[])) for name in "st"]

    async def play(directory: Path, disk: Files) -> None:
        folder, rollouts, refused = directory / "eval", Rollouts(), 0
        directory.mkdir(parents=True)
        with failing(disk):
            while True:
                try:
                    with Book(folder, config) as book:
                        ps: Any = SimpleNamespace(rollouts=rollouts)
                        options = RolloutOptions()
                        agent, who = AgentChoice(name="a"), Nobody()
                        await Evaluation(ps, book, tasks, agent, options, attempts=2, concurrency=2, observer=who).run()
                    break
                except ConfigurationError as error:
                    assert error.reason == "FILE_NOT_WRITTEN"
                    refused += 1
        assert refused <= 1  # making a directory that is there already fails nobody
        found = [(each.task_id, each.index, each.again, each.reward) for each in read_attempts(folder)]
        assert sorted(found) == [(task, index, 0, 1.0) for task in "st" for index in range(2)]
        assert len(rollouts.made) == len(set(rollouts.made)) == 4

    await sweep(play, tmp_path / "p", lambda at: Files(code, tmp_path / "p", at=at, torn=torn))
