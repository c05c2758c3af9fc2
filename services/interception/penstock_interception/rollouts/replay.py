"""Replay: answers of an earlier attempt answer the same prompts again, without sampling.

A recorded call is found by the token ids of its prompt, which hold the whole conversation before it. So it does not
matter in which order the agent's branches ask. Where no recorded call has the prompt of a new one, that one is sampled;
if recorded calls are left at its place, the two attempts have diverged there, and the first token that differs is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import orjson

from penstock.chat.v1 import chat_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock_chassis.validation import invalid_field
from penstock_interception.domain.calls import Answerer
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.host_tools import ToolResult
from penstock_interception.domain.recordings import (
    MAX_DIVERGENCES,
    MAX_RECORDED_CALLS,
    Divergence,
    Origin,
    Point,
    RecordedCall,
    RecordedTool,
    Recording,
    ReplayedResult,
)
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph.paths import NO_TOKENS, common_prefix
from penstock_interception.graph.values import CallClass, IntArray, Plan, little_endian, prompt_identity
from penstock_interception.rollouts.conversations import Conversation
from penstock_interception.store.commits import durable, failed
from penstock_interception.store.recordings import StoredCall, StoredTool
from penstock_interception.store.store import CallStore
from penstock_interception.wire import convert

_SIDE: Final = frozenset({CallClass.TITLE, CallClass.PROBE})
_SIDE_NUMBERS: Final = frozenset(convert.CLASSES[item] for item in _SIDE)
_AROUND: Final = 12
"""Tokens that are shown before and after the first one that differs."""
_MAX_HASHED: Final = 1 << 30
"""The most bytes of prompts that one request may make the gate hash: seconds of one thread."""
_MAX_ID: Final = 128
_TEXT: Final = 400
"""The most characters of a shown text."""


class Replays:
    """The recordings of open rollouts. Belongs to one event loop."""

    def __init__(self, store: CallStore, pool: Executor, *, max_bytes: int) -> None:
        """`max_bytes`: the most bytes of one rollout's recorded answers."""
        self._store = store
        self._pool = pool
        self._max_bytes = max_bytes
        self._loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while a rollout's recording is loaded."""

    async def load(
        self,
        rollout: Rollout,
        calls: Sequence[trajectory_pb2.Call],
        origin: tuple[str, int],
        *,
        exact: bool,
        tools: Sequence[trajectory_pb2.HostToolCall] = (),
    ) -> int:
        """Adds recorded calls, and `tools`, to a rollout; returns how many it has. Idempotent by call id.

        `origin` is the rollout and the attempt that the calls are of; those without an answer are left out, except the
        one at which a branch leaves its parent.

        Raises:
            FailedPrecondition: ROLLOUT_CLOSED, RECORDING_LATE: its agent has called already.
            InvalidArgument: FIELD_INVALID; COMPLETION_INVALID.
            ResourceExhausted: RECORDING_LIMIT.
            Unavailable: JOURNAL_FAILED.
        """
        async with self._loading.setdefault(rollout.id, asyncio.Lock()):
            recording = rollout.recording or Recording(exact=exact)
            if recording.exact is not exact:
                raise invalid_field("exact", "differs from that of the recording's first part")
            new = [call for call in calls if _is_wanted(call) and call.call_id not in recording]
            new_tools = [one for one in tools if _has_result(one) and one.tool_call_id not in recording]
            self._check(rollout, recording, len(new), len(new_tools))
            if not new and not new_tools:
                return recording.count
            stored = _stored_tools(new_tools, origin)
            known = await self._paths(rollout.id, recording, new)
            made = await asyncio.get_running_loop().run_in_executor(self._pool, _stored, new, known, origin)
            size = recording.size + sum(len(item.answer) for item in made) + sum(len(item.result) for item in stored)
            if size > self._max_bytes:
                raise ResourceExhausted(f"A recording has at most {self._max_bytes} bytes.", reason="RECORDING_LIMIT")
            self._check(rollout, recording, len(new), len(new_tools))
            await self._write(rollout, recording, made, size, stored)
            return recording.count

    async def _write(
        self,
        rollout: Rollout,
        recording: Recording,
        made: Sequence[StoredCall],
        size: int,
        tools: Sequence[StoredTool],
    ) -> None:
        """Writes recorded calls, and adds them to the recording; both or neither, also where the caller cancels."""

        def written(done: asyncio.Future[list[int]]) -> None:
            if not failed(done):
                recording.add(item.call for item in made)
                recording.add_tools(item.tool for item in tools)
                rollout.recording, recording.size = recording, size

        writing = self._store.recordings.put_calls(rollout.id, recording, made, size, tools)
        writing.add_done_callback(written)
        try:
            await durable(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # before a repeat may look at what is there
            raise

    def take(self, call: Call, plan: Plan) -> RecordedCall | None:
        """Takes the recorded call that answers this one; None = it is to be sampled."""
        recording = call.rollout.recording
        if recording is None or call.state.terminal:
            return None
        # Without a tokenizer, the plan has only the ids of the line before: the upstream makes those of the prompt.
        digest = plan.identity if plan.exact and plan.prompt_ids.size else None
        found = recording.take(digest, call.request.body_sha256, is_side=plan.call_class in _SIDE)
        if found is None and self._asks_again(recording, call, digest):
            found = recording.point
        if found is not None and found.point is not Point.NONE:
            recording.point_call_id = call.id
            self._store.recordings.put_point(call.rollout.id, recording)
        return found

    @staticmethod
    def _asks_again(recording: Recording, call: Call, digest: bytes | None) -> bool:
        """Whether a call asks again what the one at the branch point asked, which ended without an answer."""
        if not recording.point_call_id or not recording.is_at_point(digest, call.request.body_sha256):
            return False
        before = next((one for one in call.rollout.calls if one.id == recording.point_call_id), None)
        return before is None or (before.state.terminal and before.completion is None)

    def give_back(self, call: Call, recorded: RecordedCall) -> None:
        """Undoes `take`: the call ended without this answer, and its agent may ask again."""
        if call.rollout.recording is not None:
            call.rollout.recording.give_back(recorded)

    async def take_tool(self, rollout: Rollout, name: str, arguments: Mapping[str, Any]) -> ReplayedResult | None:
        """Takes the recorded result of a host tool call; None = a host is to give it."""
        recording = rollout.recording
        recorded = None if recording is None else recording.take_tool(tool_digest(name, arguments))
        if recorded is None:
            return None
        try:
            data = await self._store.recordings.tool_call(rollout.id, recorded.call_id)
        except BaseException:
            self._give(rollout, recorded)
            raise
        if not data:
            return None  # the rollout was closed meanwhile
        message = trajectory_pb2.HostToolCall.FromString(data)
        result = ToolResult(message.result_json.encode(), message.is_error)
        return ReplayedResult(recorded, result, message.replayed_from.SerializeToString())

    def give_tool_back(self, rollout: Rollout, replayed: ReplayedResult) -> None:
        """Undoes `take_tool`."""
        self._give(rollout, replayed.recorded)

    @staticmethod
    def _give(rollout: Rollout, recorded: RecordedTool) -> None:
        if rollout.recording is not None:
            rollout.recording.give_tool_back(recorded)

    @staticmethod
    def refuses_tools(rollout: Rollout) -> bool:
        """Whether a host tool call that no recorded one answers fails: it differs from what is recorded there."""
        recording = rollout.recording
        return recording is not None and recording.has_tools_left and Replays.may_fail(rollout)

    def refused(self, call: Call, recorded: RecordedCall) -> None:
        """Notes that a recorded answer may answer no call, so that a restart does not wait for it (R128)."""
        self._store.recordings.put_refused(call.rollout.id, recorded.call_id)

    async def answer(self, call: Call, recorded: RecordedCall, plan: Plan) -> tuple[Completion, Answerer, str] | None:
        """Reads the recorded answer as one to `call`, and the policy that sampled it (for a given one, the call's).

        Where the plan has no prompt of its own, the answer has the recorded one, as an upstream's that returns ids.
        None = this request allows fewer tokens than that one did.
        """
        message = trajectory_pb2.Call.FromString(await self._store.recordings.answer(call.rollout.id, recorded.call_id))
        given = message.replayed_from
        origin = Origin(given.rollout_id, given.attempt, given.call_id, recorded.call_id)
        completion = replace(convert.completion_from(message.completion), origin=origin)
        if not _allows(call, completion.count, message.sampling_requested):
            return None
        if not plan.exact and completion.tokens is not None:
            completion = replace(completion, prompt_ids=await self._whole_prompt(call.rollout.id, recorded, plan))
        answerer = convert.ANSWERERS_BACK.get(message.answerer, Answerer.INFERENCE)
        return completion, answerer, message.policy_id if origin.rollout_id else call.policy_id

    def left_at(self, call: Call, plan: Plan, parent: Call | None) -> list[RecordedCall]:
        """Returns the recorded calls at the place of a call that none of them answers: it diverges if there are any."""
        recording = call.rollout.recording
        if recording is None or plan.call_class in _SIDE:
            return []
        # Behind the branch point the rollout is on its own: only what it sampled in an earlier attempt is compared.
        if parent is None:
            return [] if recording.point_call_id else recording.candidates("")
        origin = None if parent.completion is None else parent.completion.origin
        if origin is None or (recording.point_call_id and origin.rollout_id != call.rollout.id):
            return []
        return recording.candidates(origin.via)

    @staticmethod
    def may_fail(rollout: Rollout) -> bool:
        """Whether a call that diverges fails: in an exact replay, of a branch up to its point."""
        recording = rollout.recording
        return recording is not None and recording.exact and not recording.point_call_id

    async def diverged(
        self, call: Call, plan: Plan, conversation: Conversation, left: Sequence[RecordedCall], before: IntArray
    ) -> None:
        """Records that a call diverges from the recorded ones at its place. `before` is its parent's path."""
        recording = call.rollout.recording
        if recording is None or len(recording.divergences) + recording.diverging >= MAX_DIVERGENCES:
            return
        recording.diverging += 1
        try:
            found = await self._parted(call, plan, conversation, left, before)
        finally:
            recording.diverging -= 1
        recording.divergences.append(found)
        self._store.recordings.put_divergences(call.rollout.id, recording)

    async def _parted(
        self, call: Call, plan: Plan, conversation: Conversation, left: Sequence[RecordedCall], before: IntArray
    ) -> Divergence:
        """Compares with one recorded call after another: of their prompts one is in memory."""
        best, at, around = left[0], -1, NO_TOKENS
        for one in left:
            prompt = await self._prompt(call.rollout.id, one, before)
            shared = await asyncio.get_running_loop().run_in_executor(
                self._pool, common_prefix, prompt, plan.prompt_ids
            )
            if shared > at:
                best, at = one, shared
                around = prompt[max(0, at - _AROUND) : at + _AROUND].copy()
        own = plan.prompt_ids[max(0, at - _AROUND) : at + _AROUND]
        shown = (conversation.text_of(ids)[:_TEXT] for ids in (around, own))
        return Divergence(call.id, best.call_id, at, *shown)

    def _check(self, rollout: Rollout, recording: Recording, new: int, tools: int) -> None:
        if rollout.closed is not None:
            raise FailedPrecondition("The rollout is closed.", reason="ROLLOUT_CLOSED")
        if (new or tools) and rollout.calls:
            raise FailedPrecondition(
                "The rollout's agent has called already: load a recording before the agent starts.",
                reason="RECORDING_LATE",
            )
        if max(recording.count + new, recording.tools + tools) > MAX_RECORDED_CALLS:
            raise ResourceExhausted(f"A recording has at most {MAX_RECORDED_CALLS} calls.", reason="RECORDING_LIMIT")

    async def _paths(
        self, rollout_id: str, recording: Recording, new: Sequence[trajectory_pb2.Call]
    ) -> dict[str, _Path]:
        """The paths of earlier recorded calls that the new ones continue."""
        own = {call.call_id for call in new}
        wanted = {call.parent_call_id for call in new if call.parent_call_id and call.parent_call_id not in own}
        known: dict[str, _Path] = {}
        for call_id in sorted(one for one in wanted if one in recording):
            await self._load_path(rollout_id, call_id, known)
        return known

    async def _load_path(self, rollout_id: str, call_id: str, known: dict[str, _Path]) -> None:
        lineage: list[trajectory_pb2.Call] = []
        while call_id and call_id not in known:
            message = trajectory_pb2.Call.FromString(await self._store.recordings.answer(rollout_id, call_id))
            lineage.append(message)
            call_id = message.parent_call_id
        for message in reversed(lineage):
            path = known[message.call_id] = _path(message, known)
            path.digest()

    async def _whole_prompt(self, rollout_id: str, recorded: RecordedCall, plan: Plan) -> IntArray:
        """The ids of a recorded prompt: they begin with the plan's, unless the line before it is another by now."""
        prompt = await self._prompt(rollout_id, recorded, plan.prompt_ids)
        if hashlib.sha256(little_endian(prompt)).digest() == recorded.prompt_sha256:
            return prompt
        known: dict[str, _Path] = {}
        await self._load_path(rollout_id, recorded.call_id, known)
        path = known[recorded.call_id]
        return path.ids(path.keep + int(path.suffix.size))

    async def _prompt(self, rollout_id: str, recorded: RecordedCall, before: IntArray) -> IntArray:
        message = trajectory_pb2.Call.FromString(await self._store.recordings.answer(rollout_id, recorded.call_id))
        return np.concatenate([before[: recorded.keep], _ids(message.prompt_suffix_token_ids)])


@dataclass(slots=True, eq=False)
class _Path:
    """A recorded call's prompt and answer: the first `keep` tokens of the parent's, then its own."""

    parent: _Path | None
    keep: int
    suffix: IntArray
    sampled: IntArray
    media: Sequence[tuple[int, bytes]] = ()
    """The images of its prompt: the first token, and the digest."""
    prompt_sha256: bytes = b""
    """`prompt_identity` of its prompt."""
    hashed: Any = None
    """The hash after prompt and answer, from which a call that continues this one goes on."""

    def digest(self) -> int:
        """Makes the digest of the prompt; returns how many bytes it took. CPU work."""
        parent = self.parent
        if parent is not None and self.keep == parent.total and parent.hashed is not None:
            state, took = parent.hashed.copy(), 0
        else:
            kept = little_endian(parent.ids(self.keep)) if parent is not None else b""
            state, took = hashlib.sha256(kept), len(kept)
        state.update(little_endian(self.suffix))
        self.prompt_sha256 = prompt_identity(state.digest(), [digest for _, digest in self.media])
        state.update(little_endian(self.sampled))
        self.hashed = state
        return took + 4 * (int(self.suffix.size) + int(self.sampled.size))

    @property
    def total(self) -> int:
        return self.keep + int(self.suffix.size) + int(self.sampled.size)

    def ids(self, upto: int) -> IntArray:
        """The first `upto` tokens."""
        pieces: list[IntArray] = []
        step: _Path | None = self
        while step is not None and upto > 0:
            if upto > step.keep:
                own = np.concatenate([step.suffix, step.sampled])
                pieces.append(own[: upto - step.keep])
                upto = step.keep
            step = step.parent
        pieces.reverse()
        return np.concatenate(pieces) if pieces else NO_TOKENS


def tool_digest(name: str, arguments: Mapping[str, Any]) -> bytes:
    """What identifies a host tool call: SHA-256 of its name and its arguments, in whatever order their keys come."""
    return hashlib.sha256(orjson.dumps([name, arguments], option=orjson.OPT_SORT_KEYS)).digest()


def _has_result(call: trajectory_pb2.HostToolCall) -> bool:
    """Whether a host gave a result; what the gate itself refused, it refuses again."""
    return bool(call.result_json) and not call.end_reason


def _stored_tools(calls: Sequence[trajectory_pb2.HostToolCall], origin: tuple[str, int]) -> list[StoredTool]:
    made: list[StoredTool] = []
    known: set[str] = set()
    for index, call in enumerate(calls):
        where = f"host_tool_calls[{index}]"
        if not call.tool_call_id or call.tool_call_id in known:
            raise invalid_field(f"{where}.tool_call_id", "must be set, and each call given once")
        known.add(call.tool_call_id)
        texts = {"arguments_json": call.arguments_json, "result_json": call.result_json}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            try:
                values[name] = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise invalid_field(f"{where}.{name}", "not JSON") from error
            if not isinstance(values[name], dict):
                raise invalid_field(f"{where}.{name}", "not a JSON object")
        kept = trajectory_pb2.HostToolCall(result_json=call.result_json, is_error=call.is_error)
        _set_origin(kept.replayed_from, call, call.tool_call_id, origin, where)
        tool = RecordedTool(call.tool_call_id, tool_digest(call.name, values["arguments_json"]))
        made.append(StoredTool(tool, kept.SerializeToString()))
    return made


def _set_origin(
    origin: trajectory_pb2.ReplayOrigin,
    call: trajectory_pb2.Call | trajectory_pb2.HostToolCall,
    call_id: str,
    of: tuple[str, int],
    where: str,
) -> None:
    """Where an answer is from first: what the recorded call says, if that was replayed itself, or that call."""
    if call.HasField("replayed_from"):
        given = call.replayed_from
        for name in ("rollout_id", "call_id"):
            if not 1 <= len(getattr(given, name)) <= _MAX_ID:
                raise invalid_field(f"{where}.replayed_from.{name}", f"1 to {_MAX_ID} characters")
        if given.attempt < 1:
            raise invalid_field(f"{where}.replayed_from.attempt", "at least 1")
        origin.CopyFrom(given)
    else:
        origin.rollout_id, origin.attempt = of
        origin.call_id = call_id


def _ids(data: bytes) -> IntArray:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def _path(call: trajectory_pb2.Call, known: dict[str, _Path]) -> _Path:
    span = call.completion.span
    parent = known.get(call.parent_call_id) if call.parent_call_id else None
    keep, media = call.prompt_shared_count, [(one.token_start, one.sha256) for one in call.media]
    if parent is not None:
        media = [*(one for one in parent.media if one[0] < keep), *media]
    return _Path(parent, keep, _ids(call.prompt_suffix_token_ids), _ids(span.token_ids), media)


def _stored(calls: Sequence[trajectory_pb2.Call], known: dict[str, _Path], origin: tuple[str, int]) -> list[StoredCall]:
    """CPU work: a digest of each whole prompt. Raises InvalidArgument."""
    made: list[StoredCall] = []
    hashed = 0
    for index, call in enumerate(calls):
        where = f"calls[{index}]"
        if not call.call_id or call.call_id in known:
            raise invalid_field(f"{where}.call_id", "must be set, and each call given once")
        if call.parent_call_id and call.parent_call_id not in known:
            raise invalid_field(f"{where}.parent_call_id", "its call must come before it")
        if len(call.prompt_suffix_token_ids) % 4 or len(call.completion.span.token_ids) % 4:
            raise invalid_field(f"{where}.prompt_suffix_token_ids", "not a list of int32")
        if any(not tensor.data for tensor in call.completion.tensors):
            call.completion.ClearField("tensors")  # the sender left their rows out: then the replay has none
        try:
            if call.HasField("completion"):
                convert.completion_from(call.completion)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{where}: {error.message}", reason="COMPLETION_INVALID", violations=error.violations
            ) from error
        path = known[call.call_id] = _path(call, known)
        room = path.parent.total if path.parent is not None else 0
        if path.keep > room:
            raise invalid_field(f"{where}.prompt_shared_count", f"its parent has {room} tokens")
        hashed += path.digest()
        if hashed > _MAX_HASHED:
            raise ResourceExhausted("The prompts of these calls are too long together.", reason="RECORDING_LIMIT")
        recorded = RecordedCall(
            call.call_id,
            call.parent_call_id,
            path.keep,
            path.prompt_sha256,
            call.request_body_sha256,
            call.call_class in _SIDE_NUMBERS,
            _point(call),
        )
        made.append(StoredCall(recorded, _slim(call, origin, where).SerializeToString()))
    return made


def _allows(call: Call, count: int, recorded: chat_pb2.Sampling) -> bool:
    """Whether an answer of `count` tokens may answer a call. A trainer may have given more than was asked for."""
    most = call.request.sampling.max_tokens
    if most is None or call.request.bounded_by or count <= most:
        return True
    return recorded.HasField("max_tokens") and recorded.max_tokens <= most


def _is_wanted(call: trajectory_pb2.Call) -> bool:
    return call.HasField("completion") or call.branch_point


def _point(call: trajectory_pb2.Call) -> Point:
    if not call.branch_point:
        return Point.NONE
    return Point.ANSWERED if call.HasField("completion") else Point.SAMPLED


def _slim(call: trajectory_pb2.Call, origin: tuple[str, int], where: str) -> trajectory_pb2.Call:
    """What answering again needs."""
    kept = trajectory_pb2.Call(
        call_id=call.call_id,
        prompt_shared_count=call.prompt_shared_count,
        prompt_suffix_token_ids=call.prompt_suffix_token_ids,
        media=call.media,
        completion=call.completion,
        answerer=call.answerer,
        policy_id=call.policy_id,
    )
    if call.parent_call_id:
        kept.parent_call_id = call.parent_call_id
    if call.sampling_requested.HasField("max_tokens"):
        kept.sampling_requested.max_tokens = call.sampling_requested.max_tokens
    if call.given or (call.branch_point and call.injected):
        kept.replayed_from.call_id = call.call_id  # given by the branch's creator: sampled for no rollout
    else:
        _set_origin(kept.replayed_from, call, call.call_id, origin, where)
    return kept
