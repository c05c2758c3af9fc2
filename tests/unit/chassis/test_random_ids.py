"""Ids that are drawn many at once."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from penstock_chassis.homes import random_id


def test_ids_are_unique_across_threads() -> None:
    """Threads take from one stock."""
    with ThreadPoolExecutor(8) as pool:
        drawn = [item for part in pool.map(lambda _: [random_id() for _ in range(2000)], range(8)) for item in part]
    assert len(set(drawn)) == len(drawn) == 16_000
    assert all(re.fullmatch("[0-9a-f]{32}", item) for item in drawn)


_FORKED = """
import os
from penstock_chassis.homes import random_id

random_id()
if os.fork() == 0:
    os.write(1, random_id().encode() + b" ")
    os._exit(0)
os.wait()
os.write(1, " ".join(random_id() for _ in range(1000)).encode())
"""


def test_a_forked_process_draws_other_ids() -> None:
    """It does not hand out what its parent has in stock."""
    # In a process of its own: this one may have threads by now, which a fork loses.
    drawn = subprocess.run([sys.executable, "-c", _FORKED], check=True, capture_output=True, text=True).stdout.split()
    assert len(set(drawn)) == len(drawn) == 1001
