"""A model's tokenizer files: the source of a codec, streamed by the inference service to its clients.

Immutable; the sha256 values identify the tokenizer and the template on every trajectory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_codec.errors import CodecError
from penstock_codec.images import RULE_FILE, ImageRule

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEXT_BYTES = 32 << 20  # for a template or a configuration; some list a hundred thousand tokens
_IDS = 1 << 31
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The bytes of tokenizer.json, the chat template's text, the ids that end a turn, and the named special tokens.

    `special_tokens` maps names such as `eos_token` to token text; templates may refer to them. `stop_token_ids` are the
    model's end-of-sequence ids; the codec adds the one that its template closes a turn with. `images` is how the model
    takes images; None = it does not, or in a way that is not known here.
    """

    tokenizer_json: bytes
    chat_template: str
    stop_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    images: ImageRule | None = None

    @property
    def tokenizer_sha256(self) -> str:
        """Hex sha256 of tokenizer.json."""
        return hashlib.sha256(self.tokenizer_json).hexdigest()

    @property
    def template_sha256(self) -> str:
        """Hex sha256 of the chat template in UTF-8."""
        return hashlib.sha256(self.chat_template.encode()).hexdigest()

    @property
    def processor_sha256(self) -> str:
        """Hex sha256 of the rule of images; empty without one."""
        return "" if self.images is None else self.images.sha256.hex()

    @classmethod
    def from_directory(cls, directory: str | Path) -> TokenizerFiles:
        """Reads a model directory in the Hugging Face layout; the template is a file of its own or in the config."""
        root = Path(directory)
        tokenizer_json = _read(root / "tokenizer.json", MAX_TOKENIZER_BYTES)
        config = _read_json(root / "tokenizer_config.json")
        generation = _read_json(root / "generation_config.json") or _read_json(root / "config.json")
        template_file = root / "chat_template.jinja"
        template = _read_text(template_file) if template_file.is_file() else config.get("chat_template")
        if isinstance(template, list):  # older releases name several; "default" is the one for chat
            named = [item for item in template if isinstance(item, dict)]
            template = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if not isinstance(template, str) or not template:
            raise CodecError("FILES_INCOMPLETE", f"{root.name} has no chat template: add chat_template.jinja")
        eos = generation.get("eos_token_id")
        stops = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        if any(type(item) is not int or not 0 <= item < _IDS for item in stops):
            raise CodecError("FILES_INCOMPLETE", f"{root.name} has an eos_token_id that is not a token id")
        specials = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
        return cls(tokenizer_json, template, stops, specials, read_image_rule(root))

    def write(self, directory: str | Path) -> None:
        """Writes the files in the layout of a model directory, so that other tools can load them."""
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        (root / "tokenizer.json").write_bytes(self.tokenizer_json)
        (root / "chat_template.jinja").write_text(self.chat_template, "utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        (root / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        generation = {"eos_token_id": list(self.stop_token_ids)}
        (root / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
        if self.images is not None:
            (root / RULE_FILE).write_bytes(self.images.to_json())


def read_image_rule(directory: Path) -> ImageRule | None:
    """Reads how a model takes images: our own file, or its configuration. Raises CodecError FILES_INCOMPLETE."""
    rule = directory / RULE_FILE
    if rule.is_file():
        return ImageRule.from_json(_read(rule, MAX_TEXT_BYTES))
    return ImageRule.of_model(_read_json(directory / "config.json"), _read_json(directory / "preprocessor_config.json"))


def _read(path: Path, most: int) -> bytes:
    """Reads a file of a model directory. Raises CodecError FILES_INCOMPLETE."""
    name = f"{path.parent.name}/{path.name}"
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise CodecError("FILES_INCOMPLETE", f"{name} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise CodecError("FILES_INCOMPLETE", f"{name} has more than {most} bytes")
    return data


def _read_text(path: Path) -> str:
    try:
        return _read(path, MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CodecError("FILES_INCOMPLETE", f"{path.name} is not UTF-8: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CodecError):
            raise
        reason = "it nests too deeply" if isinstance(error, RecursionError) else error
        raise CodecError("FILES_INCOMPLETE", f"{path.name} is not JSON: {reason}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
