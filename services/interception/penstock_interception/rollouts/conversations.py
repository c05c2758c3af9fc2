"""The conversations of rollouts: token graphs, and codecs that make prompts from requests and text from answers.

Planning changes nothing of the graph and may run in other threads while the event loop records. Sampled tokens are
never tokenised again (R82): the graph finds the line that a request continues, and only new text is tokenised.

In memory are the conversations of all open rollouts, and the last used of closed ones (LRU). A closed rollout that was
not used for long is evicted with its calls; the journal rebuilds both when it is read again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import re2
import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock_chassis.validation import invalid_field
from penstock_codec import Codec, CodecError, ControlTokens
from penstock_codec.chat import FinishReason, Message, ReasoningPart, TextPart, Tool, ToolCallPart, Usage
from penstock_codec.fast_dataclass import quick
from penstock_codec.images import measured
from penstock_interception.domain.calls import Answerer, Dialect, Prompt, RolloutSpec, RolloutState
from penstock_interception.domain.completions import Completion, Tokens, violations_of
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.requests import (
    ChatRequest,
    LinePattern,
    Spell,
    blank_volatile,
    hints_for,
    with_thinking,
)
from penstock_interception.domain.results import CompletionRefused, PreparedAnswer
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.gate.gate import Gate
from penstock_interception.graph import CallClass, GraphRecord, Plan, Sampled, TokenGraph
from penstock_interception.graph.inline import TooLongInline
from penstock_interception.graph.paths import common_prefix
from penstock_interception.graph.values import IntArray
from penstock_interception.sources.base import Resolved
from penstock_interception.sources.registry import Sources
from penstock_interception.store.reading import StoredRollout
from penstock_interception.store.store import CallStore

_log = structlog.get_logger(__name__)

# Planning passes over the whole body and all of its messages, known or not: some ns a byte, and some us a part.
INLINE_BODY_BYTES = 512 << 10
INLINE_PARTS = 1024

_SPELLED = {
    ControlTokens.PLAIN: "Control tokens in texts of the conversation were treated as text.",
    ControlTokens.PARSE: "Control tokens in texts of the conversation were treated as control tokens, as requested.",
}
_MIXED_UP = (
    "Control tokens in texts of the conversation were treated as control tokens: the chat template changes texts, "
    "so they could not be distinguished from its own."
)


@quick
@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion's tokens, parsed; `last_chars` is the most characters that its last token can have contributed."""

    message: Message
    finish_reason: FinishReason
    last_chars: int = 0


class Conversation:
    """The graph and codec of one rollout; `codec` is None if its source has no tokenizer."""

    def __init__(
        self,
        spec: RolloutSpec,
        codec: Codec | None,
        *,
        vocab_size: int | None,
        takes_images: bool = False,
        records: Sequence[GraphRecord] = (),
    ) -> None:
        """`takes_images`: who answers does. Raises InvalidArgument FIELD_INVALID."""
        self._takes_images = takes_images
        self._spec = spec
        self._codec = codec
        self.spell: Spell | None = None if codec is None else codec.token_bytes
        # The ids of which one ends each complete turn; empty if there is no tokenizer.
        self.stop_token_ids: tuple[int, ...] = () if codec is None else codec.stop_token_ids
        self._volatile = _compile(spec.hints.volatile_line_patterns)
        self.graph = TokenGraph.restore_unbroken(spec.rollout_id, codec, records, vocab_size=vocab_size)
        # Held from making an answer's record to its commit: the next record builds on it.
        self.recording = asyncio.Lock()
        # The tools of all calls, and those that their answers may call, by digest.
        self.tools: dict[bytes, tuple[Tool, ...]] = {}

    def add_tools(self, request: ChatRequest) -> bytes:
        """Stores the tools of a new call; returns the digest of those that its answer may call and is parsed with."""
        if request.tools:
            self.tools.setdefault(request.tools_sha256, request.tools)
        tools, digest = request.callable_tools
        if tools:
            self.tools.setdefault(digest, tools)
        return digest

    def plan(
        self, request: ChatRequest, session: Sequence[tuple[str, str]] = (), inline_bytes: int | None = None
    ) -> Plan:
        """Returns the prompt for a request, and notes to record; `session` are the agent's session headers.

        `inline_bytes`: the most bytes of new text to work on, for a caller on the event loop; None for one in a thread.

        CPU work, in any thread. Raises CodecError if the template cannot render the conversation, TooLongInline if
        there is more to do than `inline_bytes` allows.
        """
        messages = request.messages
        if inline_bytes is not None:
            parts = len(messages) + sum([len(message.parts) for message in messages])
            if parts > INLINE_PARTS or len(request.body) > INLINE_BODY_BYTES:
                raise TooLongInline
        self._check_images(request)
        if self._volatile:
            messages, _ = blank_volatile(messages, self._volatile)
        hints = hints_for(request, self._spec.hints, session)
        if self._spec.judge_of:
            hints = replace(hints, call_class=CallClass.JUDGE)
        elif self._spec.user_of:
            hints = replace(hints, call_class=CallClass.USER)
        plan = self.graph.plan(
            messages,
            request.tools,
            hints,
            template_kwargs=with_thinking(request.template_kwargs, self._spec.sampling_override.thinking),
            inline_bytes=inline_bytes,
        )
        codec = self._codec
        if codec is None or not codec.may_spell_control_tokens(request.body):
            return plan
        if not codec.spells_control_tokens(request.messages, request.tools):
            return plan
        return replace(plan, notes=(_MIXED_UP if plan.mixed_up else _SPELLED[codec.control_tokens],))

    def _check_images(self, request: ChatRequest) -> None:
        """Raises CodecError IMAGE_UNSUPPORTED, IMAGE_REMOTE: before any image is a part of a prompt."""
        if self._codec is None or self._codec.images is None:
            return  # the codec refuses them
        if not any(message.images for message in request.messages):
            return
        if not self._takes_images:
            raise CodecError("IMAGE_UNSUPPORTED", "the engine that answers this rollout takes no images")
        for message in request.messages:
            for image in message.images:
                measured(image)

    def count(self, request: ChatRequest) -> int:
        """Returns a request's prompt length in tokens, as `plan` would make it. Raises CodecError; TOKENIZER_ABSENT."""
        if self._codec is None:
            raise FailedPrecondition("The rollout's source has no tokenizer.", reason="TOKENIZER_ABSENT")
        return int(self.plan(request).prompt_ids.size)

    def text_of(self, ids: IntArray) -> str:
        """Returns the text of token ids; "" without a tokenizer."""
        return "" if self._codec is None else self._codec.decode(ids)

    def parse(self, plan: Plan, completion: Completion, callable_sha256: bytes) -> ParsedAnswer | None:
        """Parses a completion's tokens; returns None without tokens or without a tokenizer. CPU work.

        `callable_sha256` is what `add_tools` returned for the call. Where its answer may call nothing, what would be a
        call stays text: the agent may use a protocol of its own, and one that excluded calls does not expect them.
        """
        if completion.tokens is None or self._codec is None:
            return None
        tools = self.tools.get(callable_sha256, ())
        parsed = self._codec.parse(
            completion.tokens.ids,
            prompt_ids=plan.prompt_ids[-64:],
            tools=tools,
            calls=bool(tools),
            finish_reason=completion.finish_reason,
        )
        if completion.stop_text is None:
            return ParsedAnswer(parsed.message, parsed.finish_reason)
        # Nothing for an id outside the vocabulary, which `prepare_answer` refuses.
        said = b"".join(self._codec.token_bytes(completion.tokens.ids[-1:]))
        last = len(said.decode(errors="replace"))
        return ParsedAnswer(before_stop(parsed.message, completion.stop_text, last), parsed.finish_reason, last)

    def prepare_answer(
        self, call: Call, plan: Plan, completion: Completion, parsed: ParsedAnswer | None, answerer: Answerer
    ) -> PreparedAnswer:
        """Makes an answer's record for the graph. Raises CompletionRefused with every rule that it breaks (R83).

        The caller holds `recording`; the record's `settle` releases it.
        """
        found = violations_of(completion)
        if found or completion.finish_reason is None:
            raise CompletionRefused(found)
        finish = completion.finish_reason if parsed is None else parsed.finish_reason
        given = completion.message
        if given is not None and completion.stop_text is not None:
            given = before_stop(given, completion.stop_text, parsed.last_chars if parsed is not None else 0)
        message = given or (parsed.message if parsed is not None else None)
        if message is None:
            raise CompletionRefused(["completion.message: required, because the rollout's source has no tokenizer"])
        if message.tool_calls and finish is FinishReason.STOP:
            finish = FinishReason.TOOL_CALLS
        injected = given is not None and (
            answerer is Answerer.TRAINER if parsed is None else not _same(given, parsed.message)
        )
        tokens = completion.tokens
        if self._codec is None and tokens is not None:
            if completion.prompt_ids is None:
                tokens = None  # without their prompt they make no sample: stored as text
            else:
                plan = self._observed(plan, completion.prompt_ids)
        sampled = _sampled(completion, tokens, message, finish, injected, call.policy_id)
        try:
            record = self.graph.prepare(call.id, plan, sampled)
        except InvalidArgument as error:
            raise CompletionRefused(f"completion.{v.field}: {v.description}" for v in error.violations) from None
        count = record.keep + int(record.suffix.size)
        prompt = Prompt(count, record.keep, record.call_class, record.branch_id, record.parent_call_id)
        usage = completion.usage
        if tokens is not None or usage is None:
            thought, cached = (usage.reasoning_tokens, usage.cached_tokens) if usage is not None else (None, None)
            usage = Usage(count, completion.count, thought, cached)
        taken = completion.taken(tokens, finish, usage)
        return PreparedAnswer(
            completion=taken,
            message=message,
            prompt=prompt,
            injected=injected,
            record=record.to_bytes(),
            chain_sha256=record.chain,
            chain_index=len(self.graph.calls),
            settle=partial(self._settle, record),
        )

    def _settle(self, record: GraphRecord, kept: bool) -> None:
        try:
            if kept:
                self.graph.apply(record)
        finally:
            self.recording.release()

    def _observed(self, plan: Plan, ids: IntArray) -> Plan:
        """Replaces the planned prompt by the engine's; it continues the previous line only if it extends its tokens."""
        parent = self.graph.calls.get(plan.parent_call_id or "")
        before = self.graph.path(parent.call_id) if parent is not None else ids[:0]
        keep = common_prefix(before, ids)
        known = replace(plan, prompt_ids=ids, shared_prefix_len=keep, suffix_ids=ids[keep:])
        if parent is None or keep == before.size:
            return known
        return replace(
            known,
            parent_call_id=parent.call_id if keep else None,
            new_branch=True,
            branch_id=secrets.token_hex(16),
            reason="the engine's prompt does not continue the previous turn",
        )


class Conversations:
    """The conversations by rollout id, and which closed rollouts were used last."""

    def __init__(
        self,
        store: CallStore,
        sources: Sources,
        registry: Registry,
        gate: Gate,
        *,
        parse: Callable[[Dialect, bytes], ChatRequest],
        closed_kept: int,
    ) -> None:
        """`parse` parses a stored body again. `closed_kept` closed rollouts stay in memory."""
        self._store = store
        self._sources = sources
        self._registry = registry
        self._gate = gate
        self._parse = parse
        self._closed_kept = closed_kept
        self._conversations: dict[str, Conversation] = {}
        self._closed: OrderedDict[str, Rollout] = OrderedDict()
        self._reloading = asyncio.Lock()

    def __getitem__(self, rollout_id: str) -> Conversation:
        """The conversation of a rollout that is in memory, as each open one is."""
        return self._conversations[rollout_id]

    def get(self, rollout_id: str) -> Conversation | None:
        """Returns the conversation if it is in memory."""
        return self._conversations.get(rollout_id)

    def add(self, spec: RolloutSpec, resolved: Resolved) -> None:
        """Makes the conversation of a new rollout, unless a concurrent request with the same id was first."""
        if spec.rollout_id not in self._conversations:
            facts = resolved.facts
            made = Conversation(spec, resolved.codec, vocab_size=facts.vocabulary_size, takes_images=facts.images)
            self._conversations[spec.rollout_id] = made

    def forget(self, rollout_id: str) -> None:
        """Drops the conversation of a rollout that does not exist any more."""
        self._conversations.pop(rollout_id, None)
        self._closed.pop(rollout_id, None)

    def use_closed(self, rollout: Rollout) -> None:
        """Marks a closed rollout as just used, and evicts the least recently used ones."""
        self._closed[rollout.id] = rollout
        self._closed.move_to_end(rollout.id)
        while len(self._closed) > self._closed_kept:
            _, oldest = self._closed.popitem(last=False)
            self.evict(oldest)

    def evict(self, rollout: Rollout) -> None:
        """Frees a closed rollout's calls and conversation."""
        self._gate.lifecycle.evict(rollout)
        self._conversations.pop(rollout.id, None)

    async def of(self, rollout: Rollout) -> Conversation:
        """Returns the rollout's conversation with its calls in memory; reloads an evicted rollout from the journal.

        Raises NotFound ROLLOUT_UNKNOWN if the rollout was deleted meanwhile, and what Sources.codec raises.
        """
        if rollout.state is RolloutState.CLOSED:
            async with self._reloading:
                self._check_known(rollout)
                if rollout.evicted:
                    stored = await self._store.load(rollout)
                    conversation = await self._rebuilt(stored)
                    self._check_known(rollout)
                    self._conversations[rollout.id] = conversation
                    self._gate.lifecycle.reload(rollout, stored.calls)
                self.use_closed(rollout)
        return self._conversations[rollout.id]

    async def rebuild(self, stored: StoredRollout) -> None:
        """Rebuilds the conversation of an open rollout after a restart. Raises PenstockError and CodecError."""
        self._conversations[stored.rollout.id] = await self._rebuilt(stored)

    async def _rebuilt(self, stored: StoredRollout) -> Conversation:
        rollout = stored.rollout
        codec = await self._sources.codec(rollout.facts)
        facts = rollout.facts
        conversation = Conversation(
            rollout.spec,
            codec,
            vocab_size=facts.vocabulary_size,
            takes_images=facts.images,
            records=stored.graph,
        )
        rollout.damaged = len(conversation.graph.calls) < stored.recorded
        read: set[bytes] = {b""}
        for call in stored.calls:  # tools are only in the bodies: one body is read for each distinct set
            digest = call.request.tools_sha256
            if digest in read:
                continue
            read.add(digest)
            body = await self._store.body(call.id)
            try:
                conversation.tools[digest] = self._parse(call.request.dialect, body).tools
            except Exception as error:  # noqa: BLE001 - the version that took the call may have been less strict
                # Only answers to open calls are parsed with tools, and those calls are parsed again.
                _log.warning(
                    "the tools of a journalled request cannot be read any more",
                    call_id=call.id,
                    rollout_id=rollout.id,
                    error=type(error).__name__,
                )
        return conversation

    def _check_known(self, rollout: Rollout) -> None:
        """Checks that the rollout was not deleted. The id alone is not enough: another rollout may have it by now."""
        if self._registry.find(rollout.id) is not rollout:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")


def before_stop(message: Message, stop: str, last_chars: int) -> Message:
    """Cuts an answer, for the agent, at the stop text that ended it (R101). Its tokens stay as sampled.

    The last token completed the stop text and may contain more after it. The stop text therefore lies within the last
    `len(stop) + last_chars` characters. A stop text that the model wrote as a tool call counts as a tool call.
    """
    *before, last = message.parts or (TextPart(""),)
    if not isinstance(last, TextPart | ReasoningPart):
        return message
    text = last.text
    place = text.find(stop, max(0, len(text) - len(stop) - last_chars))
    if place < 0:  # an answer's trailing white space is not part of it
        short = stop.rstrip()
        place = len(text) - len(short) if short and text.endswith(short) else -1
    if place < 0:
        return message
    left = (replace(last, text=text[:place]),) if place else ()
    return replace(message, parts=(*before, *left))


def _compile(patterns: Iterable[str]) -> tuple[LinePattern, ...]:
    """Compiles with RE2, which is linear in the text for any pattern: the text comes from an agent."""
    options = re2.Options()
    options.log_errors = False
    compiled: list[LinePattern] = []
    for index, pattern in enumerate(patterns):
        try:
            compiled.append(re2.compile(f"(?m){pattern}", options))
        except re2.error as error:
            raise invalid_field(
                f"hints.volatile_line_patterns[{index}]", f"not a regular expression: {error}"
            ) from error
    return tuple(compiled)


def _sampled(
    completion: Completion,
    tokens: Tokens | None,
    message: Message,
    finish: FinishReason,
    injected: bool,
    policy_id: str,
) -> Sampled:
    return Sampled(
        message=message,
        finish_reason=finish,
        token_ids=tokens.ids if tokens is not None else None,
        logprobs=tokens.logprobs if tokens is not None else None,
        logprobs_mode=tokens.logprobs_mode if tokens is not None else None,
        versions=tokens.versions if tokens is not None else (),
        sampling_used=completion.sampling_used,
        engine=completion.engine,
        engine_version=completion.engine_version,
        injected=injected,
        top=tokens.top if tokens is not None else None,
        tensors=tokens.tensors if tokens is not None else (),
        policy_id=policy_id,
    )


def _same(given: Message, parsed: Message) -> bool:
    """Returns whether two answers look the same to the agent, generated tool call ids aside."""
    return _without_ids(given) == _without_ids(parsed)


def _without_ids(message: Message) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    calls = tuple((c.name, c.arguments_json) for c in message.parts if isinstance(c, ToolCallPart))
    return message.text, message.reasoning, calls
