"""Converts between text and token ids: chat templates, exact continuation, tool-call and reasoning parsers."""

from penstock_codec.codec import Codec
from penstock_codec.control_text import ControlTokens
from penstock_codec.errors import CodecError
from penstock_codec.parsers import MalformedCall, ParsedCompletion
from penstock_codec.splice import Continuation, Inexact
from penstock_codec.tokenizer_files import TokenizerFiles

__all__ = [
    "Codec",
    "CodecError",
    "Continuation",
    "ControlTokens",
    "Inexact",
    "MalformedCall",
    "ParsedCompletion",
    "TokenizerFiles",
]
