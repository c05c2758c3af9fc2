"""How vLLM's processes wait for each other on a CPU: yielding, and now and then asleep.

An engine core and its worker poll shared memory, and yield the processor between two looks. A kernel that shares the
processor among groups of processes first (by session or by container) takes a yield for the group's own affair: on two
cores, under Linux 6.18, a program of another session got no turn for half a minute, until the generation was over. A
sleep of no time lets everybody have one. vLLM itself sleeps so where Python is too old to yield well, at every look,
which costs more than a tenth of a tiny model's tokens; at one look in many it costs a few hundredths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

YIELDS = 512
"""Looks for each sleep: less than a millisecond of them."""


def let_others_run() -> None:
    """The plugin `penstock` of the group `vllm.general_plugins`, which vLLM calls in each of its processes.

    Where an accelerator computes, nothing changes: processors are not scarce there.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = sleeping_at_times(utils.sched_yield)


def sleeping_at_times(give_way: Callable[[], object], every: int = YIELDS) -> Callable[[], object]:
    """`give_way`, but for one call in `every`, which sleeps for no time."""
    turns = cycle([give_way] * (every - 1) + [lambda: time.sleep(0)])

    def give_way_or_sleep() -> object:
        return next(turns)()

    return give_way_or_sleep
