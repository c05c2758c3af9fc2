"""Model calls of a rollout: the list, the text of one, its tokens."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from penstock.analysis.readable_calls import MessagePart, answered, messages, news
from penstock.analysis.recordings import Recording, Turn
from penstock.assistant.answers import Answer, Quote, excerpt, shown_text, visible
from penstock.assistant.context import Context
from penstock.assistant.errors import ToolError
from penstock.assistant.redaction import MARK, Redactor
from penstock.assistant.tools.base import Arguments, CallIndex, Limit, Offset, RolloutId, Tool
from penstock.client.types.chat import TokenIds

_BEGINNING: Final = 160
"""Characters of each answer in the list of calls."""
_TEXT_BYTES: Final = 24 << 10
_TOKENS: Final = 200
"""Most tokens of a page: a row of each takes up to 80 bytes."""
_WORST: Final = 10


class _Part(StrEnum):
    ANSWER = "answer"
    NEW = "new_in_prompt"
    PROMPT = "prompt"


class _Side(StrEnum):
    ANSWER = "answer"
    PROMPT = "prompt"


class _Calls(Arguments):
    rollout_id: RolloutId
    after: Annotated[
        int, Field(ge=-1, le=1_000_000, description="Only with a greater index: `next_after` leads on.")
    ] = -1
    limit: Limit = 20


class _Call(Arguments):
    rollout_id: RolloutId
    call: CallIndex
    part: Annotated[
        _Part,
        Field(description="`answer`; `new_in_prompt`, what the call before had not; `prompt`, the whole of it."),
    ] = _Part.ANSWER
    offset: Offset = 0


class _Tokens(Arguments):
    rollout_id: RolloutId
    call: CallIndex
    of: Annotated[
        _Side, Field(description="Sampled tokens have logprobs and policy versions; the prompt's have none.")
    ] = _Side.ANSWER
    first: Annotated[int, Field(ge=0, le=1 << 24, description="Position of the first token that is shown.")] = 0
    limit: Annotated[int, Field(ge=1, le=_TOKENS, description="Most tokens.")] = 100


async def _list(context: Context, given: _Calls) -> Answer:
    recording = await context.recording(given.rollout_id)
    rest = [turn for turn in recording.turns if turn.index > given.after]
    shown = rest[: given.limit]
    facts: dict[str, Any] = {
        "rollout_id": recording.rollout_id,
        "running": recording.rollout is not None and recording.outcome is None,
        "total": len(recording.turns),
        "calls": [_row(turn) for turn in shown],
        "next_after": shown[-1].index if len(rest) > len(shown) else None,
    }
    if not recording.turns:
        facts["next"] = _no_calls(recording)
    lines = await asyncio.to_thread(
        lambda: [f"{turn.index}: {_beginning(recording, turn, context.redact)}" for turn in shown]
    )
    return Answer(facts, [Quote("the model", "how each answer begins, after the index of its call", "\n".join(lines))])


async def _one(context: Context, given: _Call) -> Answer:
    recording, turn = await _found(context, given.rollout_id, given.call)
    parent = next((item for item in recording.turns if item.call_id == turn.parent_call_id), None)
    facts: dict[str, Any] = {"rollout_id": recording.rollout_id, **_row(turn), "part": given.part}
    if given.part is _Part.ANSWER:
        author, text = "the model", _answer_text(recording, turn)
    else:
        author = "the agent, its task, its tools and its model"
        same, fresh = news(turn.body, None if parent is None else parent.body)
        if given.part is _Part.NEW:
            facts["parts_as_before"] = same
        parts = fresh if given.part is _Part.NEW else messages(turn.body)
        ids = turn.prompt if given.part is _Part.PROMPT or turn.prompt is None else turn.prompt[turn.shared :]
        text = "\n\n".join(_part(item) for item in parts) or _of_tokens(recording, ids)
    if not text:
        facts["next"] = (
            "nothing is recorded of it: `tokens` may have token ids; without bodies and a tokenizer there is no text"
        )
    whole = await asyncio.to_thread(shown_text, text, context.redact)
    if given.offset > len(whole):
        raise ToolError(
            f"offset: the text has {len(whole)} characters", reason="OFFSET_INVALID", advice="use a smaller offset"
        )
    shown, following = excerpt(whole, given.offset, _TEXT_BYTES)
    facts |= {"characters": len(whole), "next_offset": following}
    which = f"call {turn.index}, {given.part.value.replace('_', ' ')}"
    if given.offset or following is not None:
        which += f", characters {given.offset} to {given.offset + len(shown)} of {len(whole)}"
    return Answer(facts, [Quote(author, which, shown)])


async def _tokens(context: Context, given: _Tokens) -> Answer:
    recording, turn = await _found(context, given.rollout_id, given.call)
    ids = turn.sampled if given.of is _Side.ANSWER else turn.prompt
    if ids is None:
        raise ToolError(
            f"call {turn.index} has no tokens of its {given.of.value}: none were captured",
            reason="TOKENS_ABSENT",
            advice="`call` has the text, if bodies were kept",
        )
    logprobs = turn.logprobs if given.of is _Side.ANSWER else None
    end = min(given.first + given.limit, len(ids))
    facts: dict[str, Any] = {
        "rollout_id": recording.rollout_id,
        "call": turn.index,
        "of": given.of,
        "total": len(ids),
        "tokens": [given.first, end],
        "next_first": end if end < len(ids) else None,
        "untrained_reason": turn.untrained or None,
        "policy_versions": [
            {"version": span.policy_version, "tokens": [span.start, span.end]} for span in turn.versions[:50]
        ]
        if given.of is _Side.ANSWER
        else [],
    }
    if logprobs is not None and len(logprobs):
        facts["mean_logprob"] = round(float(logprobs.astype(np.float64).mean()), 4)
        facts["least_likely"] = [
            {"position": int(position), "logprob": round(float(logprobs[position]), 3)}
            for position in np.argsort(logprobs, kind="stable")[:_WORST]
        ]
    lines = await asyncio.to_thread(
        lambda: list(_lines(recording, ids, logprobs, range(given.first, end), context.redact))
    )
    return Answer(facts, [Quote("the model", "position, token id, logprob, text", "\n".join(lines))])


def _lines(
    recording: Recording, ids: TokenIds, logprobs: Any, places: Sequence[int], redact: Redactor
) -> Iterator[str]:
    """Yields a line for each token. A secret spans tokens: all of them are left out, and their ids too."""
    texts = [] if recording.pieces is None else [recording.pieces.text(int(token_id)) for token_id in ids]
    hidden = _hidden(texts, redact)
    for place in places:
        chance = "-" if logprobs is None else f"{float(logprobs[place]):.3f}"
        if place in hidden:
            yield f"{place} - {chance} {MARK}"
            continue
        text = visible(texts[place]) if texts else ""
        yield f"{place} {int(ids[place])} {chance} {text!r}"


def _hidden(texts: Sequence[str], redact: Redactor) -> set[int]:
    spans = redact.spans("".join(texts))
    found: set[int] = set()
    at, number = 0, 0
    for place, text in enumerate(texts):
        begin, at = at, at + len(text)
        while number < len(spans) and spans[number][1] <= begin:
            number += 1
        if number < len(spans) and spans[number][0] < at and text:
            found.add(place)
    return found


def _row(turn: Turn) -> Mapping[str, Any]:
    versions = sorted({span.policy_version for span in turn.versions})
    return {
        "call": turn.index,
        "class": turn.role,
        "state": turn.state,
        "answered_by": turn.answerer,
        "prompt_tokens": None if turn.prompt is None else len(turn.prompt),
        "sampled_tokens": None if turn.sampled is None else len(turn.sampled),
        "policy_versions": [versions[0], versions[-1]] if versions else None,
        "seconds": None if turn.seconds is None else round(turn.seconds, 3),
        "finish_reason": turn.finish_reason or None,
        "end_reason": turn.end_reason or None,
        "untrained_reason": turn.untrained or None,
        "injected": turn.injected,
    }


async def _found(context: Context, rollout_id: str, index: int) -> tuple[Recording, Turn]:
    recording = await context.recording(rollout_id)
    turn = next((turn for turn in recording.turns if turn.index == index), None)
    if turn is None:
        count = len(recording.turns)
        have = f"it has {count}, from 0" if count else _no_calls(recording)
        raise ToolError(
            f"rollout {rollout_id} has no call {index}: {have}",
            reason="CALL_UNKNOWN",
            advice="call `calls` for the list",
        )
    return recording, turn


def _no_calls(recording: Recording) -> str:
    if recording.outcome is None:
        return "none is recorded yet at the gate of this connection: repeat the call later"
    return "none were made, or none were kept"


def _answer_text(recording: Recording, turn: Turn) -> str:
    """The answer as it was sampled, else its message."""
    if turn.sampled is not None and recording.pieces is not None:
        return recording.pieces.whole(turn.sampled)
    return "" if turn.message is None else "\n".join(_part(item) for item in answered(turn.message))


def _of_tokens(recording: Recording, ids: TokenIds | None) -> str:
    return "" if ids is None or recording.pieces is None else recording.pieces.whole(ids)


def _beginning(recording: Recording, turn: Turn, redact: Redactor) -> str:
    text = " ".join(redact(_answer_text(recording, turn), most=4 * _BEGINNING).split())
    return text[:_BEGINNING] + ("..." if len(text) > _BEGINNING else "")


def _part(item: MessagePart) -> str:
    kind = "" if item.kind == "text" else f" {item.kind.replace('_', ' ')}"
    head = f"[{item.role or '?'}{kind}{f' {item.name}' if item.name else ''}]"
    return f"{head}\n{item.text}"


CALLS: Final = (
    Tool(
        "calls",
        "Model calls of a rollout in order: class, tokens, policy versions, seconds, why one is not trained, how each"
        " answer begins.",
        _Calls,
        _list,
    ),
    Tool(
        "call",
        "The text of one model call: its answer, what was new in its prompt, or the whole prompt; long ones in parts.",
        _Call,
        _one,
    ),
    Tool(
        "tokens",
        "Tokens of one model call: ids, text, logprobs, policy versions, and the least likely ones.",
        _Tokens,
        _tokens,
    ),
)
