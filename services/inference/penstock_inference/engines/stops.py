"""Stop texts: searches a completion's text, token by token, for the first text that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from penstock_chassis.errors import FailedPrecondition
from penstock_codec.decoding import Detokenizer


class StopTexts:
    """Watches one completion. A text may begin and end inside a token; the token that completes it is the last.

    Args:
        detokenizer: of the model's tokenizer.
        texts: not empty, each at least one character.
        known_ids: ids below this are in the tokenizer's vocabulary; a model may have more, which have no text.
    """

    def __init__(self, detokenizer: Detokenizer, texts: Sequence[str], known_ids: int) -> None:
        self._stream = detokenizer.stream()
        self._texts = tuple(texts)
        self._known_ids = known_ids
        self._keep = max(map(len, texts)) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """The stop text that this token completes, if any: the earliest one, and the longest of several."""
        if token >= self._known_ids:
            return None
        text = self._tail + self._stream.push((token,))
        found = []
        for stop in self._texts:
            # Only what ends in this token's text: the caller may have let an earlier one pass.
            at = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        self._tail = text[-self._keep :] if self._keep else ""
        return min(found)[2] if found else None


def load_tokenizer(path: Path) -> Tokenizer | None:
    """Load a tokenizer.json; None when there is none. Raises FailedPrecondition (MODEL_UNREADABLE)."""
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for any malformed file
        raise FailedPrecondition(f"{path.name} cannot be loaded: {error}", reason="MODEL_UNREADABLE") from error
