"""Losses of hosts, at a share of the rollouts ended: `n1@0.3`, `g1@0.5:link=40`, `d1@0.6:disk`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_FORM = re.compile(r"(?P<name>[ndge]\d+)@(?P<share>0?\.\d+|1|0)(:(?P<how>kill|link|disk)(=(?P<back>\d+(\.\d+)?))?)?")


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
    """A host is lost once this share of the rollouts has ended. `back_s`: seconds until it is back."""

    name: str
    share: float
    how: How
    back_s: float | None

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Read NAME@SHARE[:kill|link|disk[=SECONDS]]. Raises ValueError."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not NAME@SHARE[:kill|link|disk[=SECONDS]], such as n1@0.3 or g1@0.5:link=40")
        name = match["name"]
        back_s = DRIVER_BACK_S if name.startswith("d") else None
        if match["back"] is not None:
            back_s = float(match["back"])
        how = How(match["how"] or "kill")
        if how is How.DISK and name[0] not in "dg":
            raise ValueError(f"{text!r}: the disks of drivers and gates can be lost, d... and g...")
        return cls(name, float(match["share"]), how, back_s)
