"""The Docker backend: one hardened container for each sandbox, served by a guest agent."""

from __future__ import annotations

from penstock_sandbox.backends.docker.backend import DockerBackend
from penstock_sandbox.backends.docker.options import DockerOptions
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.settings import SandboxSettings


def docker_backend(settings: SandboxSettings) -> Backend:
    """Returns the Docker backend, built from the settings; the entry point."""
    return DockerBackend(DockerOptions.of(settings, may_pull=settings.default_backend == DockerBackend.name))
