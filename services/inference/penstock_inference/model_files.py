"""The files from which text becomes tokens, as the model directory has them, with their digests.

Read once when the service starts; what is served is what was hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition

FILE_NAMES = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A piece of a file; `sha256` of the whole file comes with its last piece and is empty before."""

    file_name: str
    data: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True)
class TokenizerDirectory:
    """The files that are there, by name."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, directory: Path) -> TokenizerDirectory:
        """Read what there is of `FILE_NAMES`."""
        return cls({name: (directory / name).read_bytes() for name in FILE_NAMES if (directory / name).is_file()})

    @property
    def tokenizer_sha256(self) -> bytes:
        """Of tokenizer.json; empty when there is none."""
        return _sha256(self.files.get("tokenizer.json"))

    @property
    def chat_template_sha256(self) -> bytes:
        """Of the template's text in UTF-8, in whichever file it stands; empty when there is none."""
        template = self.files.get("chat_template.jinja")
        if template is None and "tokenizer_config.json" in self.files:
            try:
                config = json.loads(self.files["tokenizer_config.json"])
            except ValueError:
                return b""
            text = config.get("chat_template") if isinstance(config, dict) else None
            template = text.encode() if isinstance(text, str) else None
        return _sha256(template)

    def chunks(self) -> Iterator[FileChunk]:
        """Every file in pieces of at most `CHUNK_BYTES`. Raises FailedPrecondition when there is no tokenizer."""
        if "tokenizer.json" not in self.files:
            raise FailedPrecondition("the model directory has no tokenizer.json", reason="TOKENIZER_ABSENT")
        for name, data in self.files.items():
            starts = range(0, max(len(data), 1), CHUNK_BYTES)
            for start in starts:
                last = start == starts[-1]
                yield FileChunk(name, data[start : start + CHUNK_BYTES], _sha256(data) if last else b"")


def _sha256(data: bytes | None) -> bytes:
    return b"" if data is None else hashlib.sha256(data).digest()
