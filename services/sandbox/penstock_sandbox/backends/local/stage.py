"""Where the spawner shows the host's directories to an ordinary user, and the paths there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """The spawner's stage: sources by name, all visible under ``root``, where an ordinary user can reach them.

    With a stage a path is visible only below a source. ``root`` None = no stage: an ordinary user reads its own files.
    """

    root: Path | None
    sources: Mapping[str, Path] = field(default_factory=dict)

    def map(self, path: Path | str) -> str:
        """Returns the path to give to bubblewrap for a host path."""
        if self.root is None:
            return str(path)
        # By text: each sandbox needs ten of these, and comparing paths part by part takes as long as all of its files.
        found = str(path if isinstance(path, Path) else Path(path))
        for name, source in self.sources.items():
            above = str(source).rstrip("/")
            if found == above or found.startswith(f"{above}/"):
                return f"{self.root}/{name}{found[len(above) :]}"
        return found
