"""An agent's request once its dialect is taken off: what every dialect parses into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

from penstock_codec.chat import Message, Role, Sampling, TextPart, Tool, ToolChoice
from penstock_codec.quick import quick
from penstock_interception.calls import AgentHints
from penstock_interception.graph.fingerprint import KNOWN_TOOLS_CHARS
from penstock_interception.graph.model import CallClass, CallHints, IntArray

BLANKED = "[...]"

Spoken: TypeAlias = tuple[Sequence[Any], Sequence[Message]]
"""Messages as they came, and each as it was read."""

Spell: TypeAlias = Callable[[IntArray], list[bytes]]
"""The bytes of each of some token ids."""


HOSTED_FIELDS: Final = frozenset(
    {"websearchoptions", "plugins", "websearch", "searchparameters", "enablesearch", "mcpservers"}
)
"""Fields of Chat Completions, by their plain names, that let a provider run tools: they never go on to an upstream."""


def plain_name(name: str) -> str:
    """A field's name without its spelling: some servers take toolConfig, tool_config and ToolConfig for the same."""
    return name.lower().replace("_", "")


def is_hosted_field(name: str) -> bool:
    """Whether a field of Chat Completions lets a provider run tools."""
    return plain_name(name) in HOSTED_FIELDS


class LinePattern(Protocol):
    """A compiled pattern."""

    def sub(self, repl: str, text: str, /) -> str: ...


MOST_NOTES: Final = 32
MOST_NOTE_CHARS: Final = 160
MOST_NAME_CHARS: Final = 64
"""Of what is kept with a call about its body: names in it are the agent's, as long and as many as it likes."""


def bounded(notes: Sequence[str]) -> tuple[str, ...]:
    """The first of them, none too long; how many there are besides is said."""
    if len(notes) == MOST_NOTES + 1 and notes[-1].startswith("and "):
        return tuple(notes)  # they were cut before
    kept = tuple(
        note if len(note) <= MOST_NOTE_CHARS else f"{note[:MOST_NOTE_CHARS]}..." for note in notes[:MOST_NOTES]
    )
    return kept if len(notes) <= MOST_NOTES else (*kept, f"and {len(notes) - MOST_NOTES} more")


@quick
@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue. `normalisations` say what of the body was changed or ignored, one sentence each.

    Equal tools of several requests are one object.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()  # noqa: RUF009 - immutable
    sampling: Sampling = Sampling()  # noqa: RUF009 - immutable
    stream: bool = False
    include_usage: bool = False
    normalisations: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # What would have run at the provider, past the gate, and was left out: hosted tools and their like, by name.
    provider_tools: tuple[str, ...] = ()
    # What the dialect needs once more when it writes the answer; small, for it waits with the call.
    echo: Mapping[str, Any] = field(default_factory=dict)
    # Whether the answer tells the logprob of each token, and what tells those tokens' bytes, once the call is admitted.
    logprobs: bool = False
    spell: Spell | None = field(default=None, compare=False, repr=False)
    # The messages as they came, one for each of `messages`; None where a dialect cannot go on from them (`parse_on`).
    raw_messages: Sequence[Any] | None = field(default=None, compare=False, repr=False)

    # Digest of the tools; empty without tools.
    tools_sha256: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tools, digest = _interned(self.tools) if self.tools else ((), b"")
        object.__setattr__(self, "tools", tools)
        object.__setattr__(self, "tools_sha256", digest)
        if self.normalisations:
            object.__setattr__(self, "normalisations", bounded(self.normalisations))
        if self.provider_tools:
            names = tuple(name[:MOST_NAME_CHARS] for name in self.provider_tools[:MOST_NOTES])
            object.__setattr__(self, "provider_tools", names)

    def with_messages(self, messages: tuple[Message, ...], raw: Sequence[Any] | None) -> ChatRequest:
        """The same of this conversation."""
        return ChatRequest(
            self.model,
            messages,
            self.tools,
            self.tool_choice,
            self.sampling,
            self.stream,
            self.include_usage,
            self.normalisations,
            self.template_kwargs,
            self.provider_tools,
            self.echo,
            self.logprobs,
            None,
            raw,
        )

    def without_content(self, spell: Spell | None = None) -> ChatRequest:
        """What of it a call needs that waits for its answer."""
        return ChatRequest(
            self.model,
            (),
            (),
            self.tool_choice,
            self.sampling,
            self.stream,
            self.include_usage,
            echo=self.echo,
            logprobs=self.logprobs,
            spell=spell,
        )


def _interned(tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bytes]:
    """The tools as they came first, and their digest: agents of a kind bring the same with each call."""
    global _last
    known = _last
    if tools is known[0]:
        return known
    size = sum(len(tool.description) + len(tool.parameters_json_schema) for tool in tools)
    found = _last = _known(tools) if size <= KNOWN_TOOLS_CHARS else (tools, _digest(tools))
    return found


# The tools of the last request, which are those of the next as a rule, with their digest.
_last: tuple[tuple[Tool, ...], bytes] = ((), b"")


@lru_cache(maxsize=128)
def _known(tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bytes]:
    return tools, _digest(tools)


def _digest(tools: Sequence[Tool]) -> bytes:
    state = hashlib.sha256()
    for tool in tools:
        state.update(repr((tool.name, tool.description, tool.parameters_json_schema, tool.strict)).encode())
    return state.digest()


def hints_for(request: ChatRequest, known: AgentHints, session: Sequence[tuple[str, str]]) -> CallHints:
    """What the agent's spec and headers say of this call."""
    call_class = None
    if known.title_system_prompts or known.compaction_system_prompts:
        system = "\n".join(m.text for m in request.messages if m.role in (Role.SYSTEM, Role.DEVELOPER))
        if any(mark in system for mark in known.title_system_prompts):
            call_class = CallClass.TITLE
        elif any(mark in system for mark in known.compaction_system_prompts):
            call_class = CallClass.COMPACTION
    identity = ";".join(value for _, value in session)
    return CallHints(call_class=call_class, session=identity, max_tokens=request.sampling.max_tokens)


def blank_volatile(messages: Sequence[Message], patterns: Sequence[LinePattern]) -> tuple[tuple[Message, ...], bool]:
    """The messages with what matches blanked in system and user text, and whether anything was."""
    changed = False
    result: list[Message] = []
    for message in messages:
        if message.role in (Role.SYSTEM, Role.DEVELOPER, Role.USER):
            parts = tuple(
                replace(part, text=_blank(part.text, patterns)) if isinstance(part, TextPart) else part
                for part in message.parts
            )
            if parts != message.parts:
                changed = True
                message = replace(message, parts=parts)
        result.append(message)
    return tuple(result), changed


def _blank(text: str, patterns: Sequence[LinePattern]) -> str:
    for pattern in patterns:
        text = pattern.sub(BLANKED, text)
    return text
