"""Success rates from repeated attempts: unbiased pass@k, and intervals that stay valid with few tasks.

Sources: pass@k by M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), section 2.1;
the interval by E. B. Wilson, "Probable Inference" (JASA 22, 1927); tasks as clusters and paired differences as E.
Miller, "Adding Error Bars to Evals" (arXiv:2411.00640); the effective number of observations as E. L. Korn and B. I.
Graubard, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated from Survey
Data" (Survey Methodology 24, 1998).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Z: Final = 1.959963984540054
"""Normal quantile of 95 % intervals."""
_ROUNDING: Final = 64 * sys.float_info.epsilon
"""Values around 1 that differ by no more, 1.4e-14, are equal: so much is lost in means and differences."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share, or a mean of bounded values, with its 95 % interval, which stays within those bounds; `tasks` and
    `attempts` are the numbers that it was computed from."""

    value: float
    low: float
    high: float
    tasks: int
    attempts: int


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Returns the probability that one of k attempts passes, if `passed` of `attempts` did: 1 - C(n-c, k) / C(n, k).

    Unbiased for every k up to `attempts`.

    Raises:
        ValueError: there are fewer than k attempts, or more passed than were made.
    """
    if not 0 <= passed <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {passed} in {attempts}")
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def wilson(share: float, observations: float) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of `observations` (not necessarily a whole number)."""
    square = Z * Z / observations
    centre = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / observations + square / (4 * observations))
    # With none or all passed the bound is exact; rounding must not change it.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def estimate(counts: Mapping[str, tuple[int, int]], k: int) -> Estimate | None:
    """Returns pass@k over tasks, from (attempts, passed) by task; tasks with fewer than k attempts are left out.

    The interval generalises over tasks: attempts at one task are not independent, so the variance is that between
    tasks, and the interval is Wilson's for the number of independent observations with that variance. If all tasks
    agree there is no measurable variance, and each task counts once. For a single task the interval is that of its own
    pass rate. None = no task has k attempts.
    """
    counted = {task: pair for task, pair in counts.items() if pair[0] >= k}
    if not counted:
        return None
    shares = [pass_at_k(*pair, k) for pair in counted.values()]
    attempts = sum(pair[0] for pair in counted.values())
    value = math.fsum(shares) / len(shares)
    if len(shares) == 1:
        ((made, passed),) = counted.values()
        low, high = (1 - (1 - bound) ** k for bound in wilson(passed / made, made))
        return Estimate(value, min(low, value), max(high, value), 1, attempts)
    low, high = _between_tasks(shares, value, attempts)
    return Estimate(value, low, high, len(shares), attempts)


def bounded_mean(rewards: Mapping[str, Sequence[float]], least: float, most: float) -> Estimate | None:
    """Returns the mean over tasks of their mean rewards, with an interval that stays within the range of rewards.

    The means, as shares of the range, are treated as pass rates in `estimate`: no variable with values between 0 and 1
    varies more than a binary one with the same mean. Rewards of 0 and 1 give the interval of pass@1. A normal interval
    would exceed the range where tasks are few.

    Args:
        rewards: of the graded attempts, by task; tasks without one are left out.
        least: the minimum possible reward.
        most: the maximum possible reward.
    """
    counted = {task: values for task, values in rewards.items() if values}
    if not counted:
        return None
    least, most = min(least, *map(min, counted.values())), max(most, *map(max, counted.values()))
    span = (most - least) or 1.0
    shares = [(math.fsum(values) / len(values) - least) / span for values in counted.values()]
    attempts = sum(map(len, counted.values()))
    value = min(max(math.fsum(shares) / len(shares), 0.0), 1.0)
    rounding = _ROUNDING * max(1.0, max(abs(least), abs(most)) / span)
    low, high = wilson(value, attempts) if len(shares) == 1 else _between_tasks(shares, value, attempts, rounding)
    mean_of_all = math.fsum(math.fsum(values) / len(values) for values in counted.values()) / len(counted)
    if most == least:
        return Estimate(mean_of_all, least, most, len(shares), attempts)
    low, high = max(least, least + low * span), min(most, least + high * span)
    return Estimate(mean_of_all, min(low, mean_of_all), max(high, mean_of_all), len(shares), attempts)


def _between_tasks(
    shares: Sequence[float], value: float, attempts: int, rounding: float = _ROUNDING
) -> tuple[float, float]:
    """Returns the interval of the mean of several tasks' shares, each exact but for `rounding`."""
    if max(shares) - min(shares) <= rounding:  # else rounding would be a variance that no task has
        return wilson(min(max(value, 0.0), 1.0), len(shares))
    variance = math.fsum((share - value) ** 2 for share in shares) / (len(shares) - 1) / len(shares)
    spread = value * (1 - value)
    # At most the attempts: a variance that is small by chance cannot add evidence.
    observations = len(shares) if spread <= 0 or variance <= 0 else min(spread / variance, attempts)
    return wilson(min(max(value, 0.0), 1.0), observations)


def mean(values: Sequence[float]) -> tuple[float, float | None] | None:
    """Returns mean and 95 % half-width of its normal interval; None without any value.

    The half-width is None where the values show no variance: there is one, or all are equal but for rounding.
    """
    if not values:
        return None
    least, most = min(values), max(values)
    centre = min(max(math.fsum(values) / len(values), least), most)
    if most - least <= _ROUNDING * max(1.0, abs(least), abs(most)):
        return float(centre), None
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return centre, Z * math.sqrt(variance / len(values))
