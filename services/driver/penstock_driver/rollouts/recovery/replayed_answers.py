"""The answers that a rollout replays, in a file of the driver until the rollout ends: those of its earlier attempts,
and those of its parent, if it is a branch.

The file is written before the gate deletes the last attempt's capture, so a driver that is killed in between does not
lose it. An attempt that ended before it had asked again what is recorded leaves the file as it is.

The format: for each part, its length as 4 bytes, big-endian, and a serialised LoadRecordingRequest.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO, Final

from google.protobuf.message import DecodeError

from penstock.chat.v1 import completion_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_driver.grading.carried import file_stem

PART_BYTES: Final = 8 << 20
"""Size of a part, unless one call is larger."""
_LENGTH: Final = struct.Struct(">I")
_SUFFIX: Final = ".recording"


class RecordingFile:
    """The recording of one rollout, in `directory`."""

    def __init__(self, directory: Path, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._path = directory / f"{file_stem(rollout_id)}{_SUFFIX}"

    @property
    def is_there(self) -> bool:
        """Whether it was written."""
        return self._path.is_file()

    async def write(
        self,
        captured: AsyncIterator[trajectory_pb2.Trajectory],
        attempt: int,
        *,
        exact: bool,
        results: Callable[[], AsyncIterator[trajectory_pb2.HostToolCall]] | None = None,
    ) -> None:
        """Write the answered calls of an attempt's capture, unless the file has more of them already.

        `results` yields its host tool calls with their results, and is asked only if it has some; None = they are left
        out. OSError if the disk refuses.
        """
        temporary = self._path.with_suffix(".new")
        try:
            with self._opened(temporary) as file:
                head = self._head(self._rollout_id, attempt, exact=exact)
                count = await _write_parts(file, _answered(captured, results), head)
            if count and count >= await self._known():
                temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    async def write_branch(
        self,
        captured: AsyncIterator[trajectory_pb2.Trajectory],
        parent: tuple[str, int],
        wanted: Callable[[trajectory_pb2.Call], bool],
        answer: completion_pb2.Completion | None,
        *,
        exact: bool,
        results: Callable[[], AsyncIterator[trajectory_pb2.HostToolCall]] | None = None,
        grow: Callable[[int], None] = lambda _: None,
    ) -> trajectory_pb2.Call:
        """Write what a branch is answered: the answered calls of its parent before the wanted one, then that one, with
        `answer` or without any, and what hosts had answered the parent until that one.

        `parent` is a rollout and its attempt that is captured; `results` yields its host tool calls with their results.
        `grow` is called with further bytes before they are written, and may refuse them. The file is on disk on return.
        Returns the parent's call.

        NotFound (CALL_UNKNOWN); FailedPrecondition (CALL_UNANSWERED): the gate has no prompt of it. OSError.
        """
        found: trajectory_pb2.Call | None = None

        async def items() -> AsyncIterator[trajectory_pb2.Call | trajectory_pb2.HostToolCall]:
            nonlocal found
            async with aclosing(_calls(captured)) as given:
                async for call in given:
                    if wanted(call):
                        found = call
                        yield _point(call, answer)
                        break
                    if call.HasField("completion"):
                        call.ClearField("branch_point")  # the parent's own, if it is a branch itself
                        yield call
            if found is not None and results is not None:
                async for tool_call in results():
                    ended = tool_call.HasField("end_time")
                    if ended and tool_call.end_time.ToNanoseconds() <= found.receive_time.ToNanoseconds():
                        yield tool_call

        with self._opened(self._path) as file:
            await _write_parts(file, items(), self._head(*parent, exact=exact), grow)
            await asyncio.to_thread(_sync, file)
        if found is None:
            raise NotFound(
                "the last attempt of the rollout has no such call: `penstock replay ROLLOUT --all` lists its calls",
                reason="CALL_UNKNOWN",
            )
        if not found.HasField("completion"):
            state = found.end_reason or "it waits for its answer"
            message = f"call {found.index} has no answer ({state}), so it has no recorded prompt: choose another call"
            raise FailedPrecondition(message, reason="CALL_UNANSWERED")
        return found

    def is_shared_with(self, rollout_id: str) -> bool:
        """Whether another rollout has the same file."""
        try:
            return self._path.samefile(self._path.with_name(f"{file_stem(rollout_id)}{_SUFFIX}"))
        except FileNotFoundError:
            return False

    def identity(self) -> tuple[int, int] | None:
        """The number of its inode, the same under every name, and its size in bytes; None if it was not written."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size

    def share(self, rollout_ids: Iterable[str]) -> None:
        """Give the same file to other rollouts, without a copy. OSError."""
        for rollout_id in rollout_ids:
            name = self._path.with_name(f"{file_stem(rollout_id)}{_SUFFIX}")
            temporary = name.with_suffix(".link")
            temporary.unlink(missing_ok=True)
            temporary.hardlink_to(self._path)
            temporary.replace(name)

    def parts(self) -> Iterator[rollout_gate_service_pb2.LoadRecordingRequest]:
        """Yield the requests that load it. OSError; ValueError for what is no such file."""
        offset = 0
        while (found := self.part(offset)) is not None:
            part, offset = found
            yield part

    def part(self, offset: int) -> tuple[rollout_gate_service_pb2.LoadRecordingRequest, int] | None:
        """The request at a byte offset, and the offset of the next one; None at the end. Raises as `parts` does."""
        with self._path.open("rb") as file:
            file.seek(offset)
            if not (head := file.read(_LENGTH.size)):
                return None
            (size,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (-1,)
            data = file.read(size) if size >= 0 else b""
            if len(data) != size:
                raise ValueError("the recording is cut off")
            try:
                part = rollout_gate_service_pb2.LoadRecordingRequest.FromString(data)
            except DecodeError as error:
                raise ValueError("the recording is damaged") from error
            part.rollout_id = self._rollout_id  # branches share a file
            return part, offset + len(head) + size

    async def count(self) -> int:
        """How many calls it has; OSError, and ValueError for what is no whole file."""
        return await asyncio.to_thread(lambda: sum(len(part.calls) for part in self.parts()))

    async def attempt(self) -> int:
        """The attempt of this rollout whose answers it has, from 1; 0 if it has its parent's, or is no whole file."""

        def first() -> int:
            part = next(self.parts(), None)
            is_own = part is not None and part.recorded_rollout_id == self._rollout_id
            return part.recorded_attempt if part is not None and is_own else 0

        with suppress(OSError, ValueError):
            return await asyncio.to_thread(first)
        return 0

    async def _known(self) -> int:
        with suppress(FileNotFoundError, ValueError):
            return await self.count()
        return 0

    def remove(self) -> None:
        """Remove the file; idempotent."""
        with suppress(OSError):  # the next start removes it
            self._path.unlink(missing_ok=True)

    def _opened(self, path: Path) -> BinaryIO:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")

    def _head(self, rollout_id: str, attempt: int, *, exact: bool) -> rollout_gate_service_pb2.LoadRecordingRequest:
        return rollout_gate_service_pb2.LoadRecordingRequest(
            rollout_id=self._rollout_id, recorded_rollout_id=rollout_id, recorded_attempt=attempt, exact=exact
        )


async def _calls(captured: AsyncIterator[trajectory_pb2.Trajectory]) -> AsyncGenerator[trajectory_pb2.Call, None]:
    async for fragment in captured:
        for call in fragment.calls:
            yield call


async def _answered(
    captured: AsyncIterator[trajectory_pb2.Trajectory],
    results: Callable[[], AsyncIterator[trajectory_pb2.HostToolCall]] | None,
) -> AsyncGenerator[trajectory_pb2.Call | trajectory_pb2.HostToolCall, None]:
    has_tools = False
    async for fragment in captured:
        has_tools |= bool(fragment.host_tool_calls)
        for call in fragment.calls:
            if call.HasField("completion"):
                yield call
    if has_tools and results is not None:
        async for tool_call in results():
            yield tool_call


def _point(call: trajectory_pb2.Call, answer: completion_pb2.Completion | None) -> trajectory_pb2.Call:
    """The call at which a branch leaves its parent, as the gate is to load it."""
    point = trajectory_pb2.Call()
    point.CopyFrom(call)
    for name in ("completion", "replayed_from", "injected", "given"):
        point.ClearField(name)
    point.branch_point = True
    if answer is not None:
        point.completion.CopyFrom(answer)
        point.injected, point.given, point.answerer = True, True, trajectory_pb2.ANSWERER_TRAINER
    return point


async def _write_parts(
    file: BinaryIO,
    items: AsyncIterator[trajectory_pb2.Call | trajectory_pb2.HostToolCall],
    head: rollout_gate_service_pb2.LoadRecordingRequest,
    grow: Callable[[int], None] = lambda _: None,
) -> int:
    """Append the requests that load these calls and host tool calls; return how many calls of the model there are."""
    part, size, count = rollout_gate_service_pb2.LoadRecordingRequest(), 0, 0
    part.CopyFrom(head)
    async for item in items:
        own = item.ByteSize()
        if size and size + own > PART_BYTES:
            await _append(file, part, grow)
            part.CopyFrom(head)
            size = 0
        if isinstance(item, trajectory_pb2.Call):
            part.calls.append(item)
            count += 1
        else:
            part.host_tool_calls.append(item)
        size += own
    if size:
        await _append(file, part, grow)
    return count


async def _append(
    file: BinaryIO, part: rollout_gate_service_pb2.LoadRecordingRequest, grow: Callable[[int], None]
) -> None:
    data = part.SerializeToString()
    grow(_LENGTH.size + len(data))
    await asyncio.to_thread(file.writelines, (_LENGTH.pack(len(data)), data))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
