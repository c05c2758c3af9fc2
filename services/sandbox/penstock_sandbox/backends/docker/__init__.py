"""The Docker backend: one hardened container for each sandbox, served by an attendant."""

from __future__ import annotations

from penstock_sandbox.backends.base import Backend
from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.settings import SandboxSettings


def docker_backend(settings: SandboxSettings) -> Backend:
    """The Docker backend as the settings want it."""
    return DockerBackend(
        DockerOptions(
            state_dir=settings.state_dir / "docker",
            host=settings.docker_host,
            image=settings.docker_image,
            allowed_images=settings.docker_allowed_images,
            reach=settings.docker_reach,
            sidecar_image=settings.docker_sidecar_image,
            runtime=settings.docker_runtime,
            memory_bytes=settings.default_resources.memory_bytes,
            read_only=settings.docker_read_only,
            allow_root=settings.docker_allow_root,
            prepared_bytes=settings.docker_prepared_bytes,
            pull_timeout_s=settings.image_pull_timeout_s,
            may_pull=settings.default_backend == DockerBackend.name,
            tmp_bytes=settings.tmp_bytes,
            allow_open_network=settings.allow_open_network,
        )
    )
