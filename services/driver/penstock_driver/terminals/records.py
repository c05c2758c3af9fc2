"""The driver's records of terminal episodes and their steps: rows of the journal.

Invariants: a step is on disk before its command starts, and its result before it is returned. The result of a final
answer and the end of its episode are written atomically. What an open episode needs to continue (`request`, and the
actions of its steps) is sealed, and erased at its end; what clients see of it stays, the results of its steps for
KEPT_S. All of it is serialized messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sqlite3 import IntegrityError, Row
from typing import Final

import structlog
from google.protobuf.message import Message

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock_chassis import times
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import AlreadyExists, NotFound
from penstock_chassis.journal import Journal, Statement
from penstock_driver.domain.records import RequestKey
from penstock_driver.store.records import parsed_outcome
from penstock_driver.store.seal import Seal, SealBroken, is_sealed

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

_log = structlog.get_logger("penstock.driver")

KEPT_S: Final = 86_400.0
"""How long after an episode's end a repeated step still gets its first answer."""


@dataclass(frozen=True, slots=True)
class PlaceRecord:
    """The sandbox of an open episode."""

    sandbox_id: str
    workdir: str
    shell_directory: str
    home: str = ""
    """Empty for an episode that an earlier version opened."""
    service: str = ""
    """Name of the sandbox service; empty as above."""


@dataclass(frozen=True, slots=True)
class TerminalRecord:
    """A recorded episode; times in seconds since the epoch.

    `public` is the part of its spec that clients see. `place` is None while the episode is being opened. `request` is
    None for an episode that cannot continue after a restart. `grading` is set once its verifier may have begun;
    `earlier` marks what an earlier version opened, which did not record that. `setup` and `verification` have the
    results of commands in their field `verifier_commands`. `outcome` is set once it has ended, `released` once its
    sandbox is gone as well.
    """

    terminal_id: str
    request_id: str
    labels: Mapping[str, str]
    public: terminal_service_pb2.Terminal = field(repr=False)
    create_time: float
    request: terminal_service_pb2.OpenTerminalRequest | None = field(default=None, repr=False)
    place: PlaceRecord | None = None
    deadline: float | None = None
    answered: bool = False
    grading: bool = False
    earlier: bool = False
    outcome: rollout_pb2.Outcome | None = None
    end_time: float | None = None
    setup: terminal_service_pb2.Terminal = field(default_factory=terminal_service_pb2.Terminal, repr=False)
    verification: terminal_service_pb2.Terminal = field(default_factory=terminal_service_pb2.Terminal, repr=False)
    released: bool = False
    step_count: int = 0

    @property
    def namespace(self) -> str:
        """Of an episode that an earlier version opened: the default one."""
        return self.public.namespace or DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A recorded step. `result` is None until it is done; `shell` is `[saved_by, last_code]` after it."""

    number: int
    step_id: str
    digest: str
    action: terminal_service_pb2.StepRequest | None = field(default=None, repr=False)
    result: terminal_service_pb2.StepResponse | None = field(default=None, repr=False)
    shell: tuple[int, int] | None = None


class TerminalRecords:
    """Episodes and their steps."""

    def __init__(self, journal: Journal, seal: Seal) -> None:
        self._journal = journal
        self._seal = seal

    async def namespace_of(self, terminal_id: str) -> str | None:
        """The namespace of an episode; None if there is no such episode."""
        rows = await self._journal.query(f"{_TERMINALS} WHERE terminal_id = ?", (terminal_id,))
        return self._terminal(rows[0]).namespace if rows else None

    async def create(self, record: TerminalRecord, key: RequestKey) -> None:
        """Record an episode that is being opened, and its request; AlreadyExists (ROLLOUT_EXISTS) if known."""
        values = (
            record.terminal_id,
            record.request_id,
            json.dumps(dict(record.labels)),
            record.public.SerializeToString(),
        )
        try:
            await self._journal.write(
                [
                    (
                        "INSERT INTO requests VALUES (?, ?, ?, ?)",
                        (key.namespace, key.request_id, key.digest, record.terminal_id),
                    ),
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
        """Forget the request of a failed opening, so it may open another episode; the record stays until `forget`."""
        await self._journal.execute(*_request_forgotten(record))

    async def forget(self, record: TerminalRecord) -> None:
        """Delete the record of a failed opening, once its sandbox is gone."""
        await self._journal.write(
            [
                _request_forgotten(record),
                ("DELETE FROM terminals WHERE terminal_id = ?", (record.terminal_id,)),
            ]
        )

    async def opened(
        self,
        terminal_id: str,
        place: PlaceRecord,
        deadline: float,
        request: terminal_service_pb2.OpenTerminalRequest | None,
        setup: terminal_service_pb2.Terminal,
    ) -> None:
        """Record that the episode is open; `request` is what it needs to continue after a restart."""
        where = json.dumps([place.sandbox_id, place.workdir, place.shell_directory, place.home, place.service])
        await self._journal.execute(
            "UPDATE terminals SET place = ?, deadline = ?, ready_order = ?, setup = ? WHERE terminal_id = ?",
            (where, deadline, self._sealed(terminal_id, request), setup.SerializeToString(), terminal_id),
        )

    async def begin(self, terminal_id: str, step: StepRecord, *, is_answer: bool) -> None:
        statements: list[Statement] = [
            (
                "INSERT INTO terminal_steps (terminal_id, number, step_id, digest, action) VALUES (?, ?, ?, ?, ?)",
                (terminal_id, step.number, step.step_id, step.digest, self._sealed(terminal_id, step.action)),
            )
        ]
        statements.append(
            (
                "UPDATE terminals SET steps = ?, answered = ? WHERE terminal_id = ?",
                (step.number, int(is_answer), terminal_id),
            )
        )
        await self._journal.write(statements)

    async def grading(self, terminal_id: str) -> None:
        """Record that the verifier of an answered episode begins."""
        await self._journal.execute("UPDATE terminals SET answered = 2 WHERE terminal_id = ?", (terminal_id,))

    async def done(
        self, terminal_id: str, step_id: str, result: terminal_service_pb2.StepResponse, shell: tuple[int, int]
    ) -> None:
        """Record a command's result, and the shell's state after it."""
        await self._journal.execute(
            "UPDATE terminal_steps SET result = ?, shell = ?, action = NULL WHERE terminal_id = ? AND step_id = ?",
            (result.SerializeToString(), json.dumps(shell), terminal_id, step_id),
        )

    async def ended(
        self,
        terminal_id: str,
        outcome: rollout_pb2.Outcome,
        verification: terminal_service_pb2.Terminal,
        results: Mapping[str, terminal_service_pb2.StepResponse],
    ) -> None:
        """Record the episode's end, with the results, by step id, of the steps that end with it."""
        statements: list[Statement] = [
            (
                "UPDATE terminals SET outcome = ?, end_time = ?, verification = ?, ready_order = NULL"
                " WHERE terminal_id = ? AND outcome IS NULL",
                (outcome.SerializeToString(), times.even_time(), verification.SerializeToString(), terminal_id),
            )
        ]
        statements += [
            (
                "UPDATE terminal_steps SET result = ?, action = NULL WHERE terminal_id = ? AND step_id = ?",
                (result.SerializeToString(), terminal_id, step_id),
            )
            for step_id, result in results.items()
        ]
        past = "SELECT terminal_id FROM terminals WHERE remembers = 1 AND end_time < ?"
        until = (times.even_time() - KEPT_S,)
        statements.append((f"DELETE FROM terminal_steps WHERE terminal_id IN ({past})", until))  # noqa: S608 - fixed
        statements.append(("UPDATE terminals SET remembers = 0 WHERE remembers = 1 AND end_time < ?", until))
        await self._journal.write(statements)

    async def released(self, terminal_id: str) -> None:
        """Record that the episode's sandbox is gone."""
        await self._journal.execute("UPDATE terminals SET released = 1 WHERE terminal_id = ?", (terminal_id,))

    async def is_unreleased(self, terminal_id: str) -> bool:
        """Whether the episode is known and may have a sandbox."""
        sql = "SELECT 1 FROM terminals WHERE terminal_id = ? AND released = 0"
        return bool(await self._journal.query(sql, (terminal_id,)))

    async def get(self, terminal_id: str) -> TerminalRecord:
        """One episode; NotFound (TERMINAL_UNKNOWN), also while it is being opened."""
        rows = await self._journal.query(f"{_TERMINALS} WHERE terminal_id = ?", (terminal_id,))
        if not rows or (rows[0]["place"] is None and rows[0]["outcome"] is None):
            raise NotFound(f"there is no terminal {terminal_id}", reason="TERMINAL_UNKNOWN")
        return self._terminal(rows[0])

    async def unreleased(self) -> list[TerminalRecord]:
        """Episodes that have not ended, or that may still have a sandbox."""
        return [
            self._terminal(row) for row in await self._journal.query(f"{_TERMINALS} WHERE released = 0 ORDER BY number")
        ]

    async def steps(self, terminal_id: str) -> Sequence[StepRecord]:
        """An episode's steps in order."""
        sql = "SELECT * FROM terminal_steps WHERE terminal_id = ? ORDER BY number"
        return [self._step(row) for row in await self._journal.query(sql, (terminal_id,))]

    async def step(self, terminal_id: str, step_id: str) -> StepRecord | None:
        sql = "SELECT * FROM terminal_steps WHERE terminal_id = ? AND step_id = ?"
        rows = await self._journal.query(sql, (terminal_id, step_id))
        return self._step(rows[0]) if rows else None

    def _terminal(self, row: Row) -> TerminalRecord:
        request = self._opened(row["terminal_id"], row["ready_order"])
        return TerminalRecord(
            terminal_id=row["terminal_id"],
            request_id=row["request_id"],
            labels=json.loads(row["labels"]),
            public=terminal_service_pb2.Terminal.FromString(row["shown"]),
            create_time=row["create_time"],
            request=None if request is None else terminal_service_pb2.OpenTerminalRequest.FromString(request),
            place=None if row["place"] is None else PlaceRecord(*json.loads(row["place"])),
            deadline=row["deadline"],
            answered=bool(row["answered"]),
            grading=row["answered"] == 2,
            earlier=row["ready_order"] is None or not is_sealed(row["ready_order"]),
            outcome=parsed_outcome(row["outcome"]),
            end_time=row["end_time"],
            setup=terminal_service_pb2.Terminal.FromString(row["setup"] or b""),
            verification=terminal_service_pb2.Terminal.FromString(row["verification"] or b""),
            released=bool(row["released"]),
            step_count=row["steps"],
        )

    def _step(self, row: Row) -> StepRecord:
        action = self._opened(row["terminal_id"], row["action"])
        shell = None if row["shell"] is None else json.loads(row["shell"])
        return StepRecord(
            number=row["number"],
            step_id=row["step_id"],
            digest=row["digest"],
            action=None if action is None else terminal_service_pb2.StepRequest.FromString(action),
            result=None if row["result"] is None else terminal_service_pb2.StepResponse.FromString(row["result"]),
            shell=None if shell is None else (shell[0], shell[1]),
        )

    def _sealed(self, terminal_id: str, message: Message | None) -> bytes | None:
        return None if message is None else self._seal.seal(message.SerializeToString(), terminal_id)

    def _opened(self, terminal_id: str, data: bytes | None) -> bytes | None:
        """What was sealed, or kept as it is by an earlier version; None if it cannot be opened."""
        if data is None or not is_sealed(data):
            return data
        try:
            return self._seal.open(data, terminal_id)
        except SealBroken as error:
            _log.warning("an episode cannot go on", terminal_id=terminal_id, error=str(error))
            return None


_TERMINALS: Final = "SELECT * FROM terminals"


def _request_forgotten(record: TerminalRecord) -> Statement:
    return (
        "DELETE FROM requests WHERE namespace = ? AND request_id = ? AND resource_id = ?",
        (record.namespace, record.request_id, record.terminal_id),
    )
