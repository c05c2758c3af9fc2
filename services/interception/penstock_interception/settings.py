"""Settings of the interception service: listen addresses, model sources and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.membership import members
from penstock_chassis.membership.session_header import checked_name
from penstock_chassis.settings import CALL_QUEUES, ServiceSettings, is_loopback, refuse_blank
from penstock_interception.sources.registry import check_url

DEFAULT: Final = "default"
"""Name of the inference service that has no name of its own."""


def _checked_members(value: str) -> str:
    if value:
        members.parse(value)
    return value


class UpstreamSettings(BaseModel):
    """An OpenAI-compatible endpoint that rollouts may name."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    base_url: str = Field(description="for example https://api.example.com/v1")
    api_key: SecretStr | None = Field(None, description="sent to this address only")
    models: tuple[str, ...] = Field(
        ("*",), min_length=1, description="models that may be requested, in every mode; * and ? match any characters"
    )

    session_header: str = Field(
        "", description="name of a header that carries the session's id, for a router in front; empty sends none"
    )

    @field_validator("session_header")
    @classmethod
    def _a_header(cls, value: str) -> str:
        return checked_name(value)

    @field_validator("api_key")
    @classmethod
    def _not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        return refuse_blank(value)

    @field_validator("base_url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        try:
            check_url(value)
        except Exception as error:
            raise ValueError("http(s)://host[:port]/path without credentials or query") from error
        return value


class InferenceEndpoint(BaseModel):
    """An inference service that rollouts may name."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    address: str = Field("", description="host:port")
    members: str = Field("", description="several instead of one; as inference_members")
    token: SecretStr | None = Field(None, description="its operator or trainer token")
    tls_ca: Path | None = Field(None, description="PEM file with the CA of its certificate; unset = plaintext")

    @field_validator("token")
    @classmethod
    def _not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        return refuse_blank(value)

    @field_validator("members")
    @classmethod
    def _is_a_list(cls, value: str) -> str:
        return _checked_members(value)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.address) == bool(self.members):
            raise ValueError("set either address or members")
        return self


class InterceptionSettings(ServiceSettings):
    """Read from flags, `PENSTOCK_INTERCEPTION_*` and the table `[interception]`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_INTERCEPTION_")

    port: int = Field(7703, ge=0, le=65535, description="gRPC port; 0 lets the kernel choose")
    call_queues: int = Field(4, ge=1, le=16, description=CALL_QUEUES)
    ingress_host: str = Field("127.0.0.1", description="address of the ingress, for agents' requests")
    ingress_port: int = Field(7780, ge=0, le=65535, description="HTTP port of the ingress; 0 lets the kernel choose")
    ingress_address: str = Field(
        "",
        description="how the sandbox service reaches the ingress: host:port, or where it serves TLS tls:host:port or "
        "tls:name@host:port with the name in its certificate; {address} in it is this machine's own; port 0 = where it "
        "listens on that host; empty = where it listens",
    )
    ingress_tls_cert: Path | None = Field(None, description="PEM certificate of the ingress, for a wide bind")
    ingress_tls_key: Path | None = Field(None, description="PEM private key of the ingress")
    inference_address: str = Field("127.0.0.1:7704", description='the default inference service; "" = none')
    inference_members: str = Field(
        "",
        description="several inference services as the default one, instead of inference_address: "
        "static:NAME=HOST:PORT,..., dns:HOST:PORT or file:/PATH (docs/guides/replicas.md); all accept inference_token",
    )
    inference_token: SecretStr | None = Field(
        None, description="operator or trainer token of the default inference service"
    )
    inference_ca: Path | None = Field(
        None, description="PEM file with the CA of the default inference service; unset = plaintext, on loopback only"
    )
    inference: dict[str, InferenceEndpoint] = Field(default_factory=dict, description="further ones by name")
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict, description="endpoints by name")
    tokenizers: dict[str, Path] = Field(default_factory=dict, description="tokenizer directories by name")
    caller_endpoints: bool = Field(True, description="whether callers may use their own endpoints, with their own keys")
    max_rollouts: int = Field(10_000, ge=1, description="rollouts open at once")
    max_open_calls: int = Field(64, ge=1, description="most waiting calls of one rollout")
    max_rollout_bytes: int = Field(
        1 << 30,
        ge=8 << 10,
        description="most bytes that the journal keeps of one rollout's calls: bodies, images, 4 KiB per call, "
        "32 bytes per sampled token",
    )
    max_body_bytes: int = Field(32 << 20, ge=1 << 10, le=32 << 20, description="largest request body of an agent")
    header_timeout_s: float = Field(10.0, gt=0, description="time limit for a request's line and headers, in seconds")
    body_timeout_s: float = Field(60.0, gt=0, description="time limit for a request's body, in seconds")
    write_timeout_s: float = Field(
        30.0, gt=0, description="time limit for a client to read 64 KiB of an answer, or all of it, in seconds"
    )
    max_header_bytes: int = Field(64 << 10, ge=1 << 10, le=1 << 20, description="largest line and headers of a request")
    max_connections: int = Field(
        16_384, ge=1, description="most connections of agents, if the limit of open files allows it"
    )
    max_peer_connections: int = Field(
        8192, ge=1, description="most connections from one address; a relay carries those of many agents"
    )
    max_rollout_connections: int = Field(256, ge=1, description="most connections of one rollout's agent")
    rejoin_grace_s: float = Field(
        30.0, ge=0, description="seconds that a call stays open after its agent's last connection"
    )
    resume_window_s: float = Field(30.0, ge=0, description="seconds in which a lost session can be resumed")
    driver_lease_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="seconds that a driver which is not connected keeps its open rollouts; then they are closed, and "
        "their agent keys are void",
    )
    heartbeat_s: float = Field(15.0, gt=0, description="interval of heartbeats on trainers' streams")
    retention_s: float = Field(
        24 * 3600.0,
        ge=0,
        description="seconds that a closed rollout's capture is kept; longer while its driver has yet to export it",
    )
    max_kept_captures: int = Field(
        50_000,
        ge=1,
        description="most captures that are kept for their drivers' exports; beyond it, those of lost drivers are "
        "discarded after retention_s, and further rollouts of drivers that export are refused (CAPTURES_FULL)",
    )
    max_kept_bytes: int = Field(
        32 << 30, ge=1, description="most bytes of such captures in the journal, as max_kept_captures"
    )
    max_kept_s: float = Field(
        7 * 24 * 3600.0,
        ge=0,
        description="seconds after a rollout's end at which its capture is discarded though its driver has not "
        "exported it; never before retention_s",
    )
    closed_kept: int = Field(
        256, ge=0, description="closed rollouts whose calls stay in memory; those of others are on disk"
    )
    first_byte_s: float = Field(1.0, ge=0, description="seconds that a stream's HTTP status waits for the answer")
    keep_alive_s: float = Field(5.0, gt=0, description="interval of keep-alives on held streams")
    provider_tools: Literal["strip", "refuse"] = Field(
        "strip", description="whether hosted tools (web search) in a request are left out or refused"
    )
    host_tools: list[str] = Field(
        default_factory=lambda: ["*"],
        description="names of tools that trainers may offer to agents; * and ? match any characters",
    )
    max_tool_calls: int = Field(1000, ge=1, description="most host tool calls of a rollout without a budget for them")
    max_open_tool_calls: int = Field(16, ge=1, description="most waiting host tool calls of one rollout")
    max_tool_bytes: int = Field(
        256 << 10, ge=1 << 10, le=4 << 20, description="largest arguments and largest result of a host tool, as JSON"
    )
    tool_timeout_s: float = Field(600.0, gt=0, description="time limit of a host tool call, in seconds")
    codec_threads: int = Field(2, ge=1, le=64, description="threads for long prompts and answers")

    @field_validator("inference_members")
    @classmethod
    def _members_are_valid(cls, value: str) -> str:
        return _checked_members(value)

    @field_validator("inference")
    @classmethod
    def _default_has_its_own_settings(cls, value: dict[str, InferenceEndpoint]) -> dict[str, InferenceEndpoint]:
        if DEFAULT in value:
            raise ValueError("the default inference service has the settings inference_address or inference_members")
        return value

    @model_validator(mode="after")
    def _safe_ingress(self) -> Self:
        if (self.ingress_tls_cert is None) != (self.ingress_tls_key is None):
            raise ValueError("ingress_tls_cert and ingress_tls_key must be set together")
        if not is_loopback(self.ingress_host) and self.ingress_tls_cert is None:
            raise ValueError(
                "ingress_host is reachable from outside this machine: that needs ingress_tls_cert and _key"
            )
        return self
