"""A machine elsewhere, as the parts here need it: it runs commands as root and moves files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a short command in a sandbox; ``code`` is -1 if it was killed or is unknown."""

    code: int
    stdout: str
    stderr: str


class Machine(Protocol):
    """One sandbox's machine. All methods raise Unavailable where it cannot be reached."""

    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        """Runs a command to its end, within ``timeout_s`` seconds if given."""

    async def upload(self, path: str, content: bytes) -> None:
        """Writes a small file; its directory exists."""

    async def send(self, source: Path, path: str) -> None:
        """Uploads a file of any size; its directory exists."""

    async def fetch(self, path: str, target: Path) -> None:
        """Downloads a file of any size, which is at ``target`` only when complete."""
