"""The operator's options for the Docker backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock_sandbox.settings import SandboxSettings


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """The operator's options (``SandboxSettings`` defines them)."""

    state_dir: Path
    image: str
    sidecar_image: str
    host: str = ""
    allowed_images: tuple[str, ...] = ("*",)
    registries: tuple[str, ...] = ("*",)
    reach: str = "auto"
    runtime: str = ""
    memory_bytes: int | None = None
    """Memory limit of a whole sandbox whose kernel does not limit its programs."""
    read_only: bool = False
    allow_root: bool = False
    pull_timeout_s: float = 600.0
    may_pull: bool = True
    """Whether images may be pulled at the service's start, or only for a sandbox that needs one."""
    prepared_bytes: int = 20 * 1024**3
    tmp_bytes: int = 1024 * 1024 * 1024
    allow_open_network: bool = False
    allowlists: bool = False
    """Whether the service runs the proxy of allow-lists."""

    @classmethod
    def of(cls, settings: SandboxSettings, *, may_pull: bool) -> DockerOptions:
        """Returns the options that the service's settings give."""
        return cls(
            state_dir=settings.state_dir / "docker",
            host=settings.docker_host,
            image=settings.docker_image,
            allowed_images=settings.docker_allowed_images,
            registries=settings.docker_registries,
            reach=settings.docker_reach,
            sidecar_image=settings.docker_sidecar_image,
            runtime=settings.docker_runtime,
            memory_bytes=settings.default_resources.memory_bytes,
            read_only=settings.docker_read_only,
            allow_root=settings.docker_allow_root,
            prepared_bytes=settings.docker_prepared_bytes,
            pull_timeout_s=settings.image_pull_timeout_s,
            may_pull=may_pull,
            tmp_bytes=settings.tmp_bytes,
            allow_open_network=settings.allow_open_network,
            allowlists=bool(settings.egress_hosts),
        )
