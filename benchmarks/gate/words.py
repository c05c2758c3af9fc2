"""Text of the size that agents send, and the tokenizer that everything measured here shares.

The words are those of the project's documentation, as often as they are there; the same seed gives the same text, and
texts of two seeds share no line. So a prompt with another seed is one that no cache has seen.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from penstock_codec import tiny_tokenizer

VOCABULARY: Final = 8192
_DOCS: Final = Path(__file__).parents[2] / "docs"


class Writer:
    """Writes sentences."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def sentence(self) -> str:
        """Between 8 and 20 words."""
        words = self._random.choices(_words(), k=self._random.randint(8, 20))
        return f"{' '.join(words).capitalize()}."

    def text(self, size: int) -> str:
        """Lines of one or two sentences, `size` characters in all, and a full stop at the end."""
        lines: list[str] = []
        length = 0
        while length < size:
            line = " ".join(self.sentence() for _ in range(self._random.randint(1, 2)))
            lines.append(line)
            length += len(line) + 1
        return "\n".join(lines)[: size - 1] + "."


def write_tokenizer(directory: Path) -> Tokenizer:
    """A tokenizer of VOCABULARY ids with ChatML's special tokens and template, as a model directory holds it."""
    files = tiny_tokenizer.build(_texts(), VOCABULARY)
    files.write(directory)
    return Tokenizer.from_str(files.tokenizer_json.decode())


@cache
def _texts() -> tuple[str, ...]:
    return tuple(path.read_text("utf-8") for path in sorted(_DOCS.rglob("*.md")))


@cache
def _words() -> tuple[str, ...]:
    return tuple(word for text in _texts() for word in re.findall(r"[A-Za-z][a-z]+", text))
