"""Model directories by somebody else's hand: every file of them is refused with a typed error, or read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import families

from penstock_codec import Codec, CodecError, TokenizerFiles
from penstock_codec.chat import FinishReason


@pytest.mark.requirement("R145")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[" * 200_000),
        ("tokenizer_config.json", b'{"chat_template": [1, "x"]}'),
        ("tokenizer_config.json", b"\xff"),
        ("config.json", b'{"eos_token_id": "two"}'),
        ("config.json", b'{"eos_token_id": [1, "2"]}'),
        ("config.json", b'{"eos_token_id": {"a": 1}}'),
        ("config.json", b'{"eos_token_id": 99999999999999}'),
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"x" * (33 << 20)),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value[:24]),
)
def test_a_file_that_is_not_what_it_should_be_is_refused(
    files: TokenizerFiles, tmp_path: Path, name: str, content: bytes
) -> None:
    """Deep JSON, other types, other encodings, too many bytes."""
    files.write(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if name == "tokenizer_config.json":
        (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CodecError) as caught:
        TokenizerFiles.from_directory(tmp_path)
    assert caught.value.reason == "FILES_INCOMPLETE"


@pytest.mark.requirement("R145")
def test_a_token_id_far_beyond_the_vocabulary_is_refused(files: TokenizerFiles) -> None:
    """Tables are as long as the largest id, which a file may set to four thousand million."""
    content: dict[str, Any] = json.loads(files.tokenizer_json)
    content["model"]["vocab"]["zz"] = 4_000_000_000
    with pytest.raises(CodecError) as caught:
        Codec.load(replace(files, tokenizer_json=json.dumps(content).encode()))
    assert caught.value.reason == "TOKENIZER_UNSUPPORTED"


@pytest.mark.requirement("R80", "R145")
def test_blank_call_behind_a_name_is_read_in_linear_work() -> None:
    """To go back over the spaces again and again would take hours."""
    codec = Codec.load(families.build("mistral"))
    ids = codec.bytewise("[TOOL_CALLS]bash" + " " * 500_000 + "x")
    parsed = codec.parse(ids, finish_reason=FinishReason.STOP)
    assert [item.reason for item in parsed.malformed] == ["NOT_A_CALL"]
