"""Ids that are drawn many at once."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

from penstock_codec.random_ids import random_id


def test_no_id_is_given_twice_whoever_asks() -> None:
    """Threads take from one stock."""
    with ThreadPoolExecutor(8) as pool:
        drawn = [item for part in pool.map(lambda _: [random_id() for _ in range(2000)], range(8)) for item in part]
    assert len(set(drawn)) == len(drawn) == 16_000
    assert all(re.fullmatch("[0-9a-f]{32}", item) for item in drawn)


def test_a_forked_process_draws_other_ids() -> None:
    """It does not hand out what its parent has in stock."""
    random_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, random_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 32).decode()
    os.close(reading)
    os.close(writing)
    assert theirs not in {random_id() for _ in range(1000)}
