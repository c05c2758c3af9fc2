"""`TokenGraph`: plans where a call goes, commits its sampled tokens, rebuilds itself from records.

Planning changes nothing of the graph (it caches fingerprints) and may run in another thread while commits happen: the
graph only grows, and a commit adds a node to the indexes that planning reads only after the node and its ancestors are
complete. So a plan never becomes wrong; at worst another call took the same place first, and the later one opens a
branch beside it. A commit validates its plan against the current graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from penstock_chassis.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument
from penstock_chassis.homes import random_id
from penstock_codec import Codec, Continuation, Inexact
from penstock_codec.chat import Message, Part, Role, Tool
from penstock_codec.codec import Prompt
from penstock_codec.images import Placed
from penstock_interception import cache
from penstock_interception.cache import Fingerprinted
from penstock_interception.graph import call_classification, samples
from penstock_interception.graph.fingerprint import (
    Fingerprints,
    next_state,
    prompt_key,
    reasoning_text,
    visible_text,
)
from penstock_interception.graph.inline import Room
from penstock_interception.graph.paths import (
    NO_TOKENS,
    common_prefix,
    path_ids,
    path_media,
    shared_with_media,
    tensor_starts,
)
from penstock_interception.graph.record import GraphRecord, chain_next, chain_start, chain_step
from penstock_interception.graph.validation import check_sampled
from penstock_interception.graph.values import (
    Branch,
    CallClass,
    CallHints,
    CallNode,
    IntArray,
    Media,
    Plan,
    PromptKey,
    Sample,
    Sampled,
    SamplePolicy,
)

MIN_SHARED = 64  # with fewer shared tokens, storing a new root on its own is cheaper
SHARE_CANDIDATES = 8


class TokenGraph:
    """One rollout's graph.

    Commits come from the event loop, one at a time, under `Conversation.recording`; plans from any thread.
    """

    def __init__(self, rollout_id: str, codec: Codec | None, *, vocab_size: int | None = None) -> None:
        """`codec` is None for a source without a tokenizer: the graph then has calls and branches, but no tokens.

        `vocab_size` is the model's, which may be larger than the tokenizer's.
        """
        self.rollout_id = rollout_id
        self.chain_head = chain_start(rollout_id)
        self._codec = codec
        self._vocab_size = max(vocab_size or 0, codec.vocab_size if codec else 0)
        self._fingerprints = Fingerprints(with_call_ids=codec is not None and codec.template.renders_call_ids)
        self._calls: dict[str, CallNode] = {}
        self._children: dict[str, list[CallNode]] = {}
        self._ends: dict[bytes, list[CallNode]] = {}  # by the conversation's state after the reply
        self._prompts: dict[tuple[bytes, bytes], list[CallNode]] = {}  # by the prompt's state and template_kwargs
        self._silent: dict[tuple[bytes, bytes], CallNode] = {}  # by the prompt of a reply without visible content
        self._tips: dict[str, CallNode] = {}  # the last call of each branch, most recently used last
        self._lines = call_classification.Lines()

    @property
    def calls(self) -> Mapping[str, CallNode]:
        """The committed calls by id, in commit order."""
        return self._calls

    def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        hints: CallHints | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        inline_bytes: int | None = None,
    ) -> Plan:
        """Finds the line that `messages` continue, and makes the prompt. CPU work, about 1 ms for a 400-token append.

        Raises penstock_codec.CodecError if the model's template cannot render the conversation, InvalidArgument if
        there are no messages, TooLongInline if there are more than `inline_bytes` bytes of new text to work on.
        """
        if not messages:
            raise InvalidArgument("a call must have at least one message", reason="MESSAGES_EMPTY")
        room = None if inline_bytes is None else Room(inline_bytes)
        hints = hints or CallHints()
        kwargs = dict(template_kwargs or {})
        keyed = cache.fingerprinted(self.rollout_id, partial(self._fingerprints.of, messages, tools, room=room))
        if room is not None and keyed.split < len(messages):
            room.check_runs(messages)
        keys, states = keyed.keys, self._states(messages, keyed, room)
        key = prompt_key(messages, tools, kwargs, states, keys)
        twins = self._prompts.get((key.state, key.kwargs), [])
        parents, known, distinguished = self._find_parents(messages, states, key.kwargs)
        # Where reasoning distinguishes equal answers, the same messages after another of them are no retry.
        for twin in reversed(twins):
            if not distinguished or (twin.continues_parent and twin.parent in parents):
                return self._retry_of(twin, key, hints)
        parent = parents[-1] if parents else None
        reason = ""
        if parent is not None:
            if room is not None:
                room.take_instructions(messages[:known])
                room.take_messages(messages[known:])
            continued = self._continue(parent, messages, known, tools, kwargs)
            if not isinstance(continued, Inexact):
                fork = self._has_continuation(parent)
                reason = f"history edited after message {known - 1}" if fork else ""
                call_class = hints.call_class or (CallClass.EDIT if fork else self._line_class(parent))
                media = self._media(parent.total, continued.images)
                plan = self._planned(parent, parent.total, continued.ids, media, key, hints, call_class, fork, reason)
                return replace(plan, mixed_up=True) if continued.mixed_up else plan
            reason = f"{continued.reason}: {continued.detail}"
        if room is not None:
            room.take_tools(tools)
            room.take_messages(messages)
        call_class, why = self._lines.classify_root(key, keys, hints)
        if parent is not None and hints.call_class is None:
            call_class = self._line_class(parent)
            if call_class is CallClass.TITLE:
                call_class = CallClass.SUB_AGENT  # a continued line is no TITLE
        prompt = (
            Prompt(NO_TOKENS) if self._codec is None else self._codec.prompt(messages, tools, template_kwargs=kwargs)
        )
        ids, media = prompt.ids, self._media(0, prompt.images)
        if distinguished:
            for twin in reversed(twins):
                if np.array_equal(path_ids(twin, twin.prompt_count), ids):
                    return self._retry_of(twin, key, hints)
        share, keep = self._share(ids, media)
        own = tuple(one for one in media if one.token_start >= keep)
        plan = self._planned(share, keep, ids[keep:], own, key, hints, call_class, True, reason or why)
        return replace(plan, mixed_up=True) if prompt.mixed_up else plan

    def commit(self, call_id: str, plan: Plan, sampled: Sampled) -> GraphRecord:
        """Adds a call whose record needs no journal, as in `conformance/`. Raises what `prepare` raises."""
        record = self.prepare(call_id, plan, sampled)
        self.apply(record)
        return record

    def prepare(self, call_id: str, plan: Plan, sampled: Sampled) -> GraphRecord:
        """Makes a call's record without adding it to the graph: `apply` adds it once the journal has it.

        Apply nothing else in between: the record extends the chain's current head.

        Raises InvalidArgument COMPLETION_INVALID (R83, with violations), AlreadyExists CALL_ALREADY_COMMITTED,
        FailedPrecondition PLAN_FOREIGN.
        """
        if call_id in self._calls:
            raise AlreadyExists(f"call {call_id} was already committed", reason="CALL_ALREADY_COMMITTED")
        parent = None if plan.parent_call_id is None else self._calls.get(plan.parent_call_id)
        if plan.rollout_id != self.rollout_id or (parent is None) != (plan.parent_call_id is None):
            raise FailedPrecondition("the plan was made for another graph", reason="PLAN_FOREIGN")
        check_sampled(sampled, self._vocab_size if plan.exact else None, int(plan.prompt_ids.size))
        branch_id, call_class, suffix = plan.branch_id, plan.call_class, plan.suffix_ids
        reason = plan.reason
        twins = self._prompts.get((plan.key.state, plan.key.kwargs), [])
        twin = twins[0] if twins else None
        if twin is not None and np.array_equal(twin.suffix, suffix) and twin.keep == plan.shared_prefix_len:
            suffix = twin.suffix  # an identical prompt is stored once
        if not plan.new_branch and parent is not None and self._has_continuation(parent):
            # Another call took this place during sampling.
            branch_id = random_id()
            again = any(node.parent is parent for node in twins)
            if plan.hints.call_class is None:
                call_class = CallClass.RETRY if again else CallClass.EDIT
            reason = "the same prompt again" if again else "another call continued the same turn first"
        return GraphRecord(
            call_id=call_id,
            branch_id=branch_id,
            parent_call_id=plan.parent_call_id,
            keep=plan.shared_prefix_len,
            suffix=suffix,
            sampled=sampled,
            key=plan.key,
            call_class=call_class,
            hinted=plan.hints.call_class is not None,
            session=plan.hints.session,
            reason=reason,
            chain=chain_step(self.chain_head, call_id, plan.prompt_sha256, sampled, plan.new_media),
            media=plan.new_media,
        )

    @classmethod
    def restore(
        cls, rollout_id: str, codec: Codec | None, records: Iterable[GraphRecord], *, vocab_size: int | None = None
    ) -> Self:
        """Rebuilds the graph from ordered records. Raises DataLoss if they are not one unbroken chain."""
        known = list(records)
        graph = cls.restore_unbroken(rollout_id, codec, known, vocab_size=vocab_size)
        if len(graph.calls) < len(known):
            raise DataLoss("the rollout's calls do not form an unbroken chain", reason="GRAPH_CHAIN_BROKEN")
        return graph

    @classmethod
    def restore_unbroken(
        cls, rollout_id: str, codec: Codec | None, records: Iterable[GraphRecord], *, vocab_size: int | None = None
    ) -> Self:
        """Rebuilds the graph from the ordered records before the chain's first break."""
        graph = cls(rollout_id, codec, vocab_size=vocab_size)
        for record in records:
            parent = None if record.parent_call_id is None else graph._calls.get(record.parent_call_id)
            broken = record.parent_call_id is not None and parent is None
            if not broken:
                before = NO_TOKENS if parent is None else path_ids(parent, record.keep)
                prompt = np.concatenate([before, record.suffix])
                head = chain_next(graph.chain_head, record.call_id, prompt, record.sampled, record.media)
                broken = head != record.chain or record.call_id in graph._calls
            if broken:
                break
            graph.apply(record)
        return graph

    def turn_of(self, plan: Plan) -> int:
        """Returns how many answers a planned prompt continues, token for token; 0 for the first call of a line."""
        node = self._calls.get(plan.parent_call_id or "")
        if node is None or plan.shared_prefix_len != node.total:
            return 0
        turn = 1
        while node.parent is not None and node.continues_parent:
            node, turn = node.parent, turn + 1
        return turn

    def path(self, call_id: str) -> IntArray:
        """Returns a call's prompt and completion, int32. Raises KeyError."""
        return path_ids(self._calls[call_id])

    def call_classes(self) -> dict[str, CallClass]:
        """Returns every call's final class, given all later calls."""
        return call_classification.settle(tuple(self._calls.values()), self._is_written)

    def branches(self) -> tuple[Branch, ...]:
        """Returns all branches with their final classes, in order of opening."""
        return samples.branches(tuple(self._calls.values()), self.call_classes())

    def samples(
        self,
        policy: SamplePolicy | None = None,
        *,
        include_top: bool = False,
        context: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[Sample, ...]:
        """One sample per leaf and policy, the main line first; every sampled token is trained at most once (R84, R85).

        `include_top`: with the alternatives of the trained tokens. `context`: calls that are not trained, and why.
        """
        nodes = tuple(self._calls.values())
        policy = policy or SamplePolicy()
        classes = self.call_classes()
        return samples.build(self.rollout_id, nodes, classes, policy, include_top=include_top, context=context)

    def _states(self, messages: Sequence[Message], keyed: Fingerprinted, room: Room | None) -> Sequence[bytes]:
        """Returns the states before the first message and after each message.

        A reply that the client split into several messages counts as one, if such a reply was committed.
        """
        split = keyed.split
        if split == len(messages):
            return keyed.states
        states = [*keyed.states[: split + 1]]
        run = split - 1  # start of the current run of assistant messages
        for i in range(split, len(messages)):
            state = next_state(states[-1], keyed.keys[i])
            if messages[i].role is not Role.ASSISTANT:
                run = i + 1
            elif i > run and state not in self._ends:
                parts: tuple[Part, ...] = tuple(part for item in messages[run : i + 1] for part in item.parts)
                joined = self._fingerprints.key(Message(Role.ASSISTANT, parts), room)
                merged = next_state(states[run], joined)
                state = merged if merged in self._ends else state
            states.append(state)
        return states

    def _find_parents(
        self, messages: Sequence[Message], states: Sequence[bytes], kwargs: bytes
    ) -> tuple[Sequence[CallNode], int, bool]:
        """Returns the calls that end the longest known part of the conversation, and the length of that part.

        The last one is to be continued. The flag says whether others end it too, with reasoning that was not sent.
        """
        for known in range(len(messages), 0, -1):
            if messages[known - 1].role is not Role.ASSISTANT:
                # Clients omit a reply without visible content (cut off while thinking). With other template_kwargs it
                # would be a different prompt, not a continuation.
                silent = self._silent.get((states[known], kwargs))
                if silent is not None:
                    return [silent], known, False
                continue
            # An answer that somebody wrote has no tokens: what continues it continues the line before it, so that what
            # was sampled there is not tokenised again.
            nodes = [node for node in self._ends.get(states[known], ()) if not self._is_written(node)]
            if nodes:
                thought = reasoning_text(messages[known - 1])
                same = [node for node in nodes if thought and reasoning_text(node.sampled.message) == thought]
                return same or nodes, known, 0 < len(same) < len(nodes)
        return [], 0, False

    def _continue(
        self,
        parent: CallNode,
        messages: Sequence[Message],
        known: int,
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
    ) -> Continuation | Inexact:
        if self._codec is None:
            return Continuation(NO_TOKENS, 0)
        ids = parent.sampled.token_ids
        if ids is None:
            return Inexact("PARENT_WITHOUT_TOKENS", "the previous turn was captured without token ids")
        last = ids if ids.size else parent.suffix
        spoken = 1 if messages[known - 1].role is Role.ASSISTANT else 0
        return self._codec.continuation(
            [*messages[: known - spoken], parent.sampled.message],
            messages[known:],
            tools,
            last_id=int(last[-1]) if last.size else None,
            template_kwargs=kwargs,
        )

    def _retry_of(self, twin: CallNode, key: PromptKey, hints: CallHints) -> Plan:
        call_class = hints.call_class or CallClass.RETRY
        why = "the same prompt again"
        return self._planned(twin.parent, twin.keep, twin.suffix, twin.media, key, hints, call_class, True, why)

    def _media(self, start: int, placed: Sequence[Placed]) -> tuple[Media, ...]:
        """Images of tokens that begin at `start` of a prompt."""
        if not placed or self._codec is None or (rule := self._codec.images) is None:
            return ()
        return tuple(
            Media(
                one.image.sha256,
                one.image.media_type,
                start + one.start,
                one.count,
                rule.placeholder_id,
                one.grid,
                rule.sha256,
            )
            for one in placed
        )

    def _planned(
        self,
        parent: CallNode | None,
        keep: int,
        suffix: IntArray,
        media: tuple[Media, ...],
        key: PromptKey,
        hints: CallHints,
        call_class: CallClass,
        new_branch: bool,
        reason: str,
    ) -> Plan:
        before = NO_TOKENS if parent is None else path_ids(parent, keep)
        branch_id = random_id() if new_branch or parent is None else parent.branch_id
        return Plan(
            rollout_id=self.rollout_id,
            branch_id=branch_id,
            new_branch=new_branch,
            call_class=call_class,
            parent_call_id=None if parent is None else parent.call_id,
            shared_prefix_len=keep,
            prompt_ids=np.concatenate([before, suffix]),
            suffix_ids=suffix,
            exact=self._codec is not None,
            reason=reason,
            key=key,
            hints=hints,
            tensor_starts=tensor_starts(parent, keep),
            media=(*path_media(parent, keep), *media) if parent is not None else media,
        )

    def _share(self, ids: IntArray, media: tuple[Media, ...]) -> tuple[CallNode | None, int]:
        """Finds the line that shares the most tokens with a newly rendered prompt, to store those once."""
        best: CallNode | None = None
        keep = 0
        for tip in tuple(self._tips.values())[-SHARE_CANDIDATES:]:
            shared = shared_with_media(media, path_media(tip), common_prefix(ids, path_ids(tip)))
            if shared > keep:
                best, keep = tip, shared
        if best is None or keep < MIN_SHARED:
            return None, 0
        while best.parent is not None and keep <= best.keep:
            best = best.parent
        return best, keep

    def _line_class(self, node: CallNode) -> CallClass:
        """Returns the class of the line that continues `node`; a continued retry has the class of the first attempt."""
        if node.planned_class is CallClass.RETRY and not node.hinted:
            return self._prompts[(node.key.state, node.key.kwargs)][0].planned_class
        return node.planned_class

    def _has_continuation(self, node: CallNode) -> bool:
        return any(
            child.continues_parent and not self._is_written(child) for child in self._children.get(node.call_id, ())
        )

    def _is_written(self, node: CallNode) -> bool:
        return self._codec is not None and node.sampled.injected and node.sampled.token_ids is None

    def apply(self, record: GraphRecord) -> None:
        """Adds the call of a record that extends the chain's head."""
        parent = None if record.parent_call_id is None else self._calls[record.parent_call_id]
        node = CallNode(
            call_id=record.call_id,
            index=len(self._calls),
            branch_id=record.branch_id,
            parent=parent,
            keep=record.keep,
            suffix=record.suffix,
            sampled=record.sampled,
            key=record.key,
            planned_class=record.call_class,
            hinted=record.hinted,
            session=record.session,
            reason=record.reason,
            chain=record.chain,
            media=record.media,
        )
        self._calls[node.call_id] = node
        if parent is not None:
            self._children.setdefault(parent.call_id, []).append(node)
        reply = self._fingerprints.key(record.sampled.message)
        self._ends.setdefault(next_state(record.key.state, reply), []).append(node)
        self._prompts.setdefault((record.key.state, record.key.kwargs), []).append(node)
        silent = not record.sampled.message.tool_calls and not visible_text(record.sampled.message)
        if silent and not self._is_written(node):
            self._silent[record.key.state, record.key.kwargs] = node
        self._tips.pop(node.branch_id, None)
        self._tips[node.branch_id] = node
        self._lines.add(node, None if silent else reply)
        self.chain_head = record.chain
