"""Plain processes that burn as much CPU as others did and touch nothing else: what a busy machine costs by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

LONGEST_S: Final = 600
_BURN: Final = f"""
import sys, time
share, slice_s, over = float(sys.argv[1]), 0.005, time.monotonic() + {LONGEST_S}
while (now := time.monotonic()) < over:
    while time.monotonic() < now + share * slice_s:
        pass
    time.sleep((1 - share) * slice_s)
"""


@contextmanager
def burning(shares: Iterable[float]) -> Iterator[None]:
    """Inside, one process for each share of a core, 0 to 1, burns that."""
    running = [subprocess.Popen([sys.executable, "-c", _BURN, f"{min(max(share, 0.0), 1.0):.4f}"]) for share in shares]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
