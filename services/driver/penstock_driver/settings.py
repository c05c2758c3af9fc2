"""The driver's settings: where the other services are, and how much runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.settings import ServiceSettings, refuse_blank
from penstock_chassis.tls import ClientTls
from penstock_driver.allowance import MOST_BYTES, MOST_EVENTS
from penstock_driver.grading import DEFAULT_MAX_CHANGES_BYTES


class DriverSettings(ServiceSettings):
    """Read from flags, `PENSTOCK_DRIVER_*` and the table `[driver]`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_DRIVER_")

    port: int = Field(7702, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    sandbox_address: str = Field("127.0.0.1:7701", description="host:port of the sandbox service")
    sandbox_token: SecretStr | None = Field(None, description="operator token of the sandbox service")
    interception_address: str = Field("127.0.0.1:7703", description="host:port of the interception service")
    interception_token: SecretStr | None = Field(None, description="operator token of the interception service")
    services_ca: Path | None = Field(
        None, description="PEM file with the CA of the other services; when set, they are spoken to over TLS"
    )
    services_cert: Path | None = Field(None, description="PEM file with this service's client certificate")
    services_key: Path | None = Field(None, description="PEM file with that certificate's private key")
    agent_port: int = Field(
        7780,
        ge=1024,
        le=65535,
        description="port of each sandbox's own loopback where its agent finds the model endpoint",
    )
    max_running: int = Field(256, ge=1, le=10_000, description="rollouts that run at once; more wait")
    max_changes_bytes: int = Field(
        DEFAULT_MAX_CHANGES_BYTES,
        ge=1,
        description="what a fresh fork takes over of an agent's work, and what restoring keeps, in bytes a rollout",
    )
    max_events: int = Field(
        MOST_EVENTS,
        ge=100,
        le=10_000_000,
        description="events that are kept of one rollout's agent, and of its model calls; of further output only its "
        "amount and its end, of further calls only their sums",
    )
    max_event_bytes: int = Field(
        MOST_BYTES, ge=1 << 20, description="bytes of these events, of each of the two, as the journal keeps them"
    )
    spool_dir: Path | None = Field(
        None, description="directory for temporary files of grading; the state directory when not set"
    )
    max_queued: int = Field(10_000, ge=0, description="rollouts that may wait; more are refused")

    max_terminals: int = Field(
        256, ge=1, le=10_000, description="terminal episodes that are open at once; more are refused"
    )

    @field_validator("sandbox_token", "interception_token")
    @classmethod
    def _service_tokens_are_not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        return refuse_blank(value)

    def client_tls(self: Self) -> ClientTls | None:
        """How to speak to the other services; None is plaintext, on loopback only."""
        if self.services_ca is None:
            return None
        return ClientTls(self.services_ca, self.services_cert, self.services_key)
