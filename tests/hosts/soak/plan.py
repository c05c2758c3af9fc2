"""What a soak does, and its settings of the services."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.hosts.fleet import Fleet

LABEL: Final = "soak"
"""Rollouts have this label; its value says who answers their calls."""
TRAINER, ENGINES = "trainer", "engines"
PARTS: Final = 3
"""Calls of a rollout but the last one."""
TRAINER_HOST: Final = "t0"
_LISTS: Final = ("inference", "driver")


@dataclass(frozen=True)
class Plan:
    """`rollouts` in groups of `group`, at most `seconds` long.

    Something is lost every `every_s` seconds on average, until `calm` is the share that is left of both.
    """

    rollouts: int
    at_once: int
    group: int
    work_s: float
    every_s: float
    calm: float
    seconds: float
    named_s: float
    """The most seconds from a loss of a host until `doctor --live` names it."""
    memory_bytes: int
    """The most that all services may have together."""
    seed: int
    max_attempts: int = 10


def settings(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Gates have all engines, and find within seconds that a trainer is gone. Drivers know each other."""
    return {
        "interception": {
            "inference_address": "",
            "inference_members": f"file:{_list(folder, 'inference')}",
            "resume_window_s": 5.0,
        },
        "driver": {"driver_members": f"file:{_list(folder, 'driver')}"},
    }


def write_lists(fleet: Fleet) -> None:
    """Write the lists of engines and drivers."""
    for service in _LISTS:
        names = fleet.size.names(service)
        _list(fleet.folder, service).write_text(json.dumps({name: fleet.address(name) for name in names}))


def _list(folder: Path, service: str) -> Path:
    return folder / f"{service}.json"
