"""The time by which leases run."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady() -> Callable[[], float]:
    """A clock of seconds since the epoch that goes on evenly from now, whatever is done to the machine's clock.

    A clock that is set forward would end every sandbox, and one that is set back would let none end. No lease outlives
    its service, so each start may begin from the machine's clock anew.
    """
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


even_time = steady()
"""The service's own, from its start."""
