"""Trainers' reports of the difference between their logprobs and the engine's, kept for operators.

At most `_KEPT` versions, the newest; each figure is finite and in the range stated in inference_service.proto.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

import structlog

from penstock_chassis.errors import FailedPrecondition, Violation
from penstock_chassis.validation import invalid

_log = structlog.get_logger("penstock.inference")

_KEPT: Final = 8
_SHARES: Final = ("clipped_share", "effective_share")


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference over the tokens that one policy version sampled; see LogprobGap in inference_service.proto."""

    policy_version: int
    tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    kl: float
    ratio_mean: float
    clipped_share: float
    effective_share: float


class GapReports:
    """The latest report of each of the newest versions."""

    def __init__(self) -> None:
        self._by_version: dict[int, Gap] = {}

    def take(self, gap: Gap, version_in_force: int) -> None:
        """Store and log a report.

        Raises InvalidArgument naming every impossible figure, FailedPrecondition (POLICY_VERSION_UNAVAILABLE) for a
        version that was never in force.
        """
        violations = list(_violations(gap))
        if violations:
            raise invalid(violations)
        if gap.policy_version > version_in_force:
            raise FailedPrecondition(
                f"policy version {gap.policy_version} sampled nothing here: {version_in_force} is in force",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(version_in_force)},
            )
        self._by_version[gap.policy_version] = gap
        for version in sorted(self._by_version)[:-_KEPT]:
            del self._by_version[version]
        _log.info(
            "logprob_gap",
            policy_version=gap.policy_version,
            tokens=gap.tokens,
            mean_abs=gap.mean_abs,
            max_abs=gap.max_abs,
            kl=gap.kl,
            ratio_mean=gap.ratio_mean,
            effective_share=gap.effective_share,
        )

    def all(self) -> tuple[Gap, ...]:
        """The stored reports, oldest version first."""
        return tuple(self._by_version[version] for version in sorted(self._by_version))


def _violations(gap: Gap) -> list[Violation]:
    found = []
    for field in fields(gap):
        value = getattr(gap, field.name)
        low, high = -math.inf if field.name == "mean" else 0.0, 1.0 if field.name in _SHARES else math.inf
        if field.name == "tokens":
            low = 1
        if not (math.isfinite(value) and low <= value <= high):
            bounds = f"finite and at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            found.append(Violation(f"gap.{field.name}", f"must be {'finite' if field.name == 'mean' else bounds}"))
    return found
