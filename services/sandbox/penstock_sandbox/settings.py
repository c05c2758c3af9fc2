"""The operator's choices for the sandbox service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.settings import ServiceSettings
from penstock_sandbox.domain.model import LEAST_DISK_BYTES, LEAST_INODES, LEAST_MEMORY_BYTES, LEAST_PIDS, Resources
from penstock_sandbox.domain.paths import hidden_by


class SandboxSettings(ServiceSettings):
    """Read from flags, ``PENSTOCK_SANDBOX_...`` and the ``[sandbox]`` table, as in every service."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SANDBOX_")

    port: int = Field(7701, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    default_backend: str = Field("local", description="backend of specs that name none")
    max_sandboxes: int = Field(512, ge=1, description="most concurrent sandboxes")
    owner_label: str = Field(
        "owner", min_length=1, description="label whose value is a sandbox's owner, for the limits per owner"
    )
    max_sandboxes_per_owner: int | None = Field(
        None, ge=1, description="most concurrent sandboxes of one owner; those without the label count together"
    )
    queue_timeout_s: float = Field(
        30.0, ge=0, description="seconds that a create waits for a free place; 0 = it does not wait"
    )
    max_queued: int = Field(1024, ge=0, description="most creates of one owner that wait for a free place")
    default_lease_s: float = Field(900.0, gt=0, description="default lease, in seconds")
    max_lease_s: float = Field(86_400.0, gt=0, description="longest lease that a caller may request, in seconds")
    max_lifetime_s: float | None = Field(
        604_800.0,
        gt=0,
        description="longest life of a sandbox after READY, in seconds, whatever its renewals; unset = no limit",
    )
    snapshot_cache_bytes: int = Field(
        20 * 1024**3,
        ge=0,
        description="bytes of snapshots to keep; the least recently used are evicted first, but none in use",
    )
    keep_snapshots: bool = Field(
        False,
        description="keep snapshots (docker, e2b) when this service is stopped, for its next start on the same "
        "state directory; a killed service always leaves them",
    )
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
    default_cpu: float | None = Field(None, gt=0, description="default limit of cores of a sandbox; unset = no limit")
    default_memory_bytes: int = Field(
        4 * 1024**3,
        ge=0,
        description="default memory limit of a sandbox, /tmp and /dev/shm included, where it can be limited; "
        "at least 4 MiB, 0 = no limit",
    )
    default_pids: int = Field(
        1024,
        ge=0,
        description="default limit of a sandbox's processes and threads, where it can be limited; at least 8, "
        "0 = no limit",
    )
    default_disk_bytes: int = Field(
        16 * 1024**3,
        ge=0,
        description="default disk limit of a sandbox, its snapshot's bytes included, where it can be limited; at "
        "least 1 MiB, 0 = no limit",
    )
    default_inodes: int = Field(
        1_000_000,
        ge=0,
        description="default limit of a sandbox's files, directories and links on disk, where it can be limited; "
        "at least 64, 0 = no limit",
    )
    max_cpu: float | None = Field(None, gt=0, description="most cores that a spec may request; unset = no maximum")
    max_memory_bytes: int | None = Field(
        None, ge=LEAST_MEMORY_BYTES, description="most memory that a spec may request; unset = the machine's memory"
    )
    max_pids: int | None = Field(
        None, ge=LEAST_PIDS, description="most processes and threads that a spec may request; unset = no maximum"
    )
    max_disk_bytes: int | None = Field(
        None, ge=LEAST_DISK_BYTES, description="most bytes on disk that a spec may request; unset = no maximum"
    )
    max_inodes: int | None = Field(
        None, ge=LEAST_INODES, description="most files on disk that a spec may request; unset = no maximum"
    )
    min_free_bytes: int = Field(
        1024**3,
        ge=0,
        description="bytes that must be free on the disk of the state directory to create a sandbox; below half of "
        "it, local sandboxes are ended, the largest first",
    )
    min_free_inodes: int = Field(
        10_000,
        ge=0,
        description="inodes that must be free there, with the same effect, on filesystems with a fixed number",
    )
    tmp_bytes: int = Field(1024**3, ge=1024**2, description="size of /tmp and of /dev/shm in a sandbox (memory)")
    tmp_inodes: int = Field(
        262_144, ge=64, description="files, directories and links in /tmp, and in /dev/shm, of a local sandbox (memory)"
    )
    first_uid: int = Field(
        200_000, ge=1000, description="first of the host users that sandboxes run as when this service is root"
    )
    uid_count: int = Field(4096, ge=1, le=1_000_000, description="how many such users there are")
    extra_read_only: tuple[Path, ...] = Field(
        (), description="more host paths that every sandbox sees, read-only, at the same path"
    )

    hf_client: Literal["hub", "hf-sandbox"] = Field(
        "hub", description="SDK of the hf backend: huggingface_hub's Sandbox, or hf-sandbox"
    )
    hf_token: SecretStr | None = Field(None, description="Hugging Face token; unset = HF_TOKEN in the environment")
    hf_image: str = Field("python:3.12", description="image of hf sandboxes that name none; it needs python3 >= 3.8")
    hf_allowed_images: tuple[str, ...] = Field(
        (), description="patterns (with * and ?) of more images that hf sandboxes may name"
    )
    hf_flavor: str = Field("cpu-basic", description="hardware flavor of hf sandboxes")
    hf_namespace: str = Field("", description="user or organisation that hf sandboxes run under; empty = the token's")
    hf_max_sandboxes: int = Field(
        64, ge=1, le=1024, description="most concurrent hf sandboxes; each uses one of the service's threads"
    )
    hf_idle_timeout_s: float = Field(
        600.0, ge=1, description="seconds without a keep-alive of this service after which an hf sandbox ends"
    )
    hf_start_timeout_s: float = Field(300.0, gt=0, description="seconds that an hf sandbox may take to start")
    hf_allow_open_egress: bool = Field(
        False,
        description="allow sandboxes with one endpoint or no network on hf, although they can reach the rest of the "
        "internet; rollouts of agents need it",
    )

    e2b_api_key: SecretStr | None = Field(None, description="E2B's API key; unset = E2B_API_KEY")
    e2b_template: str = Field("base", min_length=1, description="E2B template of sandboxes that name no image")
    e2b_allowed_templates: tuple[str, ...] = Field(
        ("*",), description="patterns (with * and ?) of the E2B templates that a spec may name as its image"
    )
    e2b_domain: str = Field("", description="domain of an E2B deployment; unset = E2B_DOMAIN or E2B's own cloud")
    e2b_api_url: str = Field("", description="address of its control plane, if the domain is not enough")
    e2b_sandbox_url: str = Field("", description="address of its sandboxes, if the domain is not enough")
    e2b_max_lifetime_s: float = Field(
        86_400.0,
        ge=60,
        description="longest life of a sandbox that the E2B account allows, in seconds (3600 on some plans)",
    )
    docker_host: str = Field("", description="address of the Docker daemon (unix, tcp or ssh URL); empty = DOCKER_HOST")
    docker_image: str = Field(
        "python:3.13-slim-bookworm", description="image of Docker sandboxes whose spec names none"
    )
    docker_allowed_images: tuple[str, ...] = Field(
        ("*",), description="patterns (with * and ?) of the images that a spec may name"
    )
    docker_reach: Literal["auto", "direct", "sidecar", "inside"] = Field(
        "auto",
        description="how this service enters Docker sandboxes: direct = it enters their namespaces (root on the "
        "daemon's machine), sidecar = a container beside each, inside = served by their first process "
        "(only runtimes with their own kernel); auto = the first that works",
    )
    docker_sidecar_image: str = Field(
        "python:3.13-slim-bookworm",
        description="image with python3 that sidecars are made from, and from which gVisor's sandboxes are served",
    )
    docker_runtime: str = Field(
        "", description="runtime of Docker sandboxes, such as runsc (gVisor); empty = the daemon's"
    )
    docker_read_only: bool = Field(
        False,
        description="give Docker sandboxes a read-only root, with home, working directory and /tmp in bounded "
        "memory; forks and diffs are then unavailable",
    )
    docker_allow_root: bool = Field(
        False,
        description="allow Docker sandboxes whose user is root: without capabilities, but the kernel's root unless "
        "the daemon remaps users",
    )
    docker_prepared_bytes: int = Field(
        20 * 1024**3,
        ge=0,
        description="bytes that images prepared for sandboxes may add to the daemon's; the least recently used are "
        "evicted first, but none in use",
    )
    image_pull_timeout_s: float = Field(600.0, gt=0, description="seconds that pulling an image may take")

    @field_validator("default_memory_bytes", "default_pids", "default_disk_bytes", "default_inodes")
    @classmethod
    def _none_or_enough(cls, value: int, info: ValidationInfo) -> int:
        least = _LEAST[str(info.field_name)]
        if 0 < value < least:
            raise ValueError(f"must be at least {least}, or 0 for no limit")
        return value

    @field_validator("extra_read_only")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in value:
            if not path.is_absolute() or path == Path("/"):
                raise ValueError("each path must be absolute and not the root")
            if own := hidden_by(path):
                raise ValueError(
                    f"{path} cannot be mounted into sandboxes, which have their own {own}: use another path"
                )
        return value

    @property
    def default_resources(self) -> Resources:
        """Returns the limits of a sandbox whose spec gives none."""
        return Resources(
            _lesser(self.default_cpu, self.max_cpu),
            _lesser(self.default_memory_bytes or None, self.max_memory_bytes),
            _lesser(self.default_pids or None, self.max_pids),
            _lesser(self.default_disk_bytes or None, self.max_disk_bytes),
            _lesser(self.default_inodes or None, self.max_inodes),
        )

    @property
    def max_resources(self) -> Resources:
        """Returns the maximum limits that a spec may request."""
        return Resources(self.max_cpu, self.max_memory_bytes, self.max_pids, self.max_disk_bytes, self.max_inodes)


_LEAST = {
    "default_memory_bytes": LEAST_MEMORY_BYTES,
    "default_pids": LEAST_PIDS,
    "default_disk_bytes": LEAST_DISK_BYTES,
    "default_inodes": LEAST_INODES,
}

Amount = TypeVar("Amount", int, float)


def _lesser(default: Amount | None, most: Amount | None) -> Amount | None:
    """Returns the smaller amount: a default must not exceed the maximum."""
    if default is None or most is None:
        return most if default is None else default
    return min(default, most)
