"""The operator's choices for the Docker backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """The operator's choices for this backend (their meanings: ``SandboxSettings``)."""

    state_dir: Path
    image: str
    sidecar_image: str
    host: str = ""
    allowed_images: tuple[str, ...] = ("*",)
    reach: str = "auto"
    runtime: str = ""
    memory_bytes: int | None = None
    """What a whole sandbox may take where its kernel holds its programs to no limit of theirs."""
    read_only: bool = False
    allow_root: bool = False
    pull_timeout_s: float = 600.0
    may_pull: bool = True
    """Whether images may be pulled as the service starts, or only for a sandbox that wants one."""
    prepared_bytes: int = 20 * 1024**3
    tmp_bytes: int = 1024 * 1024 * 1024
    allow_open_network: bool = False
