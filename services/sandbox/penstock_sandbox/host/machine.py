"""What is left of the machine that the service runs on."""

from __future__ import annotations

import os
from pathlib import Path

_MEMORY = Path("/proc/meminfo")


def free_memory(path: Path = _MEMORY) -> int | None:
    """Returns the bytes of memory that new processes can have without swapping; None if the kernel does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def busy_cpus() -> float:
    """Returns how many processes ran or waited for a processor, as the mean of the last minute."""
    return os.getloadavg()[0]
