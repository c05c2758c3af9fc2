"""The model's codec, if its directory has one: for rendering and parsing over the wire.

A model without a tokenizer or a chat template serves token ids all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_codec.codec import Codec
from penstock_codec.errors import CodecError
from penstock_codec.files import TokenizerFiles

_log = structlog.get_logger("penstock.inference")


def load_codec(directory: Path, parser: str | None) -> Codec | None:
    """The codec of a model directory; None, with the reason in the log, when it cannot be made.

    Raises FailedPrecondition when a parser was asked for and there can be none.
    """
    try:
        return Codec.load(TokenizerFiles.from_directory(directory), parser=parser)
    except CodecError as error:
        if parser is not None:
            raise FailedPrecondition(f"tool_call_parser {parser!r}: {error}", reason=error.reason) from error
        _log.info("no codec: Render, Parse and chat prompts are off", reason=error.reason, detail=str(error))
        return None


def template_options(thinking: bool | None, options_json: str) -> dict[str, Any]:
    """Variables for the template. Raises InvalidArgument for what is no JSON object."""
    try:
        options = json.loads(options_json) if options_json else {}
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise InvalidArgument(
            "template_options_json must be a JSON object",
            reason="REQUEST_INVALID",
            violations=[Violation("template_options_json", "must be a JSON object")],
        )
    return options if thinking is None else {**options, "enable_thinking": thinking}
