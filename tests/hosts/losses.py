"""Losses of hosts, at a share of the rollouts ended: `n1@0.3`, `g1@0.5:link=40`, `d1@0.6:disk`.

A loss may leave open which host of a kind it is, and when: `n@0.3`, `g1@0.2-0.6`, `e@0-1`. `drawn` decides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

_SHARE: Final = r"0?\.\d+|1|0"
_FORM: Final = re.compile(
    rf"(?P<name>[ndge]\d*)@(?P<share>{_SHARE})(-(?P<last>{_SHARE}))?"
    r"(:(?P<how>kill|link|disk)(=(?P<back>\d+(\.\d+)?))?)?"
)


DRIVER_BACK_S: Final = 20.0
"""Rollouts of a driver have no end without it: one comes back on its state directory, by default after this time."""


class How(StrEnum):
    """`kill`: the cable is pulled and every process of the host ends. `disk`: its disk is empty afterwards, too.
    `link`: the cable alone; its processes go on."""

    KILL = "kill"
    LINK = "link"
    DISK = "disk"


@dataclass(frozen=True)
class Loss:
    """A host is lost once this share of the rollouts has ended. `back_s`: seconds until it is back.

    `name` is a letter if any host of that kind may be lost; `last` is the greatest share if that is open too.
    """

    name: str
    share: float
    how: How
    back_s: float | None
    last: float | None = None

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Read NAME@SHARE[-SHARE][:kill|link|disk[=SECONDS]]. Raises ValueError."""
        match = _FORM.fullmatch(text)
        if match is None:
            form = "NAME@SHARE[-SHARE][:kill|link|disk[=SECONDS]]"
            raise ValueError(f"{text!r} is not {form}, such as n1@0.3, n@0.2-0.5 or g1@0.5:link=40")
        name = match["name"]
        back_s = DRIVER_BACK_S if name.startswith("d") else None
        if match["back"] is not None:
            back_s = float(match["back"])
        how = How(match["how"] or "kill")
        if how is How.DISK and name[0] not in "dg":
            raise ValueError(f"{text!r}: the disks of drivers and gates can be lost, d... and g...")
        last = None if match["last"] is None else float(match["last"])
        return cls(name, float(match["share"]), how, back_s, last)


def drawn(losses: Sequence[Loss], names: Callable[[str], Sequence[str]], dice: random.Random) -> list[Loss]:
    """These losses in the order of their shares, with nothing left open, and no host lost twice by chance.

    `names` gives the hosts of a letter. Raises ValueError: there are not so many hosts.
    """
    found: list[Loss] = []
    for loss in sorted(losses, key=lambda one: len(one.name) == 1):  # those that name a host have it
        name = loss.name
        if len(name) == 1:
            free = [one for one in names(name) if one not in {other.name for other in found}]
            if not free:
                raise ValueError(f"no host {name}... is left to lose")
            name = dice.choice(free)
        share = loss.share if loss.last is None else dice.uniform(loss.share, loss.last)
        found.append(replace(loss, name=name, share=share, last=None))
    return sorted(found, key=lambda loss: loss.share)
