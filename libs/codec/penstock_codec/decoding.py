"""Token ids to text, all at once or as they come, without ever splitting a character.

A byte-level vocabulary is decoded by bytes, so a character that spans tokens appears when its last byte does. Other
vocabularies go through the tokenizer's own decoder with a little context. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer


class TextStream(Protocol):
    """Ids in, text out, in pieces whose concatenation is the decoded text."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after `ids`."""
        ...

    def flush(self) -> str:
        """What was held back; the stream starts afresh."""
        ...


class Detokenizer:
    """Makes text streams for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_table(tokenizer)

    def stream(self) -> TextStream:
        """A fresh stream."""
        return _ByteStream(self._bytes) if self._bytes is not None else _WindowStream(self._tokenizer)


class _ByteStream:
    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        return self._decoder.decode(b"".join([table[i] for i in ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowStream:
    """Decodes with the ids before as context, and holds back while the text ends in an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._held.extend(ids)
        text = self._text()
        if text.endswith("\ufffd") and len(self._held) < 8:
            return ""
        self._context, self._held = (self._context + self._held)[-8:], []
        return text

    def flush(self) -> str:
        text = self._text()
        self._context, self._held = [], []
        return text

    def _text(self) -> str:
        known = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)[len(known) :]


def _byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """Each id's bytes where the vocabulary is byte-level: each byte stands for itself or for a printable stand-in."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = [decoder.get("type"), *(item.get("type") for item in decoder.get("decoders", []))]
    if "ByteLevel" not in kinds:
        return None
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    to_byte = {chr(byte): byte for byte in printable}
    to_byte.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        if index in added or any(char not in to_byte for char in token):
            table[index] = token.encode()
        else:
            table[index] = bytes(to_byte[char] for char in token)
    return table
