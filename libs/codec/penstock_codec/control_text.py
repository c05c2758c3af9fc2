"""Keeps text that spells a control token plain text: content of a user, a tool or a file opens and closes no turn.

A template writes its control tokens as text among the texts of a conversation, and a tokenizer cannot distinguish the
two. So each text is searched before rendering: an unguessable break is inserted into the middle of each control token
that it spells. Every whole control token in the rendered text is then the template's own. These get unguessable names,
the breaks are removed, and a tokenizer that knows the control tokens by these names only makes the ids: they equal
those of the text as plain text, to the last merge.

Hardly any text spells one; for the others the cost is a search for the control tokens' first characters.
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
from penstock_codec.template_sandbox import Known

IntArray = NDArray[np.int32]
T = TypeVar("T")

_PREFIX: Final = 3
_LISTS: Final = (list, tuple)  # a union would be built anew each time
_MOST_DEPTH: Final = 256
_ESCAPED: Final = re.compile(rb"\\u00[^01]")
"""A character that JSON need not escape. Characters that must be escaped, as in terminal colours, begin no token."""


class ControlTokens(StrEnum):
    """How control tokens spelled in a conversation's texts are encoded."""

    PLAIN = "plain"
    """As plain text."""
    PARSE = "parse"
    """As control tokens, as most engines do."""


class ControlText:
    """Texts that a conversation may not spell, and the breaks for them. Immutable but for lazily built parts."""

    def __init__(self, tokens: Mapping[str, int], in_answers: Iterable[str], tokenizer_json: bytes) -> None:
        """`tokens`: control tokens and markup, with their ids; `in_answers`: those that an answer may contain."""
        self._ids = {text: index for text, index in tokens.items() if len(text) > 1}
        self._tokenizer_json = tokenizer_json
        self._every = _Finder(self._ids)
        self._never_in_answers = _Finder(self._ids.keys() - set(in_answers))
        digits = secrets.token_hex(12)
        self._break = f"q{digits}"
        self._pieces = tuple(digits[at : at + 8] for at in range(0, 24, 8))
        self._lock = Lock()
        self.key = object()
        """Identifies this set of control tokens in caches of texts known to be clear."""

    def spelled_in(self, body: bytes) -> bool:
        """Whether a JSON body may spell one: a quick scan, in which any escaped character counts as a match."""
        return rb"\/" in body or _ESCAPED.search(body) is not None or self._every.may_be_in(body)

    def is_clear(self, texts: Iterable[str]) -> bool:
        """Whether none of these texts spells one: quick; a clear text is sometimes reported as not clear."""
        return not self._every.found("\n".join(texts))

    def broken(self, value: T, *, answer: bool = False) -> T:
        """Returns `value` with a break in each control token that its texts spell, keys included; unchanged if there is
        none.

        `answer`: the texts are an assistant's, which may contain the markup that its model writes.
        """
        finder = self._never_in_answers if answer else self._every
        texts: list[str] = []
        gather(value, texts)
        if not any(map(finder.found, texts)):
            return value
        made: T = _rebuilt(value, lambda text: finder.pattern.sub(self._apart, text))
        return made

    def holds_breaks(self, text: str) -> bool:
        """Whether a rendered text contains breaks."""
        return self._break in text

    def whole(self, text: str) -> str:
        """Removes the breaks from a rendered text."""
        return text.replace(self._break, "")

    def is_damaged(self, text: str) -> bool:
        """Whether a template cut or changed a break, so that a part of it is left."""
        rest = self.whole(text).lower()
        return any(piece in rest for piece in self._pieces)

    def hidden(self, message: str) -> str:
        """Removes the breaks from a template's error message: a reader who knew one could have texts mixed up."""
        text = self.whole(message)
        return "(not shown)" if self.is_damaged(text) else text

    def ids(self, text: str) -> IntArray:
        """Returns the ids of a rendered text with breaks: its whole control tokens are the template's. CPU work."""
        names, tokenizer = self._named
        named = self._every.pattern.sub(lambda match: names[match.group()], text)
        (encoded,) = tokenizer.encode_batch_fast([self.whole(named)], add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int32)

    def _apart(self, match: re.Match[str]) -> str:
        text = match.group()
        return text[:1] + self._break + text[1:]

    @property
    def _named(self) -> tuple[Mapping[str, str], Tokenizer]:
        with self._lock:  # takes a second for a large vocabulary
            return self._made

    @cached_property
    def _made(self) -> tuple[Mapping[str, str], Tokenizer]:
        base = f"k{secrets.token_hex(12)}n"
        names = {text: f"{base}{index}e" for text, index in self._ids.items()}
        return names, Tokenizer.from_str(_renamed(self._tokenizer_json, names))


class Breaking:
    """Inserts breaks into the texts of one conversation, and records whether any were needed."""

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
        """As `broken`, for tools, which cache that they need no break."""
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
    """Appends to `texts` all texts of a JSON value, keys included. Raises CodecError where it nests too deeply."""
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
    """Searches for any of several texts: by their first characters, which is quick and mostly enough, then in full."""

    __slots__ = ("_begins", "_raw", "pattern")

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        by_first: dict[str, set[str]] = {}
        for text in ordered:
            by_first.setdefault(text[0], set()).add(text[:_PREFIX])
        # One pattern per first character: texts with the same first character are found as fast as that character.
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
    """A text as JSON writes it: unescaped, and with non-ASCII characters escaped."""
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
    """Returns a tokenizer.json in which some tokens are renamed, and none of them can result from merging."""
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
