"""How far a process grew: the kernel's own peak of its resident memory, begun anew."""

from __future__ import annotations

from pathlib import Path


class Peak:
    """How far a process's resident memory grew at most since this was made."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        (self._proc / "clear_refs").write_text("5")  # VmHWM begins anew at what it is now
        self._before = self._bytes("VmRSS")

    def grown(self) -> int:
        """Bytes."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, key: str) -> int:
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"{self._proc} tells no {key}")
