"""An operator's choices for an endpoint, read from `engine_options`.

They never contain the key, since they are printed: it comes from the environment, or from a file that they name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from penstock_chassis.errors import InvalidArgument, Violation
from penstock_chassis.membership.session_header import checked_name
from penstock_chassis.settings import refuse_blank
from penstock_chassis.validation import violations_of
from penstock_inference.domain.generation import LogprobsMode
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.openai.wire import OPENAI_API, Endpoint

MAX_KEY_BYTES = 16 << 10


class EndpointOptions(BaseModel):
    """Options of every engine that calls an endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api: ClassVar[tuple[str, str]] = OPENAI_API

    base_url: str
    """Such as http://127.0.0.1:8000/v1."""
    api_key_file: Path | None = None
    """A file with the endpoint's key and nothing else."""
    ca_file: Path | None = None
    """PEM file of the CA of its certificate; unset, the system's CAs."""
    policy_version: int | None = Field(None, ge=0, lt=1 << 63)
    """The version of the weights served there; unset is unknown, and then no span names one."""
    policy_label: str = ""
    logprobs: Literal["auto", "processed", "raw", "none"] = "auto"
    """The distribution of its logprobs; `auto` measures it."""
    connect_timeout_s: float = Field(10.0, gt=0, le=600)
    session_header: str = ""
    """Name of a header that carries the session's id, for a router in front; empty sends none."""
    idle_timeout_s: float = Field(600.0, gt=0, le=24 * 3600)
    """Silence after which a generation is aborted: it may be queued upstream."""

    @field_validator("session_header")
    @classmethod
    def _a_header(cls, value: str) -> str:
        return checked_name(value)

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good, parts = False, None
        if not good or parts is None or parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must be http(s)://host[:port]/path without credentials, query or fragment")
        return value.rstrip("/")

    @classmethod
    def parse(cls, options: EngineOptions) -> Self:
        """Raises InvalidArgument (ENGINE_OPTIONS_INVALID) naming every option at fault."""
        try:
            chosen = cls.model_validate(dict(options.extra))
        except ValidationError as error:
            raise _invalid(violations_of(error, "engine_options", "engine_options.")) from None
        if chosen.api_key_file is not None and options.upstream_api_key is not None:
            raise _invalid(
                [Violation("engine_options.api_key_file", "is set, and so is upstream_api_key: set only one of them")]
            )
        return chosen

    def api_key(self, options: EngineOptions) -> str | None:
        """The endpoint's key, if there is one. Raises InvalidArgument (ENGINE_OPTIONS_INVALID)."""
        if self.api_key_file is None:
            return options.upstream_api_key
        field = "engine_options.api_key_file"
        try:
            with self.api_key_file.open("rb") as file:
                text = file.read(MAX_KEY_BYTES).decode().strip()
            refuse_blank(SecretStr(text))
        except OSError as error:
            raise _invalid([Violation(field, f"cannot be read: {error.strerror}")]) from None
        except ValueError:
            raise _invalid([Violation(field, "has no key: write one line of printable ASCII")]) from None
        return text

    def endpoint(self, api_key: str | None, connections: int) -> Endpoint:
        """The connections. Raises InvalidArgument (ENGINE_OPTIONS_INVALID) for an invalid CA file."""
        try:
            return Endpoint(
                self.base_url,
                api_key,
                connections=connections,
                connect_s=self.connect_timeout_s,
                idle_s=self.idle_timeout_s,
                ca_file=self.ca_file,
                session_header_name=self.session_header,
                api=self.api,
            )
        except OSError as error:
            what = error.strerror or type(error).__name__
            raise _invalid([Violation("engine_options.ca_file", f"cannot be used: {what}")]) from None

    @property
    def stated_mode(self) -> LogprobsMode | None:
        """The operator's logprobs mode; None measures it."""
        return None if self.logprobs == "auto" else LogprobsMode(self.logprobs)


class OpenAiOptions(EndpointOptions):
    """Options of the engine `openai`."""

    model: str = ""
    """The model's name there; empty selects the only served model, or the one with our model's name."""


def check_context(tokens: int) -> None:
    """Raises InvalidArgument (ENGINE_OPTIONS_INVALID) when the context length is unknown (0)."""
    if not tokens:
        raise InvalidArgument(
            "Neither the upstream nor config.json states the length of the context: set max_context_tokens.",
            reason="ENGINE_OPTIONS_INVALID",
            violations=[Violation("max_context_tokens", "is needed for this upstream")],
        )


def _invalid(violations: Iterable[Violation]) -> InvalidArgument:
    found = tuple(violations)
    return InvalidArgument(
        f"{found[0].field}: {found[0].description}", reason="ENGINE_OPTIONS_INVALID", violations=found
    )
