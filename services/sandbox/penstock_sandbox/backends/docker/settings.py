"""The operator's choices for the Docker backend, a part of the sandbox service's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class DockerSettings(BaseModel):
    """Fields of ``SandboxSettings``."""

    docker_host: str = Field(
        "", description="where the Docker daemon listens (unix, tcp or ssh URL); empty = as DOCKER_HOST says"
    )
    docker_image: str = Field(
        "python:3.13-slim-bookworm", description="image of Docker sandboxes whose spec names none"
    )
    docker_allowed_images: tuple[str, ...] = Field(
        ("*",), description="patterns (with * and ?) of the images that a spec may name"
    )
    docker_reach: Literal["auto", "direct", "sidecar"] = Field(
        "auto",
        description="how this service gets into Docker sandboxes: direct = it enters their namespaces (root on the "
        "daemon's machine), sidecar = a container beside each; auto = direct where that works",
    )
    docker_sidecar_image: str = Field(
        "python:3.13-slim-bookworm", description="image with python3 that sidecars are made from"
    )
    docker_runtime: str = Field("", description="runtime of Docker sandboxes, such as runsc; empty = the daemon's")
    docker_read_only: bool = Field(
        False,
        description="give Docker sandboxes a read-only root, with home, working directory and /tmp in bounded memory: "
        "no forks and no diffs then",
    )
    image_pull_timeout_s: float = Field(600.0, gt=0, description="seconds that pulling an image may take")
