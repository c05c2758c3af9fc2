"""Annotations of ended rollouts: checked, all or none, bounded, in order, replaced in their place, gone with theirs."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.trajectory.v1.trajectory_pb2 import Annotation
from penstock_chassis import times
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.records import Record, RequestKey, RolloutEnd
from penstock_driver.store import annotations as rows
from penstock_driver.store.annotations import Annotations
from penstock_driver.store.event_log import EventLog
from penstock_driver.store.records import Records
from penstock_driver.trajectories import annotating
from penstock_driver.trajectories.annotating import MAX_DETAILS_BYTES, MAX_NAME, MOST, Annotator
from penstock_driver.trajectories.reading import fragments

pytestmark = pytest.mark.requirement("R135")
TOKENS = 2


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def one(name: str = "helpful", author: str = "judge", **fields: Any) -> Annotation:
    return Annotation(name=name, author=author, **({"value": 1.0} | fields))


def nested(levels: int) -> Annotation:
    made = one()
    struct_ = made.details
    for _ in range(levels - 1):
        struct_ = struct_.get_or_create_struct("a")
    struct_.update({"b": 1})
    return made


class Captured:
    """The calls of one rollout, as its gate has them: c0 sampled two tokens, c1 has no answer."""

    def __init__(self) -> None:
        self.calls: list[trajectory_pb2.Call] | None = [trajectory_pb2.Call(call_id=f"c{n}", index=n) for n in (0, 1)]
        self.calls[0].completion.span.count = TOKENS

    async def capture(self, rollout_id: str, **_: object) -> AsyncIterator[trajectory_pb2.Trajectory]:
        if self.calls is None:
            raise NotFound("no such rollout", reason="ROLLOUT_UNKNOWN")
        yield trajectory_pb2.Trajectory(calls=self.calls)


@dataclass
class World:
    """A journal with an ended rollout."""

    records: Records
    record: Record
    captures: Any
    stored: Annotations
    annotator: Annotator

    async def annotate(self, *given: Annotation) -> None:
        await self.annotator.annotate(self.record, given)

    async def all(self) -> list[Annotation]:
        return [one async for some in self.stored.fragments(self.record.rollout_id) for one in some]

    async def values(self) -> list[tuple[str, float]]:
        return [(found.name, found.value) for found in await self.all()]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        records, history, captures = Records(journal), EventLog(journal), Captured()
        of_spec: Any = {"spec": rollout_pb2.RolloutSpec(), "create_time": 1.0, "labels": {}}
        record = Record("r1", None, 0, None, "t1", "shell", "00", **of_spec)
        await records.create(RequestKey("q", "d"), [record])
        history.end("r1", None, RolloutEnd(rollout_pb2.Outcome(), {}, 0))
        await history.flush()
        stored = Annotations(journal)
        yield World(records, await records.get("r1"), captures, stored, Annotator(stored, captures))  # type: ignore[arg-type]
        await history.aclose()


async def test_a_later_annotation_of_one_name_author_and_call_takes_the_place_of_the_earlier(world: World) -> None:
    """Others of the same name are by another author, or about another call."""
    await world.annotate(one("a"), one("b"), one("a", "critic"), one("a", call_id="c0", token_values=floats(1, 2)))
    await world.annotate(one("c"), one("a", value=0.0))
    assert await world.values() == [("a", 0.0), ("b", 1.0), ("a", 1.0), ("a", 1.0), ("c", 1.0)]
    assert [found.author for found in await world.all()][2] == "critic"
    assert [found.token_values for found in await world.all() if found.call_id] == [floats(1, 2)]


async def test_a_repeat_changes_nothing(world: World) -> None:
    """Not even the time."""
    first = one("a", details={"why": "clear"})
    await world.annotate(first)
    before = await world.all()
    await world.annotate(first, one("b"))
    assert (await world.all())[:1] == before and before[0].HasField("create_time")


INVALID: Final = [
    (one(""), "name"),
    (one("a" * (MAX_NAME + 1)), "name"),
    (one("a\n"), "name"),
    (one(author=""), "author"),
    (one(call_id=""), "call_id"),
    (one(value=math.nan), "value"),
    (one(value=-math.inf), "value"),
    (Annotation(name="a", author="b"), "value"),
    (one(token_values=floats(1, 2)), "token_values"),
    (one(call_id="c0", token_values=b"123"), "token_values"),
    (one(call_id="c0", token_values=floats(1, math.nan)), "token_values"),
    (one(call_id="c0", token_values=floats(-math.inf, 1)), "token_values"),
    (one(call_id="c0", token_values=floats(1)), "token_values"),
    (one(call_id="c1", token_values=floats(1)), "token_values"),
    (one(details={"a": "x" * MAX_DETAILS_BYTES}), "details"),
    (one(details={"a": [0] * MAX_DETAILS_BYTES}), "details"),
    (one(details={"a": math.nan}), "details"),
    (nested(25), "details"),
    (one(chain_sha256=b"x" * 32), "chain_sha256"),
    (one(create_time=times.timestamp(1.0)), "create_time"),
]


async def test_an_invalid_annotation_is_refused_with_its_field_and_none_is_added(world: World) -> None:
    for annotation, field in INVALID:
        with pytest.raises(InvalidArgument) as caught:
            await world.annotate(one("good"), annotation)
        assert [violation.field for violation in caught.value.violations] == [f"annotations[1].{field}"]
    assert not await world.all()


async def test_what_is_just_valid_is_kept_as_it_was_given(world: World) -> None:
    largest, least = struct.unpack("<2f", b"\xff\xff\x7f\x7f\x01\x00\x00\x80")
    tokens = one("t", call_id="c0", token_values=floats(largest, least))
    await world.annotate(nested(24), tokens, one("d", "j" * MAX_NAME, details={"a": None}))
    found = await world.all()
    for kept in found:
        kept.ClearField("create_time")
    assert found[0] == nested(24) and found[1] == tokens and found[2].details["a"] is None


async def test_a_call_that_is_not_there_or_a_name_twice_adds_nothing(world: World) -> None:
    with pytest.raises(NotFound, match=r"annotations\[1\].call_id.* has no call c9") as caught:
        await world.annotate(one(), one(call_id="c9"))
    assert caught.value.reason == "CALL_UNKNOWN"
    with pytest.raises(InvalidArgument, match=r"has the name, author and call of annotations\[0\]"):
        await world.annotate(one(), one(value=2.0))
    with pytest.raises(InvalidArgument, match="expected 1 to 1024"):
        await world.annotate()
    assert not await world.all()


async def test_a_trajectory_that_is_gone_is_not_annotated(world: World) -> None:
    world.captures.calls = None
    with pytest.raises(FailedPrecondition) as caught:
        await world.annotate(one())
    assert caught.value.reason == "TRAJECTORY_ABSENT" and not await world.all()


async def test_the_number_and_the_bytes_of_annotations_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement counts instead of what it replaces."""
    await world.annotate(*(one(f"n{number}") for number in range(MOST)))
    with pytest.raises(ResourceExhausted, match="1025 annotations") as caught:
        await world.annotate(one("n0", value=0.0), one("more"))
    assert caught.value.reason == "ANNOTATION_LIMIT"
    await world.annotate(one("n0", value=5.0))
    assert (await world.values())[0] == ("n0", 5.0) and len(await world.all()) == MOST
    size = sum(found.ByteSize() for found in await world.all()) + 16  # a time takes some bytes more or less
    monkeypatch.setattr(annotating, "MOST_BYTES", size)
    await world.annotate(one("n0", value=6.0))
    with pytest.raises(ResourceExhausted, match=f"at most {size} are allowed"):
        await world.annotate(one("n0", value=7.0, details={"why": "x" * 40}))
    assert (await world.values())[0] == ("n0", 6.0)


async def test_requests_at_once_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotating, "MOST_ASKED", 0)
    with pytest.raises(ResourceExhausted) as caught:
        await world.annotate(one())
    assert (caught.value.reason, caught.value.retry_after_s) == ("ANNOTATION_LIMIT", 1.0)


async def test_annotations_go_with_their_rollout(world: World) -> None:
    """One of the same id that comes later has none of them, and gets none of a request about the earlier one."""
    await world.annotate(one())
    await world.records.delete(world.record.rollout_id)
    assert not await world.all()
    with pytest.raises(NotFound) as caught:
        await world.annotate(one())
    assert caught.value.reason == "ROLLOUT_UNKNOWN" and not await world.all()


async def test_a_trajectory_ends_with_its_annotations_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FRAGMENT_BYTES", 100)
    await world.annotate(*(one(f"n{number}", details={"why": "x" * 40}) for number in range(3)))
    pieces = [
        piece
        async for piece in fragments(
            world.captures, world.stored, world.record, include_bodies=False, include_top=False
        )
    ]
    assert [len(piece.calls) for piece in pieces] == [2, 0, 0, 0]
    assert [[found.name for found in piece.annotations] for piece in pieces] == [[], ["n0"], ["n1"], ["n2"]]
