"""The answers of an earlier attempt, which answer the same prompts again without sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final

from penstock_codec.fast_dataclass import quick
from penstock_interception.domain.host_tools import ToolResult

MAX_RECORDED_CALLS: Final = 20_000
"""The most recorded calls of a rollout."""
MAX_DIVERGENCES: Final = 16
"""The most divergences of a rollout that are kept: the first ones."""
MAX_CANDIDATES: Final = 32
"""The most recorded calls with which a prompt that none of them has is compared."""


@quick
@dataclass(frozen=True, slots=True)
class Origin:
    """The call for which a replayed answer was sampled, and its rollout and attempt.

    An answer that the creator of a branch gave was sampled for none: `rollout_id` is empty.
    """

    rollout_id: str
    attempt: int
    call_id: str
    via: str
    """The call of the recording that it was taken from; `call_id`, unless that was replayed itself."""


class Point(StrEnum):
    """Whether a recorded call is the one at which a branch leaves its parent, and what answers it."""

    NONE = ""
    SAMPLED = "sampled"
    """It has no recorded answer: it is sampled."""
    ANSWERED = "answered"
    """It has the answer that the branch's creator gave, or that was sampled in an earlier attempt."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """An answered call of an earlier attempt, without its answer, which is in the journal under `call_id`.

    Its prompt is the first `keep` tokens of the parent's prompt and answer, then tokens of its own. `body_sha256`
    identifies the request where a source has no token ids.
    """

    call_id: str
    parent_call_id: str
    keep: int
    prompt_sha256: bytes
    body_sha256: bytes
    is_side: bool
    """Whether it is beside the task: a title, say, which an agent may ask for at any time."""
    point: Point = Point.NONE


@dataclass(frozen=True, slots=True)
class RecordedTool:
    """A host tool call of an earlier attempt, without its result, which is in the journal under `call_id`.

    `digest` is SHA-256 of name and arguments.
    """

    call_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReplayedResult:
    """A recorded result that answers a host tool call; `origin` is the serialised ReplayOrigin."""

    recorded: RecordedTool
    result: ToolResult
    origin: bytes


@dataclass(frozen=True, slots=True)
class Divergence:
    """A call whose prompt differs from each recorded one, and the recorded call that is most like it.

    The prompts differ from token `index` on, from 0; where one prompt is the other's beginning, `index` is its length.
    `recorded` and `text` are the texts around that token.
    """

    call_id: str
    recorded_call_id: str
    index: int
    recorded: str
    text: str


@dataclass(slots=True)
class Recording:
    """The recorded calls that have not answered a call yet, by prompt and by parent.

    `exact`: a call that diverges fails, and is not sampled.
    """

    exact: bool = False
    count: int = 0
    used: int = 0
    size: int = 0
    """Bytes of the recorded calls as they are stored."""
    diverging: int = 0
    """Divergences that are being looked at."""
    divergences: list[Divergence] = field(default_factory=list)
    tools: int = 0
    """Recorded host tool calls, answered ones included."""
    _tools: dict[bytes, deque[str]] = field(default_factory=dict)
    """Recorded host tool calls that have answered none yet, by digest."""
    point: RecordedCall | None = None
    """The call at which a branch leaves its parent. None = the rollout is no branch, or is closed."""
    point_call_id: str = ""
    """The rollout's own call in its place; empty = the agent has not come there."""
    _left: dict[str, RecordedCall] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    _by_prompt: dict[bytes, deque[str]] = field(default_factory=dict)
    _by_body: dict[bytes, deque[str]] = field(default_factory=dict)
    _children: dict[str, deque[str]] = field(default_factory=dict)

    def add(self, calls: Iterable[RecordedCall]) -> None:
        """Adds calls in the order in which they came; one that is known already is left out."""
        for call in calls:
            if call.call_id in self._known:
                continue
            self._known.add(call.call_id)
            self.count += 1
            if call.point is not Point.NONE:
                self.point = call
            self._left[call.call_id] = call
            self._by_prompt.setdefault(call.prompt_sha256, deque()).append(call.call_id)
            self._by_body.setdefault(call.body_sha256, deque()).append(call.call_id)
            self._children.setdefault(call.parent_call_id, deque()).append(call.call_id)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._known

    @property
    def has_left(self) -> bool:
        """Whether a recorded call has not answered one."""
        return bool(self._left)

    def take(self, prompt_sha256: bytes | None, body_sha256: bytes, *, is_side: bool) -> RecordedCall | None:
        """Takes the first recorded call with this prompt, or with no `prompt_sha256` with this request; None = no call.

        Of calls with one prompt, one of the same request comes first: requests may differ in their parameters.
        """
        waiting = self._by_body.get(body_sha256) if prompt_sha256 is None else self._by_prompt.get(prompt_sha256)
        while waiting and waiting[0] not in self._left:
            waiting.popleft()
        found: RecordedCall | None = None
        for call_id in islice(waiting or (), MAX_CANDIDATES):
            call = self._left.get(call_id)
            if call is None or call.is_side is not is_side:
                continue
            if call.body_sha256 == body_sha256:
                found = call
                break
            found = found or call
        if found is not None:
            del self._left[found.call_id]
            self.used += 1
        return found

    def add_tools(self, tools: Iterable[RecordedTool]) -> None:
        """Adds host tool calls in the order in which they came; one that is known already is left out."""
        for tool in tools:
            if tool.call_id not in self._known:
                self._known.add(tool.call_id)
                self.tools += 1
                self._tools.setdefault(tool.digest, deque()).append(tool.call_id)

    def used_tools(self, call_ids: Iterable[str]) -> None:
        """Counts recorded host tool calls that have answered one before a restart."""
        for call_id in call_ids:
            self._known.add(call_id)
            self.tools += 1

    def take_tool(self, digest: bytes) -> RecordedTool | None:
        """Takes the first recorded host tool call with this name and these arguments; None = no call.

        After a divergence none: the agent may ask the same at another place, where the result may be another.
        """
        waiting = self._tools.get(digest)
        if not waiting or self.divergences or self.diverging:
            return None
        call_id = waiting.popleft()
        if not waiting:
            del self._tools[digest]
        return RecordedTool(call_id, digest)

    def give_tool_back(self, tool: RecordedTool) -> None:
        """Undoes `take_tool`."""
        if tool.call_id in self._known:
            self._tools.setdefault(tool.digest, deque()).appendleft(tool.call_id)

    @property
    def has_tools_left(self) -> bool:
        """Whether a recorded host tool call has not answered one."""
        return bool(self._tools)

    def is_at_point(self, prompt_sha256: bytes | None, body_sha256: bytes) -> bool:
        """Whether a call with this prompt, or with no `prompt_sha256` this request, is at the branch point."""
        if self.point is None:
            return False
        return (
            self.point.body_sha256 == body_sha256
            if prompt_sha256 is None
            else self.point.prompt_sha256 == prompt_sha256
        )

    def give_back(self, call: RecordedCall) -> None:
        """Undoes `take`: the call that was to be answered has ended without this answer."""
        if call.call_id in self._known and call.call_id not in self._left:
            self._left[call.call_id] = call
            self._by_prompt[call.prompt_sha256].appendleft(call.call_id)
            self._by_body[call.body_sha256].appendleft(call.call_id)
            self._children[call.parent_call_id].appendleft(call.call_id)
            self.used -= 1

    def use(self, call_id: str) -> None:
        """Marks a recorded call as one that has answered: after a restart."""
        self._left.pop(call_id, None)
        self.used += 1

    def candidates(self, parent_call_id: str) -> list[RecordedCall]:
        """Returns the recorded calls after this recorded one ("" = the first calls) that have answered no call yet.

        Calls beside the task are left out.
        """
        children = self._children.get(parent_call_id, deque())
        while children and children[0] not in self._left:
            children.popleft()
        left = (self._left.get(call_id) for call_id in children)
        return list(islice((call for call in left if call is not None and not call.is_side), MAX_CANDIDATES))

    def forget(self) -> bool:
        """Frees the calls once the rollout is closed; the counts stay. Returns whether there were any."""
        had = bool(self._known)
        self.point = None
        for held in (self._left, self._known, self._by_prompt, self._by_body, self._children, self._tools):
            held.clear()
        return had
