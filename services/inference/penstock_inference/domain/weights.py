"""Values of weight updates: what is replaced, and what generations in flight do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any]]


class PauseMode(Enum):
    """What happens to generations in flight; in every mode new requests queue until `resume`."""

    ABORT = "abort"
    """End every accepted request with `FinishReason.ABORT` and the tokens sampled so far."""
    WAIT = "wait"
    """Let running generations finish; queued ones stay queued."""
    KEEP = "keep"
    """Freeze between two tokens and continue at `resume`, with the KV cache kept."""


class UpdateFormat(Enum):
    """The contents of a weight update."""

    FULL = "full"
    """Every tensor of the model."""
    DELTA = "delta"
    """Complete replacement tensors for some names; the others stay."""


@dataclass(frozen=True, slots=True)
class UpdatePhases:
    """How many seconds each step of a commit took."""

    load_s: float
    """Checking and laying out the tensors, while generation continues."""
    pause_s: float
    """From the request to stop sampling until the new weights were in force."""
