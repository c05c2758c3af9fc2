"""An operator's choices for an SGLang server, read from `engine_options`."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from penstock_inference.engines.openai.options import EndpointOptions


class SglangOptions(EndpointOptions):
    """Options of the engine `sglang`. `base_url` is the server's address, without a path such as /v1."""

    api: ClassVar[tuple[str, str]] = (
        "SGLang's API",
        "Check base_url (the address of an SGLang server, without /v1) and its server.",
    )

    control: bool = True
    """Whether Penstock changes the server's weights and adapters and pauses it; false for a router, or where a trainer
    does so itself.
    """
    max_adapters: int = Field(8, ge=1, le=1024)
    """Adapters that may be in force at once, where the server was started with --enable-lora."""
    max_adapters_per_namespace: int | None = Field(None, ge=1, le=1024)
    """How many of them may be one team's; unset: all."""

    @model_validator(mode="after")
    def _a_router_has_no_weights(self) -> Self:
        if self.control and self.session_header:
            raise ValueError("session_header is for a router, which passes weights on to no server: set control=false")
        return self
