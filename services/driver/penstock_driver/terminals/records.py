"""What the driver remembers of terminal episodes and their steps: rows of the journal.

Invariants: a step is on disk before its command is started, and its result before it is told; the result of a final
answer and the end of its episode are written at once. What an open episode needs to go on (`order`) is erased with its
end; what is shown of it stays, the results of its steps for KEPT_S. All of it is in the wire's form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sqlite3 import IntegrityError, Row
from typing import Final

from penstock_chassis.errors import AlreadyExists, NotFound
from penstock_chassis.journal import Journal, Statement

MIGRATION: Final = """
CREATE TABLE terminals (
    number INTEGER PRIMARY KEY AUTOINCREMENT, terminal_id TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL,
    labels TEXT NOT NULL, shown BLOB NOT NULL, create_time REAL NOT NULL, ready_order BLOB, place TEXT,
    deadline REAL, answered INTEGER NOT NULL DEFAULT 0, outcome BLOB, end_time REAL, setup BLOB,
    verification BLOB, steps INTEGER NOT NULL DEFAULT 0, released INTEGER NOT NULL DEFAULT 0,
    remembers INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX terminals_unreleased ON terminals (terminal_id) WHERE released = 0;
CREATE INDEX terminals_remembering ON terminals (end_time) WHERE remembers = 1 AND end_time IS NOT NULL;
CREATE TABLE terminal_steps (
    terminal_id TEXT NOT NULL, number INTEGER NOT NULL, step_id TEXT NOT NULL, digest TEXT NOT NULL,
    action BLOB, result BLOB, shell TEXT, PRIMARY KEY (terminal_id, step_id)
) WITHOUT ROWID;
"""

KEPT_S: Final = 86_400.0
"""How long after an episode's end a repeated step still gets its first answer."""


@dataclass(frozen=True, slots=True)
class PlaceRecord:
    """Where an open episode is."""

    sandbox_id: str
    workdir: str
    shell_directory: str
    home: str = ""
    """Empty for an episode that an earlier version opened."""


@dataclass(frozen=True, slots=True)
class TerminalRecord:
    """An episode as remembered; times in seconds since the epoch, bytes in the wire's form.

    `place` is None while it is opened; `order` is None for an episode that could not be taken up again. `outcome` is
    set once it has ended; `released` once its sandbox is gone as well.
    """

    terminal_id: str
    request_id: str
    labels: Mapping[str, str]
    shown: bytes = field(repr=False)
    create_time: float
    order: bytes | None = field(default=None, repr=False)
    place: PlaceRecord | None = None
    deadline: float | None = None
    answered: bool = False
    outcome: bytes | None = None
    end_time: float | None = None
    setup: bytes = field(default=b"", repr=False)
    verification: bytes = field(default=b"", repr=False)
    released: bool = False
    step_count: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as remembered. `result` is None until it is done; `shell` is `[saved_by, last_code]` after it."""

    number: int
    step_id: str
    digest: str
    action: bytes | None = field(default=None, repr=False)
    result: bytes | None = field(default=None, repr=False)
    shell: tuple[int, int] | None = None


class TerminalRecords:
    """Episodes and their steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def create(self, record: TerminalRecord, digest: str) -> None:
        """Remember an episode that is being opened, and the request for it; AlreadyExists (ROLLOUT_EXISTS) when its
        request is known."""
        values = (record.terminal_id, record.request_id, json.dumps(dict(record.labels)), record.shown)
        try:
            await self._journal.write(
                [
                    ("INSERT INTO requests VALUES (?, ?, ?)", (record.request_id, digest, record.terminal_id)),
                    (
                        "INSERT INTO terminals (terminal_id, request_id, labels, shown, create_time)"
                        " VALUES (?, ?, ?, ?, ?)",
                        (*values, record.create_time),
                    ),
                ]
            )
        except IntegrityError as error:
            raise AlreadyExists("the request_id was used before", reason="ROLLOUT_EXISTS") from error

    async def forget_request(self, record: TerminalRecord) -> None:
        """An episode could not be opened: its request opens another one. It stays known until `forget`."""
        await self._journal.execute(
            "DELETE FROM requests WHERE request_id = ? AND resource_id = ?", (record.request_id, record.terminal_id)
        )

    async def forget(self, record: TerminalRecord) -> None:
        """An episode that could not be opened was never there; its sandbox is gone."""
        await self._journal.write(
            [
                (
                    "DELETE FROM requests WHERE request_id = ? AND resource_id = ?",
                    (record.request_id, record.terminal_id),
                ),
                ("DELETE FROM terminals WHERE terminal_id = ?", (record.terminal_id,)),
            ]
        )

    async def opened(
        self, terminal_id: str, place: PlaceRecord, deadline: float, order: bytes | None, setup: bytes
    ) -> None:
        """The episode is open; `order` is what it needs to be taken up again."""
        where = json.dumps([place.sandbox_id, place.workdir, place.shell_directory, place.home])
        await self._journal.execute(
            "UPDATE terminals SET place = ?, deadline = ?, ready_order = ?, setup = ? WHERE terminal_id = ?",
            (where, deadline, order, setup, terminal_id),
        )

    async def begin(self, terminal_id: str, step: StepRecord, *, is_answer: bool) -> None:
        """A step begins."""
        statements: list[Statement] = [
            (
                "INSERT INTO terminal_steps (terminal_id, number, step_id, digest, action) VALUES (?, ?, ?, ?, ?)",
                (terminal_id, step.number, step.step_id, step.digest, step.action),
            )
        ]
        statements.append(
            (
                "UPDATE terminals SET steps = ?, answered = ? WHERE terminal_id = ?",
                (step.number, int(is_answer), terminal_id),
            )
        )
        await self._journal.write(statements)

    async def done(self, terminal_id: str, step_id: str, result: bytes, shell: tuple[int, int]) -> None:
        """A command's result, and the shell's state after it."""
        await self._journal.execute(
            "UPDATE terminal_steps SET result = ?, shell = ?, action = NULL WHERE terminal_id = ? AND step_id = ?",
            (result, json.dumps(shell), terminal_id, step_id),
        )

    async def ended(self, terminal_id: str, outcome: bytes, verification: bytes, results: Mapping[str, bytes]) -> None:
        """The episode's end, with the results, by step id, of the steps that end with it."""
        statements: list[Statement] = [
            (
                "UPDATE terminals SET outcome = ?, end_time = ?, verification = ?, ready_order = NULL"
                " WHERE terminal_id = ? AND outcome IS NULL",
                (outcome, time.time(), verification, terminal_id),
            )
        ]
        statements += [
            (
                "UPDATE terminal_steps SET result = ?, action = NULL WHERE terminal_id = ? AND step_id = ?",
                (result, terminal_id, step_id),
            )
            for step_id, result in results.items()
        ]
        past = "SELECT terminal_id FROM terminals WHERE remembers = 1 AND end_time < ?"
        until = (time.time() - KEPT_S,)
        statements.append((f"DELETE FROM terminal_steps WHERE terminal_id IN ({past})", until))  # noqa: S608 - fixed
        statements.append(("UPDATE terminals SET remembers = 0 WHERE remembers = 1 AND end_time < ?", until))
        await self._journal.write(statements)

    async def released(self, terminal_id: str) -> None:
        """The episode's sandbox is gone."""
        await self._journal.execute("UPDATE terminals SET released = 1 WHERE terminal_id = ?", (terminal_id,))

    async def is_unreleased(self, terminal_id: str) -> bool:
        """Whether the episode is known and may have a sandbox."""
        sql = "SELECT 1 FROM terminals WHERE terminal_id = ? AND released = 0"
        return bool(await self._journal.query(sql, (terminal_id,)))

    async def get(self, terminal_id: str) -> TerminalRecord:
        """One episode; NotFound (TERMINAL_UNKNOWN), also for one that is still being opened."""
        rows = await self._journal.query(f"{_TERMINALS} WHERE terminal_id = ?", (terminal_id,))
        if not rows or (rows[0]["place"] is None and rows[0]["outcome"] is None):
            raise NotFound("there is no such terminal", reason="TERMINAL_UNKNOWN")
        return _terminal(rows[0])

    async def unreleased(self) -> list[TerminalRecord]:
        """Episodes that are not known to have ended and to have no sandbox."""
        return [_terminal(row) for row in await self._journal.query(f"{_TERMINALS} WHERE released = 0 ORDER BY number")]

    async def steps(self, terminal_id: str) -> Sequence[StepRecord]:
        """An episode's steps in order."""
        sql = "SELECT * FROM terminal_steps WHERE terminal_id = ? ORDER BY number"
        return [_step(row) for row in await self._journal.query(sql, (terminal_id,))]

    async def step(self, terminal_id: str, step_id: str) -> StepRecord | None:
        """One step."""
        sql = "SELECT * FROM terminal_steps WHERE terminal_id = ? AND step_id = ?"
        rows = await self._journal.query(sql, (terminal_id, step_id))
        return _step(rows[0]) if rows else None


_TERMINALS: Final = "SELECT * FROM terminals"


def _terminal(row: Row) -> TerminalRecord:
    return TerminalRecord(
        terminal_id=row["terminal_id"],
        request_id=row["request_id"],
        labels=json.loads(row["labels"]),
        shown=row["shown"],
        create_time=row["create_time"],
        order=row["ready_order"],
        place=None if row["place"] is None else PlaceRecord(*json.loads(row["place"])),
        deadline=row["deadline"],
        answered=bool(row["answered"]),
        outcome=row["outcome"],
        end_time=row["end_time"],
        setup=row["setup"] or b"",
        verification=row["verification"] or b"",
        released=bool(row["released"]),
        step_count=row["steps"],
    )


def _step(row: Row) -> StepRecord:
    shell = None if row["shell"] is None else json.loads(row["shell"])
    return StepRecord(
        number=row["number"],
        step_id=row["step_id"],
        digest=row["digest"],
        action=row["action"],
        result=row["result"],
        shell=None if shell is None else (shell[0], shell[1]),
    )
