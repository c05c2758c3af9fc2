"""The files of images, which the driver asks gates for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from penstock.chat.v1 import chat_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import NotFound
from penstock_driver.trajectories import media
from penstock_driver.trajectories.media import MediaFiles

pytestmark = pytest.mark.requirement("R137")


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Gate:
    """Rollouts with the same calls, each of which has three images of its own."""

    def __init__(self, calls: int) -> None:
        self.images = {f"c{call}": [b"%d-%d" % (call, image) for image in range(3)] for call in range(calls)}
        self.captures = 0
        self.asked: list[str] = []
        self.is_there = True

    async def capture(self, rollout_id: str, **_: object) -> AsyncIterator[trajectory_pb2.Trajectory]:
        self.captures += 1
        for call_id, images in self.images.items():
            call = trajectory_pb2.Call(call_id=call_id, media=[chat_pb2.Media(sha256=digest(one)) for one in images])
            yield trajectory_pb2.Trajectory(calls=[call])

    async def media(self, rollout_id: str, call_id: str, *, gate: str) -> Sequence[chat_pb2.Media]:
        self.asked.append(call_id)
        if not self.is_there:
            raise NotFound("no such call", reason="CALL_UNKNOWN")
        return [chat_pb2.Media(sha256=digest(one), data=one) for one in self.images[call_id]]


class Ended:
    """What is read of a record."""

    home = None

    def __init__(self, rollout_id: str, namespace: str = "team") -> None:
        self.rollout_id, self.namespace = rollout_id, namespace


async def read(files: MediaFiles, data: bytes, rollout_id: str = "r", namespace: str = "team") -> bytes:
    ended: Any = Ended(rollout_id, namespace)
    return b"".join([piece async for piece in files.file(ended, digest(data))])


async def test_all_images_are_read_with_one_capture_and_one_answer_of_each_call() -> None:
    gate: Any = Gate(calls=4)
    files = MediaFiles(gate)
    for images in gate.images.values():
        for one in images:
            assert await read(files, one) == one
    assert (gate.captures, gate.asked) == (1, ["c0", "c1", "c2", "c3"])


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_KEPT_BYTES", 9)
    monkeypatch.setattr(media, "_KEPT_ROLLOUTS", 1)
    gate: Any = Gate(calls=2)
    files = MediaFiles(gate)
    for rollout_id, data in (("r", b"0-0"), ("r", b"1-0"), ("r", b"0-1"), ("s", b"0-2"), ("r", b"0-2")):
        assert await read(files, data, rollout_id) == data
    assert (gate.captures, gate.asked) == (3, ["c0", "c1", "c0", "c0", "c0"])
    monkeypatch.setattr(media, "_KEPT_BYTES", 0)
    assert await read(files, b"1-2") == b"1-2"


@pytest.mark.requirement("R29")
async def test_readers_that_do_not_read_on_block_no_other_namespace() -> None:
    """Nor the next reader of their own, while few wait. One that leaves makes room."""
    gate: Any = Gate(calls=2)
    ended: Any = Ended("r")
    files = MediaFiles(gate)
    async with AsyncExitStack() as stack:
        slow = []
        for _ in range(16):
            reader: Any = await stack.enter_async_context(aclosing(files.file(ended, digest(b"0-0"))))
            assert await anext(reader) == b"0-0"
            slow.append(reader)
        assert await read(files, b"0-0", "s", "other") == b"0-0"
        waiting = asyncio.ensure_future(read(files, b"1-0"))
        assert await read(files, b"1-0", "s", "other") == b"1-0" and not waiting.done()
        await slow[0].aclose()
        assert await waiting == b"1-0"


async def test_an_image_that_is_not_there_any_more_or_never_was_is_unknown() -> None:
    gate: Any = Gate(calls=1)
    files = MediaFiles(gate)
    gate.is_there = False
    for data in (b"0-0", b"9-9"):
        with pytest.raises(NotFound) as error:
            await read(files, data)
        assert error.value.reason == "MEDIA_UNKNOWN"
    gate.is_there = True
    gate.images["c1"] = [b"late"]
    assert await read(files, b"late") == b"late"
