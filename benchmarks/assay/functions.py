"""The functions from which the corpus makes tasks: functions.yaml beside this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Function:
    """What a function shall do, its code before and after, and arguments that need all of the right code."""

    does: str
    broken: str
    right: str
    cases: list[Any]


FUNCTIONS = [Function(**item) for item in yaml.safe_load(Path(__file__).with_name("functions.yaml").read_text("utf-8"))]
