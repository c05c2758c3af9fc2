"""The text of each token id, read from a tokenizer.json without the library that made it: for display.

Exact for byte-level vocabularies and those with metaspaces, which language models have; others are shown in the
vocabulary's own notation.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from penstock.client.errors import InvalidArgument

_METASPACE: Final = "\u2581"


class Pieces:
    def __init__(self, tokenizer_json: bytes) -> None:
        """
        Raises:
            InvalidArgument: `TOKENIZER_INVALID`.
        """
        try:
            whole = orjson.loads(tokenizer_json)
            vocabulary = whole["model"]["vocab"]
            if isinstance(vocabulary, Mapping):
                self._pieces = {int(index): str(piece) for piece, index in vocabulary.items()}
            else:  # Unigram: pieces with their scores, in order
                self._pieces = {index: str(entry[0]) for index, entry in enumerate(vocabulary)}
            self._added = {int(token["id"]): str(token["content"]) for token in whole.get("added_tokens") or ()}
            self._byte_level = any(step == "ByteLevel" for step in _steps(whole.get("decoder")))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InvalidArgument(f"No tokenizer.json: {error!r}", reason="TOKENIZER_INVALID") from None

    def text(self, token_id: int) -> str:
        """Returns a token's own text; half a character is shown as U+FFFD, an unknown id as nothing."""
        return self._bytes(token_id).decode("utf-8", "replace")

    def whole(self, token_ids: Iterable[int]) -> str:
        """Returns the text of several tokens together: a character may span tokens."""
        return b"".join(self._bytes(int(token_id)) for token_id in token_ids).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8", "replace")
        piece = self._pieces.get(token_id, "")
        if not self._byte_level:
            return piece.replace(_METASPACE, " ").encode("utf-8", "replace")
        if any(letter not in _BYTES for letter in piece):
            return piece.encode("utf-8", "replace")
        return bytes(_BYTES[letter] for letter in piece)


def _steps(decoder: Any) -> list[str]:
    if not decoder:
        return []
    return [str(decoder.get("type")), *(name for step in decoder.get("decoders", ()) for name in _steps(step))]


def _letters() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as itself, the n-th other one as the character 256 + n."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES: Final = _letters()
