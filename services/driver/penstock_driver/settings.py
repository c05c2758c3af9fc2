"""The driver's settings: addresses of the other services, and how much runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.membership import members
from penstock_chassis.settings import ServiceSettings
from penstock_chassis.tls import ClientTls
from penstock_driver.grading.grader import DEFAULT_MAX_CHANGES_BYTES
from penstock_driver.rollouts.event_limits import MAX_BYTES, MAX_EVENTS
from penstock_driver.store.seal import MIN_KEY, split
from penstock_driver.trajectories.exports.destination import check_url


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
        10.0,
        ge=0,
        le=86_400,
        description="seconds that a stop takes no new rollouts and terminals, and waits for those that run; one that "
        "leaves them waits only for verifiers in agents' own sandboxes",
    )
    on_stop: Literal["leave", "drain"] = Field(
        "leave",
        description="what SIGTERM does with rollouts and terminals that run. leave: the next process of this driver "
        "goes on with them; drain: they have drain_s to end. SIGINT, and a driver that was drained, always drain",
    )
    leave_s: float = Field(
        600.0,
        ge=1,
        le=86_400,
        allow_inf_nan=False,
        description="seconds that sandboxes which a stop left are kept for the next process of this driver. Gates keep "
        "the rollouts for their driver_lease_s",
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
    recording_wait_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds that a further attempt waits for a gate which is away and has what the last attempt was "
        "answered; then everything is sampled again",
    )
    spool_dir: Path | None = Field(
        None, description="directory for temporary files of grading; the state directory when not set"
    )
    journal_key: SecretStr | None = Field(
        None,
        description="secret of at least 32 characters that seals in the journal what rollouts need to go on after a "
        "restart, their secrets included. Several, separated by commas: the first seals, all open. Unset: the file "
        "journal.key in the state directory",
    )
    max_pause_s: float = Field(
        86_400.0,
        ge=1,
        le=86_400,
        allow_inf_nan=False,
        description="most seconds for which a rollout may be paused, in all its pauses together; then it goes on. It "
        "keeps its slot of max_running, and its sandbox, meanwhile",
    )
    kept_spec_bytes: int = Field(
        256 << 20,
        ge=0,
        description="most bytes of sealed specs of ended rollouts that are kept in the journal, to branch or regrade "
        "them, of all namespaces together: the oldest of those that have the most go first, and each with its rollout. "
        "0 = none: only rollouts that run can be branched",
    )
    max_recording_bytes: int = Field(
        16 << 30,
        ge=1 << 20,
        description="most bytes that the recorded answers of each namespace's branches that run or wait take on disk; "
        "more branches are refused. Branches of one request share them",
    )
    kept_end_state_bytes: int = Field(
        1 << 30,
        ge=0,
        description="most bytes of end states of ended rollouts, packed, that are kept in the state directory, for "
        "`penstock regrade`; the least recently used go first, and with their rollout. 0 = none",
    )
    kept_end_state_bytes_per_namespace: int | None = Field(
        None, ge=1, description="most bytes of them of each namespace; unset = as kept_end_state_bytes"
    )
    kept_end_state_s: float = Field(
        604_800.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which an end state that nobody used is removed",
    )
    max_regrades: int = Field(
        16, ge=1, le=1024, description="rollouts that are graded again at once; each has a sandbox meanwhile"
    )
    max_queued: int = Field(10_000, ge=0, description="most waiting rollouts of each namespace; more are refused")

    export_url: str = Field(
        "",
        description="URL of a directory where rollouts are stored as they end: s3://BUCKET/PATH, gs://..., "
        "file:///PATH; credentials come from the environment (docs/exports.md)",
    )
    export_rollouts: int = Field(256, ge=1, le=10_000, description="most rollouts in one exported file")
    export_bytes: int = Field(
        64 << 20, ge=1 << 10, le=1 << 30, description="bytes after which an exported file takes no further rollout"
    )
    export_wait_s: float = Field(
        30.0, ge=0, le=3600, allow_inf_nan=False, description="most seconds that an ended rollout waits to be exported"
    )
    export_bodies: bool = Field(False, description="export the agents' request bodies too")

    max_metric_points: int = Field(
        20_000_000,
        ge=1,
        le=10_000_000_000,
        description="most points of metrics that are kept of the runs of each namespace; more are refused until some "
        "are deleted",
    )
    max_terminals: int = Field(256, ge=1, le=10_000, description="most open terminal episodes; more are refused")

    @field_validator("sandbox_members", "interception_members", "driver_members")
    @classmethod
    def _members_are_valid(cls, value: str) -> str:
        if value:
            members.parse(value)
        return value

    @field_validator("journal_key")
    @classmethod
    def _journal_key_is_long(cls, value: SecretStr | None) -> SecretStr | None:
        keys = [] if value is None else split(value.get_secret_value())
        if value is not None and (not keys or min(map(len, keys)) < MIN_KEY):
            raise ValueError(f"expected at least {MIN_KEY} characters in each key: `openssl rand -hex 32` makes one")
        return value

    @field_validator("export_url")
    @classmethod
    def _export_url_is_valid(cls, value: str) -> str:
        return check_url(value) if value else value

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
