"""The driver's settings: addresses of the other services, and how much runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.membership import members
from penstock_chassis.settings import ServiceSettings
from penstock_chassis.tls import ClientTls
from penstock_driver.grading.grader import DEFAULT_MAX_CHANGES_BYTES
from penstock_driver.rollouts.event_limits import MAX_BYTES, MAX_EVENTS


class DriverSettings(ServiceSettings):
    """Read from flags, `PENSTOCK_DRIVER_*` and the table `[driver]`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_DRIVER_")

    port: int = Field(7702, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    sandbox_address: str = Field("127.0.0.1:7701", description="host:port of the sandbox service")
    sandbox_token: SecretStr | None = Field(None, description="operator token of the sandbox service")
    sandbox_members: str = Field(
        "",
        description="more than one sandbox service, instead of sandbox_address: static:NAME=HOST:PORT,..., "
        "dns:HOST:PORT or file:/PATH (docs/guides/cluster.md)",
    )
    interception_address: str = Field("127.0.0.1:7703", description="host:port of the interception service")
    interception_token: SecretStr | None = Field(None, description="operator token of the interception service")
    interception_members: str = Field(
        "", description="more than one interception service, instead of interception_address; as sandbox_members"
    )
    interception_silence_s: float = Field(
        0.0,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="with interception_members: seconds that a gate's host may be silent before the attempts there "
        "end, beyond the 4 to 5 s in which that is noticed; a gate on a host that answers has 30 s",
    )
    node_creates_per_s: float = Field(
        0.0,
        ge=0,
        le=10_000,
        allow_inf_nan=False,
        description="most sandboxes and snapshots per second that this driver makes at each sandbox service; 0 = "
        "no limit",
    )
    driver_members: str = Field(
        "",
        description="all drivers that work together, this one included, for their clients; as sandbox_members. All "
        "accept the same operator token",
    )
    services_ca: Path | None = Field(
        None, description="PEM file with the CA of the other services; if set, they are called over TLS"
    )
    services_cert: Path | None = Field(None, description="PEM file with this service's client certificate")
    services_key: Path | None = Field(None, description="PEM file with that certificate's private key")
    agent_port: int = Field(
        7780,
        ge=1024,
        le=65535,
        description="port of the model endpoint on each sandbox's own loopback",
    )
    drain_s: float = Field(
        10.0, ge=0, le=86_400, description="seconds that a stop waits for rollouts and terminals, and takes no new ones"
    )
    max_running: int = Field(256, ge=1, le=10_000, description="most concurrent rollouts; more wait")
    max_changes_bytes: int = Field(
        DEFAULT_MAX_CHANGES_BYTES,
        ge=1,
        description="most bytes per rollout that a fresh fork copies of an agent's work, and that restoring keeps",
    )
    max_events: int = Field(
        MAX_EVENTS,
        ge=100,
        le=10_000_000,
        description="most events kept of one rollout's agent, and of its model calls; further output is kept as its "
        "size and end, further calls as their sums",
    )
    max_event_bytes: int = Field(
        MAX_BYTES, ge=1 << 20, description="most bytes of these events in the journal, for each of the two"
    )
    spool_dir: Path | None = Field(
        None, description="directory for temporary files of grading; the state directory when not set"
    )
    max_queued: int = Field(10_000, ge=0, description="most waiting rollouts of each namespace; more are refused")

    max_terminals: int = Field(256, ge=1, le=10_000, description="most open terminal episodes; more are refused")

    @field_validator("sandbox_members", "interception_members", "driver_members")
    @classmethod
    def _members_are_valid(cls, value: str) -> str:
        if value:
            members.parse(value)
        return value

    @model_validator(mode="after")
    def _members_of_both(self) -> Self:
        if bool(self.sandbox_members) != bool(self.interception_members):
            raise ValueError("sandbox_members and interception_members must be set together")
        return self

    def client_tls(self: Self) -> ClientTls | None:
        """TLS for calls to the other services; None is plaintext, on loopback only."""
        if self.services_ca is None:
            return None
        return ClientTls(self.services_ca, self.services_cert, self.services_key)
