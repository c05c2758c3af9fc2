"""`Codec`: converts one model's text to token ids and back.

Immutable once loaded, its caches aside, and thread-safe. Its calls are CPU work (a long first prompt takes tens of
milliseconds), so a service calls it off its event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Self

import numpy as np
from tokenizers import AddedToken, Tokenizer

from penstock_codec.cache import Caches
from penstock_codec.chat import FinishReason, Message, Tool
from penstock_codec.control_text import ControlText, ControlTokens
from penstock_codec.decoding import Detokenizer
from penstock_codec.errors import CodecError
from penstock_codec.fast_dataclass import quick
from penstock_codec.images import ImageRule, Placed, expanded
from penstock_codec.parsers import (
    GRAMMARS,
    CompletionParser,
    Mark,
    ParsedCompletion,
    Reading,
    Vocabulary,
    choose_grammar,
    parser_for,
)
from penstock_codec.parsers.grammar import THINK
from penstock_codec.rendering import Rendering
from penstock_codec.segments import Segments
from penstock_codec.splice import Continuation, Inexact, IntArray, Splicer
from penstock_codec.template import ChatTemplate
from penstock_codec.tokenizer_files import TokenizerFiles

_LIKE_MARKUP = re.compile(r"<[|｜].+[|｜]>|</?tool_\w+>")  # noqa: RUF001  (DeepSeek's character)
MAX_VOCABULARY = 1 << 24
PROMPT_TAIL = 64  # a generation prompt is shorter than this


@quick
@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation's ids. `mixed_up`: control tokens spelled in its texts were encoded as such, because the template
    changed those texts beyond recognition. `images` are in the order of their tokens."""

    ids: IntArray
    mixed_up: bool = False
    images: tuple[Placed, ...] = ()


class Codec:
    """One tokenizer, one chat template, one parser."""

    def __init__(
        self,
        files: TokenizerFiles,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        parser: str | None,
        control_tokens: ControlTokens = ControlTokens.PLAIN,
    ) -> None:
        self.files = files
        self.control_tokens = control_tokens
        self.template = template
        self.images: ImageRule | None = files.images
        self._tokenizer = tokenizer
        self._grammar = choose_grammar(parser, template.text, takes_tools=template.supports_tools)
        self._parser = parser_for(self._grammar)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY:  # tables have this length, however many ids are used
            raise CodecError(
                "TOKENIZER_UNSUPPORTED", f"token ids are below {MAX_VOCABULARY}, not {self.vocab_size - 1}"
            )
        self._detokenizer = Detokenizer(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        controls = {token.content: index for index, token in added.items() if token.special}
        # A text can be cut at every added token that the tokenizer searches for in the raw text, markup included.
        whole = [t for t in added.values() if t.normalized or t.lstrip or t.rstrip or t.single_word]
        marks = [token.content for token in added.values()] if not whole else []
        self.caches = Caches()
        self._segments = Segments(tokenizer, marks, self._encode_batch, self.caches)
        self._control_text = ControlText(self._unspoken(added), self._in_answers, files.tokenizer_json)
        plain = control_tokens is ControlTokens.PLAIN
        self._rendering = Rendering(template, self._segments, self._control_text if plain else None)
        stops: dict[str, int] = {}
        for index in files.stop_token_ids:
            stop = tokenizer.id_to_token(index)
            if stop is None:
                raise CodecError("TOKEN_ID_INVALID", f"stop token id {index} is not in the vocabulary")
            stops[stop] = index
        ends = {text: vocabulary[text] for text in self._grammar.turn_ends if text in controls}
        parts = {text: vocabulary[text] for text in self._grammar.part_ends if text in controls}
        openings = {text: vocabulary[text] for text in self._grammar.turn_openings if text in controls}
        meaning = self._grammar.marks
        think = {
            mark: tuple(text for text in meaning if meaning[text] is mark)
            for mark in (Mark.OPEN_THINK, Mark.CLOSE_THINK)
        }
        self._splicer = Splicer(
            self._rendering,
            {**controls, **stops},
            self.caches,
            images=files.images,
            other_ends={**parts, **ends},
            openings=openings,
            thinking=tuple(zip(*think.values(), strict=True)),
        )
        end = self._splicer.end_of_turn
        self.end_of_turn_id = None if end is None else end.id
        self.turn_end_ids: frozenset[int] = self._splicer.end_ids
        self.stop_token_ids: tuple[int, ...] = tuple(
            sorted({*files.stop_token_ids, *ends.values(), *(() if end is None else (end.id,))})
        )
        self._open_think, self._close_think = think.values()
        shared = (grammar for grammar in GRAMMARS.values() if not grammar.own_markup)
        known = {text for grammar in (*shared, self._grammar) for text in grammar.marks}
        markup = {index: text for text, index in vocabulary.items() if text in known}
        silent = frozenset({*controls.values(), *self.stop_token_ids} - markup.keys())
        self._vocabulary = Vocabulary(markup, silent, frozenset(self.stop_token_ids), self.vocab_size)
        self._reading = Reading(self._grammar, self._vocabulary)
        self._reading_without_calls = Reading(self._grammar.without_calls(), self._vocabulary)
        self._spelled = set(self._open_think) - set(markup.values())

    @classmethod
    def load(
        cls,
        files: TokenizerFiles,
        *,
        parser: str | None = None,
        control_tokens: ControlTokens = ControlTokens.PLAIN,
        now: Callable[[], datetime] = datetime.now,
    ) -> Self:
        """Builds a codec. `parser` is a name in parsers.GRAMMARS; None detects it from the template, or fails.

        `control_tokens`: how control tokens spelled in a conversation's texts are encoded.

        Raises CodecError: TOKENIZER_INVALID, TOKENIZER_UNSUPPORTED, TEMPLATE_INVALID, TOKEN_ID_INVALID, PARSER_UNKNOWN,
        PARSER_UNDETECTED.
        """
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer_json.decode("utf-8"))
        except Exception as error:  # the binding raises bare Exception for any malformed file
            raise CodecError("TOKENIZER_INVALID", f"tokenizer.json cannot be loaded: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = ChatTemplate(
            files.chat_template, files.special_tokens, now=now, takes_images=files.images is not None
        )
        return cls(files, tokenizer, template, parser=parser, control_tokens=control_tokens)

    @property
    def parser(self) -> str:
        """The name of the parser in use."""
        return self._grammar.name

    @property
    def markup(self) -> Mapping[str, Mark]:
        """The markup that the parser recognises, with its meaning."""
        return self._grammar.marks

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has `text` as one token."""
        return self._tokenizer.token_to_id(text) is not None

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the conversation as the model's text; see ChatTemplate.render for the errors."""
        rendered = self._rendering.render(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return self._rendering.shown(rendered.text) if rendered.broken else rendered.text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> IntArray:
        """Renders a whole conversation, of which nothing was sampled yet, as int32 ids."""
        return self.prompt(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        ).ids

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """As `render`, with a flag for mixed-up control tokens."""
        rendered = self._rendering.render(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        ids = self._rendering.ids(rendered.text, broken=rendered.broken)
        if self.images is None:
            return Prompt(ids, rendered.mixed_up)
        ids, placed = expanded(ids, self.template.images(messages), self.images)
        return Prompt(ids, rendered.mixed_up, placed)

    def may_spell_control_tokens(self, body: bytes) -> bool:
        """Whether the texts in a JSON body may spell control tokens: a quick scan of its bytes."""
        return self._control_text.spelled_in(body)

    def spells_control_tokens(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Whether a conversation's texts spell control tokens or markup; an answer's own markup is exempt."""
        return self.template.spells(self._control_text, messages, tools)

    def continuation(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        last_id: int | None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Continuation | Inexact:
        """Returns the ids to append for `new` to a conversation whose ids are known and end in `last_id`.

        `history` is the conversation in messages, the last one the sampled assistant message. An Inexact result is no
        error: the conversation has to be rendered anew, on a branch of its own.
        """
        return self._splicer.continuation(
            history,
            new,
            tools,
            last_id=last_id,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def encode(self, text: str) -> IntArray:
        """Encodes plain text to int32 ids; the text of special tokens becomes those tokens."""
        return self._segments.encode(text)

    def bytewise(self, text: str) -> IntArray:
        """Encodes `text` with one id per byte and per added token: valid ids, but not those that the tokenizer would
        choose.

        For tests of ids that a model may sample. A stretch with a byte that has no token of its own is encoded as
        usual.
        """
        added, single, marks = self._pieces
        ids: list[int] = []
        for piece in marks.split(text):
            data = piece.encode()
            if piece in added:
                ids.append(added[piece])
            elif all(byte in single for byte in data):
                ids.extend(single[byte] for byte in data)
            else:
                ids.extend(self._encode_batch([piece])[0])
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | IntArray, *, skip_special: bool = False) -> str:
        """Decodes ids to text; control tokens are shown unless `skip_special`. Raises CodecError TOKEN_ID_INVALID."""
        items = _as_list(ids)
        if any(not 0 <= index < self.vocab_size for index in items):
            raise CodecError("TOKEN_ID_INVALID", f"token ids are from 0 to {self.vocab_size - 1}")
        if skip_special:
            items = [index for index in items if index not in self._vocabulary.silent_ids]
        stream = self._detokenizer.stream()
        return stream.push(items) + stream.flush()

    def token_bytes(self, ids: Sequence[int] | IntArray) -> list[bytes]:
        """The bytes of each id: possibly part of a character, and empty for an id that the tokenizer does not have."""
        return self._detokenizer.pieces(_as_list(ids))

    def stream_parser(
        self,
        *,
        prompt_ids: Sequence[int] | IntArray = (),
        tools: Sequence[Tool] = (),
        calls: bool = True,
        call_id: Callable[[], str] | None = None,
    ) -> CompletionParser:
        """Returns an incremental parser. `prompt_ids` show whether the prompt already opened the reasoning."""
        return self._parser(
            self._reading if calls else self._reading_without_calls,
            self._detokenizer,
            tools=tools,
            reasoning_open=self.reasoning_open(prompt_ids),
            call_id=call_id,
        )

    def parse(
        self,
        ids: Sequence[int] | IntArray,
        *,
        prompt_ids: Sequence[int] | IntArray = (),
        tools: Sequence[Tool] = (),
        calls: bool = True,
        finish_reason: FinishReason | None = None,
        call_id: Callable[[], str] | None = None,
    ) -> ParsedCompletion:
        """Parses a whole completion, its stop token included, to an assistant message. Never raises on any ids.

        `tools` are the request's, for families that write arguments without their types (Qwen3-Coder, GLM). Without
        `calls` the answer may have none: what would be one stays text.
        """
        parser = self.stream_parser(prompt_ids=prompt_ids, tools=tools, calls=calls, call_id=call_id)
        parser.feed(_as_list(ids))
        return parser.finish(finish_reason)[1]

    def reasoning_open(self, prompt_ids: Sequence[int] | IntArray) -> bool:
        """Whether a prompt ends inside reasoning that it opened itself; only its end is examined."""
        if not self._open_think:
            return False
        markup, silent = self._vocabulary.markup_ids, self._vocabulary.silent_ids
        turn: list[int] = []  # the ids after the last control token, last first
        for index in reversed(_as_list(prompt_ids[-PROMPT_TAIL:])):
            if index in silent:
                break
            text = markup.get(index)
            if text is not None and (text in self._open_think or text in self._close_think):
                return text in self._open_think
            turn.append(index)
        if not self._spelled:
            return False
        text = self.decode(turn[::-1])
        opened = max(text.rfind(item) for item in self._spelled)
        return opened > max(text.rfind(item) for item in self._close_think)

    @property
    def _in_answers(self) -> Iterable[str]:
        """The markup that an answer may contain as text: a malformed call is one, and clients inline reasoning."""
        return THINK if self._grammar.own_markup else {**THINK, **self._grammar.marks}

    def _unspoken(self, added: Mapping[int, AddedToken]) -> dict[str, int]:
        """The tokens that no text of a conversation may produce: control tokens, and the markup of models and
        templates.

        Other added tokens are words of the vocabulary, such as Gemma's tokens for HTML and for line breaks.
        """
        markup = {text for grammar in GRAMMARS.values() for text in grammar.marks}
        return {
            token.content: index
            for index, token in added.items()
            if token.content.strip()
            and (
                token.special
                or token.content in markup
                or token.content in self.template.text
                or _LIKE_MARKUP.fullmatch(token.content)
            )
        }

    @cached_property
    def _pieces(self) -> tuple[dict[str, int], dict[int, int], re.Pattern[str]]:
        added = {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        marks = "|".join(re.escape(item) for item in sorted(added, key=len, reverse=True)) or "(?!)"
        return added, self._detokenizer.single_bytes(), re.compile(f"({marks})")

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            # Also for one: unlike `encode` it releases the GIL, and it is faster (no offsets).
            return [item.ids for item in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        except UnicodeEncodeError as error:
            raise CodecError("TEXT_NOT_UNICODE", "the text has half of a surrogate pair") from error
        except TypeError as error:  # the binding's error for a string that is not valid UTF-8
            raise CodecError("TEXT_NOT_UNICODE", "the text is not valid Unicode") from error


def _as_list(ids: Sequence[int] | IntArray) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
