"""The tokenizer files of the model directory, with their digests.

Read once when the service starts, so the served files are those that were hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition
from penstock_codec.errors import CodecError
from penstock_codec.images import RULE_FILE
from penstock_codec.tokenizer_files import read_image_rule

FILE_NAMES = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json")
CHUNK_BYTES = 1 << 20


MAX_FILE_BYTES = 256 << 20
"""Limit per tokenizer file; the largest tokenizers have some 40 MiB."""


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A piece of a file; its last piece has the `sha256` of the whole file, the others an empty one."""

    file_name: str
    data: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True)
class TokenizerDirectory:
    """The existing files, by name."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, directory: Path) -> TokenizerDirectory:
        """Read the existing ones of `FILE_NAMES`, and make the rule of images from the model's configuration.

        Raises FailedPrecondition (MODEL_UNREADABLE).
        """
        files = {}
        for path in (directory / name for name in FILE_NAMES):
            try:
                if path.is_file():
                    with path.open("rb") as file:
                        files[path.name] = file.read(MAX_FILE_BYTES + 1)
            except OSError as error:
                raise FailedPrecondition(f"cannot read {path}: {error.strerror}", reason="MODEL_UNREADABLE") from error
            if len(files.get(path.name, b"")) > MAX_FILE_BYTES:
                raise FailedPrecondition(f"{path} has more than {MAX_FILE_BYTES} bytes", reason="MODEL_UNREADABLE")
        with suppress(CodecError):  # the service has no codec then, and says why
            if (rule := read_image_rule(directory)) is not None:
                files[RULE_FILE] = rule.to_json()
        return cls(files)

    @property
    def tokenizer_sha256(self) -> bytes:
        """Digest of tokenizer.json; empty if there is none."""
        return _sha256(self.files.get("tokenizer.json"))

    @property
    def processor_sha256(self) -> bytes:
        """Digest of the rule of images; empty if there is none."""
        return _sha256(self.files.get(RULE_FILE))

    @property
    def chat_template_sha256(self) -> bytes:
        """Digest of the template's text in UTF-8, from whichever file has it; empty if none has."""
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
