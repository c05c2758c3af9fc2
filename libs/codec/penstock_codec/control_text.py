"""Text that spells a control token stays text: what a user, a tool or a file says opens and closes no turn.

A template writes its control tokens as text among the texts of a conversation, and a tokenizer cannot tell the two
apart. So each text is looked through before it is rendered: where it spells a control token, a break that nobody can
guess goes into the middle of it. In the rendered text, then, every whole control token is the template's own. Those get
names that nobody can guess either, the breaks go, and a tokenizer that knows the control tokens by these names only
makes the ids: they are those of the text as plain text, to the last merge.

Hardly any text spells one, so all this costs a search for the characters that they begin with where there is none.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock_codec.errors import CodecError
from penstock_codec.sandbox import Known

IntArray = NDArray[np.int32]
T = TypeVar("T")

_PREFIX: Final = 3
_LISTS: Final = (list, tuple)  # a union would be made anew each time
_MOST_DEPTH: Final = 256
_ESCAPED: Final = re.compile(rb"\\u00[^01]")
"""A character that JSON need not escape. Those that it must, as a terminal's colours have, begin no token."""


class ControlTokens(StrEnum):
    """How control tokens that a conversation's texts spell are read."""

    PLAIN = "plain"
    """As the text that they are."""
    PARSE = "parse"
    """As control tokens, as most engines do."""


class ControlText:
    """Knows what a text may not spell, and how to keep it apart. Immutable but for what it makes once it is needed."""

    def __init__(self, tokens: Mapping[str, int], said: Iterable[str], tokenizer_json: bytes) -> None:
        """`tokens` are the control tokens and markup, with their ids; `said` those of them that an answer may hold."""
        self._ids = {text: index for text, index in tokens.items() if len(text) > 1}
        self._tokenizer_json = tokenizer_json
        self._every = _Finder(self._ids)
        self._not_said = _Finder(self._ids.keys() - set(said))
        digits = secrets.token_hex(12)
        self._break = f"q{digits}"
        self._pieces = tuple(digits[at : at + 8] for at in range(0, 24, 8))
        self._lock = Lock()
        self.key = object()
        """Stands for these control tokens where it is remembered what is clear of them."""

    def spelled_in(self, body: bytes) -> bool:
        """Whether a body of JSON may spell one: a quick look, for which an escaped character counts as one."""
        return rb"\/" in body or _ESCAPED.search(body) is not None or self._every.may_be_in(body)

    def is_clear(self, texts: Iterable[str]) -> bool:
        """That none of these texts spells one: quick, and now and then said of texts that do not as if they did."""
        return not self._every.found("\n".join(texts))

    def broken(self, value: T, *, answer: bool = False) -> T:
        """The same with a break in each control token that its texts spell, keys included; itself where there is none.

        `answer`: of an assistant's text, which may hold the markup that its model writes.
        """
        finder = self._not_said if answer else self._every
        texts: list[str] = []
        gather(value, texts)
        if not any(map(finder.found, texts)):
            return value
        made: T = _rebuilt(value, lambda text: finder.pattern.sub(self._apart, text))
        return made

    def holds_breaks(self, text: str) -> bool:
        """Whether a rendered text has breaks in it."""
        return self._break in text

    def whole(self, text: str) -> str:
        """A rendered text without the breaks."""
        return text.replace(self._break, "")

    def is_damaged(self, text: str) -> bool:
        """Whether a template cut or changed a break, so that part of it stays behind."""
        rest = self.whole(text).lower()
        return any(piece in rest for piece in self._pieces)

    def hidden(self, message: str) -> str:
        """What a template says of a conversation, for others to read: who knew a break could have texts mixed up."""
        said = self.whole(message)
        return "(not shown)" if self.is_damaged(said) else said

    def ids(self, text: str) -> IntArray:
        """The ids of a rendered text with breaks: its whole control tokens are the template's. CPU work."""
        names, tokenizer = self._named
        named = self._every.pattern.sub(lambda match: names[match.group()], text)
        (encoded,) = tokenizer.encode_batch_fast([self.whole(named)], add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int32)

    def _apart(self, match: re.Match[str]) -> str:
        text = match.group()
        return text[:1] + self._break + text[1:]

    @property
    def _named(self) -> tuple[Mapping[str, str], Tokenizer]:
        with self._lock:  # it takes a second for a large vocabulary
            return self._made

    @cached_property
    def _made(self) -> tuple[Mapping[str, str], Tokenizer]:
        base = f"k{secrets.token_hex(12)}n"
        names = {text: f"{base}{index}e" for text, index in self._ids.items()}
        return names, Tokenizer.from_str(_renamed(self._tokenizer_json, names))


class Breaking:
    """Puts breaks into the texts of one conversation, and knows whether there were any to put."""

    __slots__ = ("_control_text", "broke", "is_clear")

    def __init__(self, control_text: ControlText) -> None:
        self._control_text = control_text
        self.is_clear = control_text.is_clear
        self.broke = False

    def broken(self, value: T, *, answer: bool = False) -> T:
        """As ControlText.broken."""
        made = self._control_text.broken(value, answer=answer)
        self.broke = self.broke or made is not value
        return made

    def known(self, tools: Sequence[Known]) -> Sequence[Known]:
        """As `broken`, of tools, which remember that there is nothing to break in them."""
        key = self._control_text.key
        for tool in tools:  # a loop costs less than a generator
            if tool.clear_of is not key:
                break
        else:
            return tools
        made = [self.broken(tool) for tool in tools]
        for tool, same in zip(tools, made, strict=True):
            if same is tool:
                tool.clear_of = key
        return made

    def hidden(self, message: str) -> str:
        """As ControlText.hidden."""
        return self._control_text.hidden(message) if self.broke else message


def gather(value: Any, texts: list[str], depth: int = 0) -> None:
    """Adds to `texts` those of a value of JSON, keys included. Raises CodecError where it nests too deeply."""
    if isinstance(value, str):
        texts.append(value)
        return
    if depth > _MOST_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        texts += value
        value = value.values()
    elif not isinstance(value, _LISTS):
        return
    for item in value:
        if type(item) is str:
            texts.append(item)
        else:
            gather(item, texts, depth + 1)


class _Finder:
    """Looks for any of some texts: for their first characters, which is quick and mostly enough, then for more."""

    __slots__ = ("_begins", "_raw", "pattern")

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        by_first: dict[str, set[str]] = {}
        for text in ordered:
            by_first.setdefault(text[0], set()).add(text[:_PREFIX])
        # A pattern for each first character: those that begin alike are looked for as fast as that character is.
        self._begins = tuple((first, re.compile(_any_of(begins))) for first, begins in by_first.items())
        by_byte: dict[bytes, set[bytes]] = {}
        for form in {form for begins in by_first.values() for begin in begins for form in _in_json(begin)}:
            by_byte.setdefault(form[:1], set()).add(re.escape(form))
        self._raw = tuple((first, re.compile(b"|".join(sorted(forms)))) for first, forms in by_byte.items())

    def found(self, text: str) -> bool:
        for first, begin in self._begins:  # a loop costs less than a generator
            if first in text:
                for at in begin.finditer(text):
                    if self.pattern.match(text, at.start()):
                        return True
        return False

    def may_be_in(self, body: bytes) -> bool:
        """Whether one of the texts may be in bytes of UTF-8."""
        return any(first in body and begin.search(body) is not None for first, begin in self._raw)


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts)))


def _in_json(text: str) -> Iterable[bytes]:
    """A text as it stands in JSON: as it is, and with what is not ASCII escaped."""
    yield text.encode("utf-8", "surrogatepass")
    if not text.isascii():
        escaped = json.dumps(text)[1:-1]
        yield escaped.encode()
        yield re.sub(r"\\u\w{4}", lambda match: "\\u" + match.group()[2:].upper(), escaped).encode()


def _rebuilt(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    if isinstance(value, str):
        return change(value)
    if depth > _MOST_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        return {change(key): _rebuilt(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rebuilt(item, change, depth + 1) for item in value]
    return value


def _too_deep() -> CodecError:
    return CodecError("TEMPLATE_REFUSED", f"a value of the conversation nests deeper than {_MOST_DEPTH} levels")


def _renamed(tokenizer_json: bytes, names: Mapping[str, str]) -> str:
    """A tokenizer.json in which some tokens have other names, and none of them can come about by merging."""
    content = json.loads(tokenizer_json)
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram's, with a score each
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    content["post_processor"] = None  # it names tokens, and no token is ever added
    return json.dumps(content, ensure_ascii=False)


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return left in names or right in names or left + right in names
