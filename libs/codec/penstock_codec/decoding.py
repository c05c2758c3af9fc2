"""Token ids to text, all at once or as they come, without ever splitting a character.

Each id stands for bytes, so a character that spans tokens appears when its last byte does, and the pieces always add up
to the whole. Two families of vocabularies are supported, which cover all language models: byte-level ones (a byte is a
printable stand-in) and those with byte fallback or metaspace (`<0x0A>`, and U+2581 for a space). Bytes that are not
valid UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from penstock_codec.errors import CodecError

METASPACE = "\u2581"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """Incremental detokenizer: its pieces add up to the decoded text. All ids must be in the vocabulary."""

    __slots__ = ("_decoder", "_strip", "_table")

    def __init__(self, table: Sequence[bytes], *, strip: bool) -> None:
        self._table = table
        self._strip = strip  # the tokenizer added the first space of a text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that is certain after `ids`."""
        return self._shown(self._decoder.decode(b"".join(map(self._table.__getitem__, ids))))

    def flush(self) -> str:
        """Returns the text that was held back."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._shown(text)

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class Detokenizer:
    """Makes text streams for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CodecError TOKENIZER_UNSUPPORTED for a vocabulary whose tokens do not stand for bytes."""
        self._table, self._strip = _byte_table(tokenizer)

    def stream(self) -> TextStream:
        """A fresh stream."""
        return TextStream(self._table, strip=self._strip)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id by itself, possibly part of a character; empty for an id without a token."""
        count = len(self._table)
        return [self._table[index] if 0 <= index < count else b"" for index in ids]

    def single_bytes(self) -> dict[int, int]:
        """An id for each byte that has a single-byte token."""
        return {text[0]: index for index, text in enumerate(self._table) if len(text) == 1}


def _byte_table(tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    """Each id's bytes, and whether decoding drops a text's first space."""
    # Only the decoder's own description: a whole tokenizer is tens of megabytes of JSON.
    decoder = tokenizer.decoder
    steps = list(_steps(json.loads(decoder.__getstate__()) if decoder is not None else {}))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        to_bytes, strip = _byte_level, False
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _metaspace
        strip = any(
            (step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
    else:
        raise CodecError("TOKENIZER_UNSUPPORTED", f"tokens of decoder {sorted(map(str, kinds))} do not stand for bytes")
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        table[index] = token.encode() if index in added else to_bytes(token)
    return table, strip


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for step in decoder.get("decoders", []):
        yield from _steps(step)


def _byte_level(token: str) -> bytes:
    if any(char not in STAND_INS for char in token):
        return token.encode()
    return bytes(STAND_INS[char] for char in token)


def _metaspace(token: str) -> bytes:
    byte = _FALLBACK.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(METASPACE, " ").encode()


def _stand_ins() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as itself and the n-th other one as the character 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(printable))
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + n): byte for n, byte in enumerate(hidden)}}


STAND_INS = _stand_ins()
