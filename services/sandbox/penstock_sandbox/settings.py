"""The operator's choices for the sandbox service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.settings import ServiceSettings
from penstock_sandbox.backends.docker.settings import DockerSettings


class SandboxSettings(DockerSettings, ServiceSettings):
    """Read from flags, ``PENSTOCK_SANDBOX_...`` and the file's ``[sandbox]`` table, like every service's."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SANDBOX_")

    port: int = Field(7701, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    default_backend: str = Field("local", description="backend for specs that name none")
    max_sandboxes: int = Field(512, ge=1, description="most sandboxes at once")
    default_lease_s: float = Field(900.0, gt=0, description="seconds a sandbox lives when its maker says nothing")
    max_lease_s: float = Field(86_400.0, gt=0, description="longest lease that may be asked for, in seconds")
    allowed_upstreams: tuple[str, ...] = Field(
        ("127.0.0.1:7780", "localhost:7780"),
        description="patterns (with * and ?) of host:port, tls:host:port or unix:/path that a sandbox's one endpoint "
        "may lead to",
    )
    upstream_ca: Path | None = Field(
        None, description="PEM file with the CA of tls: upstreams; unset = the system's roots"
    )
    allow_open_network: bool = Field(
        False, description="offer sandboxes that share this host's network: no isolation from it"
    )
    default_cpu: float | None = Field(
        None, gt=0, description="cores for a sandbox that asks for none; unset = no limit"
    )
    default_memory_bytes: int | None = Field(
        None, ge=4 * 1024 * 1024, description="memory for a sandbox that asks for none; unset = no limit"
    )
    default_pids: int | None = Field(
        1024, ge=8, description="processes and threads for a sandbox that asks for none, where that can be limited"
    )
    tmp_bytes: int = Field(1024**3, ge=1024**2, description="size of /tmp and of /dev/shm in a sandbox (memory)")
    first_uid: int = Field(
        200_000, ge=1000, description="first of the host users that sandboxes run as when this service is root"
    )
    uid_count: int = Field(4096, ge=1, le=1_000_000, description="how many such users there are")
    extra_read_only: tuple[Path, ...] = Field(
        (), description="further host paths that every sandbox sees, read-only, at the same place"
    )

    @field_validator("extra_read_only")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in value:
            if not path.is_absolute() or path == Path("/"):
                raise ValueError("each path must be absolute and not the root")
        return value
