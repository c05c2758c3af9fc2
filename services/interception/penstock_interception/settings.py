"""The interception service's settings: where it listens, whom it asks, what it allows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.settings import ServiceSettings, is_loopback, refuse_blank
from penstock_interception.sources.registry import check_url


class UpstreamSettings(BaseModel):
    """An OpenAI-compatible endpoint that rollouts may name."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    base_url: str = Field(description="for example https://api.example.com/v1")
    api_key: SecretStr | None = Field(None, description="sent to this address only")
    models: tuple[str, ...] = Field(
        ("*",), min_length=1, description="models that may be asked for, in every mode: * and ? stand for any"
    )

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

    address: str = Field(description="host:port")
    token: SecretStr | None = Field(None, description="its operator or trainer token")
    tls_ca: Path | None = Field(None, description="PEM file of the CA that its certificate is of; unset is plaintext")

    @field_validator("token")
    @classmethod
    def _not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        return refuse_blank(value)


class InterceptionSettings(ServiceSettings):
    """Read from flags, `PENSTOCK_INTERCEPTION_*` and the table `[interception]`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_INTERCEPTION_")

    port: int = Field(7703, ge=0, le=65535, description="gRPC port; 0 lets the kernel choose")
    ingress_host: str = Field("127.0.0.1", description="address that agents' requests come to")
    ingress_port: int = Field(7780, ge=0, le=65535, description="HTTP port of the ingress; 0 lets the kernel choose")
    ingress_address: str = Field(
        "",
        description="how the sandbox service reaches the ingress: host:port, or tls:host:port where it serves TLS; "
        "empty = where it listens",
    )
    ingress_tls_cert: Path | None = Field(None, description="PEM certificate of the ingress, for a wide bind")
    ingress_tls_key: Path | None = Field(None, description="PEM private key of the ingress")
    inference_address: str = Field("127.0.0.1:7704", description='the default inference service; "" has none')
    inference_token: SecretStr | None = Field(
        None, description="operator or trainer token of the default inference service"
    )
    inference_ca: Path | None = Field(
        None, description="PEM file of the CA of the default inference service; unset is plaintext, on loopback only"
    )
    inference: dict[str, InferenceEndpoint] = Field(default_factory=dict, description="further ones by name")
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict, description="endpoints by name")
    tokenizers: dict[str, Path] = Field(default_factory=dict, description="tokenizer directories by name")
    caller_endpoints: bool = Field(True, description="whether a caller may bring an endpoint of its own, with its key")
    max_rollouts: int = Field(10_000, ge=1, description="rollouts open at once")
    max_open_calls: int = Field(64, ge=1, description="calls of one rollout that wait at once")
    max_body_bytes: int = Field(32 << 20, ge=1 << 10, le=32 << 20, description="largest request body of an agent")
    header_timeout_s: float = Field(10.0, gt=0, description="seconds in which a request's line and headers come")
    body_timeout_s: float = Field(60.0, gt=0, description="seconds in which a request's body comes")
    write_timeout_s: float = Field(
        30.0, gt=0, description="seconds in which a client takes 64 KiB of what is sent to it, or all of it"
    )
    max_header_bytes: int = Field(64 << 10, ge=1 << 10, le=1 << 20, description="a request's line and headers")
    max_connections: int = Field(16_384, ge=1, description="connections of agents; the open files allow it")
    max_peer_connections: int = Field(8192, ge=1, description="connections from one address: a relay has many agents'")
    max_rollout_connections: int = Field(256, ge=1, description="connections of one rollout's agent")
    rejoin_grace_s: float = Field(30.0, ge=0, description="seconds that a call outlives its agent's last connection")
    resume_window_s: float = Field(30.0, ge=0, description="seconds that a lost session may be resumed")
    heartbeat_s: float = Field(15.0, gt=0, description="interval of heartbeats on trainers' streams")
    retention_s: float = Field(24 * 3600.0, ge=0, description="seconds that a closed rollout's capture is kept")
    closed_kept: int = Field(256, ge=0, description="closed rollouts whose calls stay in memory; others are on disk")
    first_byte_s: float = Field(1.0, ge=0, description="seconds that a stream's HTTP status waits for the answer")
    keep_alive_s: float = Field(5.0, gt=0, description="interval of keep-alives on held streams")
    provider_tools: Literal["strip", "refuse"] = Field(
        "strip", description="what becomes of hosted tools (web search) that a request names: left out, or refused"
    )
    host_tools: list[str] = Field(
        default_factory=lambda: ["*"],
        description="names of tools that trainers may offer to agents: * and ? stand for any",
    )
    max_tool_calls: int = Field(
        1000, ge=1, description="host tool calls of a rollout whose budget says nothing of them"
    )
    max_open_tool_calls: int = Field(16, ge=1, description="host tool calls of one rollout that wait at once")
    max_tool_bytes: int = Field(
        256 << 10, ge=1 << 10, le=4 << 20, description="largest arguments and largest result of a host tool, as JSON"
    )
    tool_timeout_s: float = Field(600.0, gt=0, description="seconds after which a host tool call is given up")
    codec_threads: int = Field(2, ge=1, le=64, description="threads for long prompts and answers")

    @field_validator("inference_token")
    @classmethod
    def _token_not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        return refuse_blank(value)

    @model_validator(mode="after")
    def _safe_ingress(self) -> Self:
        if (self.ingress_tls_cert is None) != (self.ingress_tls_key is None):
            raise ValueError("ingress_tls_cert and ingress_tls_key are given together or not at all")
        if not is_loopback(self.ingress_host) and self.ingress_tls_cert is None:
            raise ValueError(
                "ingress_host is reachable from outside this machine: that needs ingress_tls_cert and _key"
            )
        return self
