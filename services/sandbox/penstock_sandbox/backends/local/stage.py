"""Where a host path appears to an ordinary user: the spawner's stage, when the service is root.

Invariants: with a stage, a path is visible only below one of its sources; without one every path is itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """Sources by name, all shown under ``root``; None = no stage (an ordinary user reads its own files)."""

    root: Path | None
    sources: Mapping[str, Path] = field(default_factory=dict)

    def map(self, path: Path | str) -> str:
        """The path to give to bubblewrap for a host path."""
        if self.root is None:
            return str(path)
        found = Path(path)
        for name, source in self.sources.items():
            if found.is_relative_to(source):
                return str(self.root / name / found.relative_to(source))
        return str(found)
