"""An agent's request, independent of its dialect: every dialect parses into this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Protocol, TypeAlias

from penstock_codec.chat import ImagePart, Message, Role, Sampling, TextPart, Tool, ToolChoice, ToolChoiceMode
from penstock_codec.fast_dataclass import quick
from penstock_interception import cache
from penstock_interception.domain.calls import AgentHints
from penstock_interception.graph.values import CallClass, CallHints, IntArray

_UNSET = Sampling()

BLANKED = "[...]"

ENABLE_THINKING: Final = "enable_thinking"
REASONING_EFFORT: Final = "reasoning_effort"
"""Arguments of chat templates; a template uses those that it knows."""

Spell: TypeAlias = Callable[[IntArray], list[bytes]]
"""A function that returns the bytes of each token id."""


HOSTED_FIELDS: Final = frozenset(
    {"websearchoptions", "plugins", "websearch", "searchparameters", "enablesearch", "mcpservers"}
)
"""Chat Completions fields, by plain name, that let a provider run tools: they are never forwarded to an upstream."""


def plain_name(name: str) -> str:
    """Returns a field's canonical name: some servers accept toolConfig, tool_config and ToolConfig alike."""
    return name.lower().replace("_", "")


def is_hosted_field(name: str) -> bool:
    """Returns whether a Chat Completions field lets a provider run tools."""
    return plain_name(name) in HOSTED_FIELDS


class LinePattern(Protocol):
    def sub(self, repl: str, text: str, /) -> str: ...


MOST_NOTES: Final = 32
MOST_NOTE_CHARS: Final = 160
MOST_NAME_CHARS: Final = 64
"""Limits on what a call stores about its body: the agent chooses number and length of the names in it."""


def bounded(notes: Sequence[str]) -> tuple[str, ...]:
    """Keeps the first `MOST_NOTES` notes, each shortened to `MOST_NOTE_CHARS`, and counts the rest."""
    if len(notes) == MOST_NOTES + 1 and notes[-1].startswith("and "):
        return tuple(notes)  # bounded before
    kept = tuple(
        note if len(note) <= MOST_NOTE_CHARS else f"{note[:MOST_NOTE_CHARS]}..." for note in notes[:MOST_NOTES]
    )
    return kept if len(notes) <= MOST_NOTES else (*kept, f"and {len(notes) - MOST_NOTES} more")


@quick
@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue. `normalisations` lists what was changed or ignored in the body, one sentence each.

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
    # Names of what was removed because it would run at the provider, past the gate: hosted tools and the like.
    provider_tools: tuple[str, ...] = ()
    # Values that the dialect needs again to write the answer; small, since they are kept while the call waits.
    echo: Mapping[str, Any] = field(default_factory=dict)
    # Whether the answer includes each token's logprob, and, once the call is admitted, the function for token bytes.
    logprobs: bool = False
    spell: Spell | None = field(default=None, compare=False, repr=False)
    # The bytes that it was parsed from.
    body: bytes = field(default=b"", compare=False, repr=False)
    # Digest of the tools; empty without tools.
    tools_sha256: bytes = field(default=b"", repr=False)
    # Tools that the model may call although the prompt does not begin with them: a message defines them once found.
    deferred: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        if self.tools and not self.tools_sha256:
            tools, digest = _tool_set(self.tools)
            object.__setattr__(self, "tools", tools)
            object.__setattr__(self, "tools_sha256", digest)
        if self.normalisations:
            object.__setattr__(self, "normalisations", bounded(self.normalisations))
        if self.provider_tools:
            names = tuple(name[:MOST_NAME_CHARS] for name in self.provider_tools[:MOST_NOTES])
            object.__setattr__(self, "provider_tools", names)

    @property
    def callable_tools(self) -> tuple[tuple[Tool, ...], bytes]:
        """The tools that an answer may call, deferred ones too, and their digest; empty where it may call none."""
        if self.tool_choice.mode is ToolChoiceMode.NONE:
            return (), b""
        return _tool_set((*self.tools, *self.deferred)) if self.deferred else (self.tools, self.tools_sha256)

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The inline images of all messages, each once."""
        found = {image.ref: image for message in self.messages for image in message.images if image.data}
        return tuple(found.values())

    def with_messages(self, messages: tuple[Message, ...], body: bytes) -> ChatRequest:
        """Returns a copy with these messages, parsed from this body."""
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
            body,
            self.tools_sha256,
            self.deferred,
        )

    def without_content(self, spell: Spell | None = None) -> ChatRequest:
        """Returns the part that a waiting call needs for its answer."""
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


@cache.TOOL_SETS
def _tool_set(tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bytes]:
    """Returns these tools, or equal ones that came earlier, and their digest: agents of one kind send the same ones."""
    state = hashlib.sha256()
    for tool in tools:
        state.update(repr((tool.name, tool.description, tool.parameters_json_schema, tool.strict)).encode())
    return tools, state.digest()


def hints_for(request: ChatRequest, known: AgentHints, session: Sequence[tuple[str, str]]) -> CallHints:
    """Returns the hints from the agent's spec and headers for this call."""
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
    """Blanks the matches in system and user text; returns the messages, and whether any changed."""
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


def with_max_tokens(sampling: Sampling, limit: int | None) -> Sampling:
    """Returns a copy with this limit; None means no limit."""
    return sampling if sampling.max_tokens == limit else replace(sampling, max_tokens=limit)


def merged_sampling(base: Sampling, override: Sampling) -> Sampling:
    """Returns `base` with every field that `override` sets; its `top_k` 0 unsets that of `base`."""
    if override == _UNSET:
        return base
    changes = {f.name: value for f in fields(override) if (value := getattr(override, f.name)) is not None}
    if changes.get("top_k") == 0:
        changes["top_k"] = None  # engines and trainers know "off" as unset, not as 0
    return replace(base, **changes)


def with_thinking(template_kwargs: Mapping[str, Any], thinking: bool | None) -> Mapping[str, Any]:
    """Returns a template's arguments where `thinking` replaces the agent's wish; None leaves the arguments."""
    if thinking is None or template_kwargs.get(ENABLE_THINKING) is thinking:
        return template_kwargs
    kwargs = {**template_kwargs, ENABLE_THINKING: thinking}
    if not thinking:
        kwargs.pop(REASONING_EFFORT, None)  # a template that knows no other argument would think
    return kwargs


def sampling_within(sampling: Sampling, room: int | None) -> Sampling:
    """Returns the sampling with `max_tokens` lowered to the tokens that the context has left; None: no limit."""
    if room is None or (sampling.max_tokens is not None and sampling.max_tokens <= room):
        return sampling
    return with_max_tokens(sampling, room)
