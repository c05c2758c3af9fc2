"""The choice among live services: the one that has a prepared state, unless it has clearly more to do than others.

Each key (a prepared state, a run) ranks all members by a hash (rendezvous hashing, Thaler and Ravishankar 1998), so
that every driver prefers the same ones without talking to others, and a member that comes or goes moves its own share
only. The first in the ranking whose load is near the mean is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final

SPILL: Final = 1.25
"""A member with more than this times the mean load passes work on."""
SLACK: Final = 4
"""And more than this many beyond it: locality is worth a little imbalance."""


def ranking(names: Collection[str], key: str) -> Sequence[str]:
    """The names in the order in which `key` prefers them."""
    return sorted(names, key=lambda name: (hashlib.sha256(f"{key}\0{name}".encode()).digest(), name), reverse=True)


def choose(
    loads: Mapping[str, float], key: str, avoid: Collection[str] = (), holding: Collection[str] = ()
) -> str | None:
    """The member that takes one more piece of work; None if there is none.

    Args:
        loads: what each member that may be chosen has to do now; >= 0.
        key: work with the same key goes to the same members.
        avoid: names that are taken only if there are no others.
        holding: names that have what the work needs: the first of them whose load is near the mean is taken, unless it
            has clearly more to do than the first of all, which then gets it too. So a newcomer, which holds nothing,
            soon has its share.
    """
    names = [name for name in loads if name not in avoid] or list(loads)
    if not names:
        return None
    mean = sum(loads[name] for name in names) / len(names)
    near = [name for name in names if loads[name] <= SPILL * mean + SLACK]
    order = ranking(near, key)  # never empty: one has no more than the mean
    holder = next((name for name in order if name in holding), order[0])
    return holder if loads[holder] <= SPILL * loads[order[0]] + SLACK else order[0]
