"""Makes vLLM's processes sleep now and then while they wait for each other on a CPU, instead of only yielding.

An engine core and its worker poll shared memory, and yield the processor between two polls. Some kernels share the
processor among groups of processes first (by session or by container) and treat a yield as internal to the group: on
two cores, under Linux 6.18, a program of another session got no turn for half a minute, until the generation was over.
A sleep of zero length gives every process a turn. vLLM itself sleeps at every poll if Python is too old to yield well,
which costs more than a tenth of a tiny model's tokens; at one poll in many it costs a few hundredths.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle

YIELDS = 512
"""Polls per sleep: together less than a millisecond."""


def let_others_run() -> None:
    """The plugin `penstock` of the group `vllm.general_plugins`, which vLLM calls in each of its processes.

    With an accelerator nothing changes: processors are not scarce there.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = sleeping_at_times(utils.sched_yield)


def sleeping_at_times(give_way: Callable[[], object], every: int = YIELDS) -> Callable[[], object]:
    """`give_way`, but one call in `every` sleeps for zero time."""
    turns = cycle([give_way] * (every - 1) + [lambda: time.sleep(0)])

    def give_way_or_sleep() -> object:
        return next(turns)()

    return give_way_or_sleep
