"""The operator's choices for the sandbox service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from penstock.values import directory_urls, hosts
from penstock_chassis.settings import CALL_QUEUES, ServiceSettings
from penstock_sandbox.domain.model import LEAST_DISK_BYTES, LEAST_INODES, LEAST_MEMORY_BYTES, LEAST_PIDS, Resources
from penstock_sandbox.domain.paths import hidden_by

_PUBLIC_REGISTRIES = (
    "docker.io",
    "ghcr.io",
    "quay.io",
    "gcr.io",
    "mcr.microsoft.com",
    "nvcr.io",
    "public.ecr.aws",
    "registry.gitlab.com",
    "registry.k8s.io",
)
_RECORDING_SCHEMES = ("file", "s3")
"""Stores with a creation that fails where the name is taken: link(2) of POSIX, If-None-Match of S3."""


class SandboxSettings(ServiceSettings):
    """Read from flags, ``PENSTOCK_SANDBOX_...`` and the ``[sandbox]`` table, as in every service."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SANDBOX_")

    port: int = Field(7701, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    call_queues: int = Field(4, ge=1, le=16, description=CALL_QUEUES)
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
    snapshot_cache_count: int = Field(
        2048,
        ge=1,
        description="number of snapshots to keep, at most half of `uid_count`, since on the backend local each holds a "
        "user; evicted as for snapshot_cache_bytes",
    )
    toolbox_cache_bytes: int = Field(
        20 * 1024**3,
        ge=0,
        description="bytes of toolboxes to keep, those of agents and of tasks' packages; the least recently used are "
        "evicted first, but none in use",
    )
    debian_mirrors: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="URLs of Debian mirrors, asked in this order for the Debian packages of tasks, such as "
        "http://deb.debian.org/debian and http://deb.debian.org/debian-security; empty = none are installed",
    )
    debian_max_bytes: int = Field(
        2 * 1024**3,
        ge=1024,
        description="most bytes of one task's Debian packages: of the files, and unpacked, where each entry counts "
        "4096 more",
    )
    keep_snapshots: bool = Field(
        False,
        description="keep snapshots (docker, e2b) when this service is stopped, for its next start on the same "
        "state directory; a killed service always leaves them",
    )
    allowed_upstreams: tuple[str, ...] = Field(
        ("127.0.0.1:7780", "localhost:7780"),
        description="patterns (with * and ?) of host:port, tls:host:port, tls:name@host:port (the name in its "
        "certificate) or unix:/path that a sandbox's one endpoint may lead to",
    )
    upstream_ca: Path | None = Field(
        None, description="PEM file with the CA of tls: upstreams; unset = the system's roots"
    )
    egress_hosts: tuple[str, ...] = Field(
        (),
        max_length=1024,
        description='what lists of sandboxes may name: "name", "*.name" (every name below), CIDR blocks, or "*" for '
        "any; a list without hosts has these, where * is every name and no address; empty = no sandbox gets a list; "
        "needs the extra egress",
    )
    egress_private_addresses: tuple[str, ...] = Field(
        (), description="CIDR blocks of addresses that are not public and that the egress proxy may connect to"
    )
    egress_netrc: Path | None = Field(
        None,
        description="file in netrc's format with the logins that the egress proxy adds to HTTPS requests; no sandbox "
        "sees them",
    )
    egress_tokens: dict[str, SecretStr] = Field(
        {},
        description="JSON: bearer token by host, as registries of npm and others expect it, instead of a login; added "
        "and hidden as those of egress_netrc",
    )
    egress_ca: Path | None = Field(
        None, description="PEM file with the CA of the hosts that the egress proxy asks; unset = the system's roots"
    )
    egress_store_bytes: int = Field(
        20 * 1024**3,
        ge=1024**2,
        description="bytes of recorded responses to keep; the least recently used recordings are evicted first, but "
        "none used within an hour",
    )
    egress_max_object_bytes: int = Field(
        2 * 1024**3, ge=1024, description="most bytes of one response through the egress proxy"
    )
    egress_timeout_s: float = Field(
        300.0, gt=0, le=3600, description="seconds that a response may take that the egress proxy fetches"
    )
    egress_recordings: str = Field(
        "",
        description="URL of a directory in which sandbox services have their named recordings together, so that "
        "sandboxes on all of them get the same responses: file:///PATH on a shared file system with hard links, or "
        "s3://BUCKET/PATH with credentials from the environment and the extra s3; empty = each service has its own",
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
        description="bytes that must be free on the disk of the state directory to create a sandbox, pull an image "
        "(`local`) or install a toolbox; below half of it, local sandboxes are ended, the largest first",
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
    kubernetes_warm_pool: str = Field(
        "", description="SandboxWarmPool from which sandboxes that name no image are claimed; empty = no such backend"
    )
    kubernetes_allowed_warm_pools: tuple[str, ...] = Field(
        (), description="patterns (with * and ?) of more warm pools that a spec may name as its image"
    )
    kubernetes_namespace: str = Field("", description="namespace of the warm pools; empty = this service's own")
    kubernetes_keys: Path | None = Field(
        None, description="directory with service.pem and pod.crt, which the template's pods know"
    )
    kubernetes_config: Path | None = Field(
        None, description="kubeconfig file; unset = the pod's account in a cluster, else KUBECONFIG"
    )
    kubernetes_context: str = Field("", description="context of the kubeconfig; empty = its current one")
    kubernetes_port: int = Field(7790, ge=1, le=65535, description="port of the template's entrypoint")
    kubernetes_creates_per_s: float = Field(
        10.0, ge=0, description="most sandboxes that this service claims in a second; 0 = no limit"
    )
    kubernetes_ready_timeout_s: float = Field(
        180.0, gt=0, description="seconds that the cluster may take to make a sandbox ready"
    )
    kubernetes_delete_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds that the cluster may take to end a pod, before the deletion is reported as "
        "pending; it goes on",
    )
    docker_host: str = Field("", description="address of the Docker daemon (unix, tcp or ssh URL); empty = DOCKER_HOST")
    docker_image: str = Field(
        "python:3.13-slim-bookworm", description="image of Docker sandboxes whose spec names none"
    )
    docker_allowed_images: tuple[str, ...] = Field(
        ("*",), description="patterns (with * and ?) of the images that a spec may name"
    )
    docker_registries: tuple[str, ...] = Field(
        _PUBLIC_REGISTRIES,
        description="patterns (with * and ?) of registries (host or host:port) from which the daemon may pull images "
        "that a spec names; it asks them, and the hosts that they name for a login, from its own network",
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
    local_image: str = Field(
        "host",
        description="image of specs that name none on the backend local; host = this machine's own programs, read-only",
    )
    local_allowed_images: tuple[str, ...] = Field(
        ("*",), description="patterns (with * and ?) of the images that a spec may name on the backend local"
    )
    local_registries: tuple[str, ...] = Field(
        _PUBLIC_REGISTRIES,
        description="patterns (with * and ?) of registries (host or host:port) from which the backend local may pull "
        "images that a spec names, beside those in image_mirrors, image_credentials and image_plain_http; it asks "
        "them, and the hosts that they name for a login, from its own network",
    )
    local_image_bytes: int = Field(
        40 * 1024**3,
        ge=0,
        description="bytes of unpacked images to keep for the backend local; the least recently used are evicted "
        "first, but none in use",
    )
    local_max_image_bytes: int = Field(
        20 * 1024**3, ge=1024**2, description="most bytes that an image of the backend local may unpack to"
    )
    image_mirrors: dict[str, str] = Field(
        {}, description='JSON: URL of a mirror by registry, such as {"docker.io": "https://mirror.example"}; local only'
    )
    image_credentials: dict[str, SecretStr] = Field(
        {},
        description='JSON: "user:password" by host of a registry or mirror; those of Docker Hub are docker.io\'s; '
        "local only",
    )
    image_plain_http: tuple[str, ...] = Field(
        (), description="hosts (host:port) of registries that are asked without TLS; local only"
    )
    image_prefetch: tuple[str, ...] = Field(
        (), description="images that are pulled when the service starts; local only"
    )
    image_pull_timeout_s: float = Field(600.0, gt=0, description="seconds that pulling an image may take")

    @field_validator("default_memory_bytes", "default_pids", "default_disk_bytes", "default_inodes")
    @classmethod
    def _none_or_enough(cls, value: int, info: ValidationInfo) -> int:
        least = _LEAST[str(info.field_name)]
        if 0 < value < least:
            raise ValueError(f"must be at least {least}, or 0 for no limit")
        return value

    @field_validator("egress_hosts", "egress_private_addresses")
    @classmethod
    def _patterns(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for pattern in value:
            if info.field_name == "egress_private_addresses" and hosts.block(pattern) is None:
                raise ValueError(f"{pattern!r} is no CIDR block")
            if pattern != hosts.ANY and not hosts.is_pattern(pattern):
                raise ValueError(f'{pattern!r} must be "name", "*.name" (in lower case), a CIDR block or "*"')
        return value

    @field_validator("debian_mirrors")
    @classmethod
    def _mirrors(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(value, 1):
            # Without the URL: it may have a login.
            if not _is_mirror(url):
                raise ValueError(
                    f"URL {number} must be as http://deb.debian.org/debian, of printable characters, without a login, "
                    "spaces or .."
                )
        return tuple(url.rstrip("/") for url in value)

    @field_validator("egress_recordings")
    @classmethod
    def _place(cls, value: str) -> str:
        return directory_urls.checked(value, "sandbox service", _RECORDING_SCHEMES) if value else value

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

    @field_validator("image_credentials")
    @classmethod
    def _user_and_password(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for host, credentials in value.items():
            if ":" not in credentials.get_secret_value():
                raise ValueError(f"the value for {host} must be user:password")
        return value

    @field_validator("image_mirrors")
    @classmethod
    def _urls(cls, value: dict[str, str]) -> dict[str, str]:
        for registry, url in value.items():
            if not url.startswith(("https://", "http://")):
                raise ValueError(f"the value for {registry} must be a URL with https:// or http://")
        return value

    @model_validator(mode="after")
    def _recordings_are_hidden(self) -> Self:
        scheme, _, place = self.egress_recordings.partition("://")
        recordings = Path(place).resolve()
        for path in self.extra_read_only if scheme == "file" else ():
            if recordings.is_relative_to(path.resolve()) or path.resolve().is_relative_to(recordings):
                raise ValueError(f"egress_recordings is within reach of sandboxes, which see {path} (extra_read_only)")
        return self

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


def _is_mirror(url: str) -> bool:
    if not url.isprintable() or any(sign in url for sign in " \\?#@"):
        return False
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and ".." not in unquote(parts.path).replace("\\", "/").split("/")
        )
    except ValueError:
        return False
