"""Losses of hosts, at a share of the rollouts ended: `sandbox:n1@0.3`, `gate:g1@0.5:link=40`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_FORM = re.compile(r"(?P<name>[ndge]\d+)@(?P<share>0?\.\d+|1|0)(:(?P<how>kill|link)(=(?P<back>\d+(\.\d+)?))?)?")


class How(StrEnum):
    """`kill`: the cable is pulled and every process of the host ends. `link`: the cable alone; its processes go on."""

    KILL = "kill"
    LINK = "link"


@dataclass(frozen=True)
class Loss:
    """A host is lost once this share of the rollouts has ended. `back_s`: seconds until it is back."""

    name: str
    share: float
    how: How
    back_s: float | None

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Read NAME@SHARE[:kill|link[=SECONDS]]. Raises ValueError."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not NAME@SHARE[:kill|link[=SECONDS]], such as n1@0.3 or g1@0.5:link=40")
        back = match["back"]
        return cls(
            match["name"], float(match["share"]), How(match["how"] or "kill"), None if back is None else float(back)
        )
