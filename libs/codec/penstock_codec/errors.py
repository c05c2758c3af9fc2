"""The codec's one exception. It does not know grpc; a service maps `reason` to a status."""

from __future__ import annotations


class CodecError(ValueError):
    """An input of the codec cannot be turned into tokens or back.

    `reason` is a stable UPPER_SNAKE name: TOKENIZER_INVALID, TOKENIZER_UNSUPPORTED, TEMPLATE_INVALID, TEMPLATE_REFUSED,
    TEMPLATE_WITHOUT_TOOLS, PARSER_UNKNOWN, PARSER_UNDETECTED, TOOL_INVALID, IMAGE_UNSUPPORTED, TEXT_NOT_UNICODE,
    TOKEN_ID_INVALID, FILES_INCOMPLETE.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
