"""One rollout's conversations: its token graph, with the codec that turns requests into prompts and answers into text.

Planning is pure and may run in another thread; recording belongs to the event loop. Nothing sampled is ever tokenised
again (R82): the graph finds the line that a request continues, and only what is new is tokenised.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import re2

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_codec import Codec, ControlTokens
from penstock_codec.chat import FinishReason, Message, ReasoningPart, TextPart, Tool, ToolCallPart, Usage
from penstock_codec.quick import quick
from penstock_interception.calls import Answerer, Call, Opening, Prompt
from penstock_interception.completions import Completion, Tokens, violations_of
from penstock_interception.graph import CommitRecord, Plan, Sampled, TokenGraph
from penstock_interception.graph.model import IntArray
from penstock_interception.graph.paths import common_prefix
from penstock_interception.ports import CompletionRefused, Recorded
from penstock_interception.recall import Heard
from penstock_interception.requests import ChatRequest, LinePattern, Spell, blank_volatile, hints_for

_SPELLED = {
    ControlTokens.PLAIN: "Control tokens that texts of the conversation spell were taken as text.",
    ControlTokens.PARSE: "Control tokens that texts of the conversation spell were taken as control tokens, as asked.",
}
_MIXED_UP = (
    "Control tokens that texts of the conversation spell were taken as control tokens: the chat template changes texts,"
    " so that they could not be told from its own."
)


@quick
@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What the tokens of a completion say; `last_chars` is how much of it the last one can have said."""

    message: Message
    finish_reason: FinishReason
    last_chars: int = 0


class Conversation:
    """The graph and codec of one rollout; `codec` None where its source has no tokenizer."""

    def __init__(
        self, opening: Opening, codec: Codec | None, *, vocab_size: int | None, records: Sequence[CommitRecord] = ()
    ) -> None:
        """Raises InvalidArgument VOLATILE_PATTERN_INVALID."""
        self._opening = opening
        self._codec = codec
        self.spell: Spell | None = None if codec is None else codec.token_bytes
        self._volatile = _compile(opening.hints.volatile_line_patterns)
        self.graph = TokenGraph.restore_unbroken(opening.rollout_id, codec, records, vocab_size=vocab_size)
        # Held from the making of an answer's record to its commit: the next one goes on from it.
        self.recording = asyncio.Lock()
        # The tools that requests came with, by their digest.
        self.tools: dict[bytes, tuple[Tool, ...]] = {}
        self._longest_body = 0

    def fresh_bytes(self, body_length: int) -> int:
        """About how much of a body of this length is new, to judge what planning costs."""
        return body_length - self._longest_body if body_length >= self._longest_body else body_length

    def plan(
        self,
        request: ChatRequest,
        session: Sequence[tuple[str, str]],
        body_length: int,
        heard: Heard | None = None,
    ) -> Plan:
        """The prompt for a request; `heard` is what this rollout's agent is known to have said.

        CPU work. Raises CodecError when the template cannot take the conversation.
        """
        messages = request.messages
        if self._volatile:
            messages, _ = blank_volatile(messages, self._volatile)
        hints = hints_for(request, self._opening.hints, session)
        before = heard.keyed if heard is not None else None
        plan, keyed = self.graph.plan_on(
            messages, request.tools, hints, template_kwargs=request.template_kwargs, before=before
        )
        if heard is not None:
            heard.keyed = keyed
        if request.tools:
            self.tools.setdefault(request.tools_sha256, request.tools)
        self._longest_body = max(self._longest_body, body_length)
        return plan

    def notes_on(self, request: ChatRequest, body: bytes, plan: Plan) -> tuple[str, ...]:
        """What there is to record of a request's texts and its plan. CPU work."""
        codec = self._codec
        if codec is None or not codec.may_spell_control_tokens(body):
            return ()
        if not codec.spells_control_tokens(request.messages, request.tools):
            return ()
        return (_MIXED_UP if plan.mixed_up else _SPELLED[codec.control_tokens],)

    def count(self, request: ChatRequest, body_length: int) -> int:
        """How many tokens the prompt of a request has, as `plan` would make it. Raises CodecError; TOKENIZER_ABSENT."""
        if self._codec is None:
            raise FailedPrecondition("The rollout's source has no tokenizer.", reason="TOKENIZER_ABSENT")
        return int(self.plan(request, (), body_length).prompt_ids.size)

    def parse(self, plan: Plan, completion: Completion, tools_sha256: bytes) -> ParsedAnswer | None:
        """What the completion's tokens say; None without tokens or without a tokenizer. CPU work."""
        if completion.tokens is None or self._codec is None:
            return None
        parsed = self._codec.parse(
            completion.tokens.ids,
            prompt_ids=plan.prompt_ids[-64:],
            tools=self.tools.get(tools_sha256, ()),
            finish_reason=completion.finish_reason,
        )
        if completion.stop_text is None:
            return ParsedAnswer(parsed.message, parsed.finish_reason)
        last = len(self._codec.decode(completion.tokens.ids[-1:]))
        return ParsedAnswer(before_stop(parsed.message, completion.stop_text, last), parsed.finish_reason, last)

    def record(
        self, call: Call, plan: Plan, completion: Completion, parsed: ParsedAnswer | None, answerer: Answerer
    ) -> Recorded:
        """An answer as it will be in the graph. Raises CompletionRefused with every rule that it breaks (R83).

        Whoever calls holds `recording`, which the answer's `settle` lets go.
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
            raise CompletionRefused(["completion.message: needed, since the rollout's source has no tokenizer"])
        if message.tool_calls and finish is FinishReason.STOP:
            finish = FinishReason.TOOL_CALLS
        injected = given is not None and (
            answerer is Answerer.TRAINER if parsed is None else not _same(given, parsed.message)
        )
        tokens = completion.tokens
        if self._codec is None and tokens is not None:
            if completion.prompt_ids is None:
                tokens = None  # without their prompt they are no sample: kept as text
            else:
                plan = self._observed(plan, completion.prompt_ids)
        sampled = _sampled(completion, tokens, message, finish, injected)
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
        return Recorded(
            completion=taken,
            message=message,
            prompt=prompt,
            injected=injected,
            record=record.to_bytes(),
            chain_sha256=record.chain,
            chain_index=len(self.graph.calls),
            settle=partial(self._settle, record),
        )

    def _settle(self, record: CommitRecord, kept: bool) -> None:
        try:
            if kept:
                self.graph.apply(record)
        finally:
            self.recording.release()

    def _observed(self, plan: Plan, ids: IntArray) -> Plan:
        """The plan with the prompt that the engine rendered: on the line before when it goes on from its tokens."""
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
            reason="the engine's prompt does not go on from the turn before",
        )


def before_stop(message: Message, stop: str, last_chars: int) -> Message:
    """An answer as an agent is shown it: up to the stop text that ended it (R101). Its tokens stay as sampled.

    The stop was completed by the last token, which may say more than that: it stands within the last
    `len(stop) + last_chars` characters. What the model wrote there as a tool call is one.
    """
    *before, last = message.parts or (TextPart(""),)
    if not isinstance(last, TextPart | ReasoningPart):
        return message
    text = last.text
    place = text.find(stop, max(0, len(text) - len(stop) - last_chars))
    if place < 0:  # white space at the end of an answer is not part of it
        short = stop.rstrip()
        place = len(text) - len(short) if short and text.endswith(short) else -1
    if place < 0:
        return message
    left = (replace(last, text=text[:place]),) if place else ()
    return replace(message, parts=(*before, *left))


def _compile(patterns: Iterable[str]) -> tuple[LinePattern, ...]:
    """RE2, which is linear in the text whatever the pattern: the text is an agent's."""
    options = re2.Options()
    options.log_errors = False
    compiled: list[LinePattern] = []
    for index, pattern in enumerate(patterns):
        try:
            compiled.append(re2.compile(f"(?m){pattern}", options))
        except re2.error as error:
            raise InvalidArgument(
                "A volatile line pattern is no regular expression.",
                reason="VOLATILE_PATTERN_INVALID",
                violations=[Violation(f"hints.volatile_line_patterns[{index}]", str(error))],
            ) from error
    return tuple(compiled)


def _sampled(
    completion: Completion, tokens: Tokens | None, message: Message, finish: FinishReason, injected: bool
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
    )


def _same(given: Message, parsed: Message) -> bool:
    """Whether two answers show the agent the same, the made-up ids of tool calls apart."""
    return _without_ids(given) == _without_ids(parsed)


def _without_ids(message: Message) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    calls = tuple((c.name, c.arguments_json) for c in message.parts if isinstance(c, ToolCallPart))
    return message.text, message.reasoning, calls
