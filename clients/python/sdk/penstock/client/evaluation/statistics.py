"""Success rates from repeated attempts: pass@k without bias, and intervals that stay honest with few tasks.

Sources: pass@k by M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), section 2.1;
the interval by E. B. Wilson, "Probable Inference" (JASA 22, 1927); tasks as clusters and paired differences as
E. Miller, "Adding Error Bars to Evals" (arXiv:2411.00640); the effective number of observations as E. L. Korn and
B. I. Graubard, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated from
Survey Data" (Survey Methodology 24, 1998).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Z: Final = 1.959963984540054
"""Of 95 %."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share, or a mean of what is bounded, with its 95 % interval, which stays within those bounds; `tasks` and
    `attempts` are what it was made from."""

    value: float
    low: float
    high: float
    tasks: int
    attempts: int


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The chance that one of k attempts passes, of which `passed` of `attempts` did: 1 - C(n-c, k) / C(n, k).

    Unbiased for every k up to `attempts`.

    Raises:
        ValueError: there are fewer than k attempts, or more passed than were made.
    """
    if not 0 <= passed <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {passed} in {attempts}")
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def wilson(share: float, observations: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that `observations` (not necessarily whole) gave."""
    square = Z * Z / observations
    centre = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / observations + square / (4 * observations))
    # Where nothing, or everything, passed the bound is exact; rounding must not say otherwise.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def estimate(counts: Mapping[str, tuple[int, int]], k: int) -> Estimate | None:
    """pass@k over tasks, from (attempts, passed) by task; tasks with fewer than k attempts are left out.

    Tasks are what the interval generalises over: attempts at one task are not independent, so the variance is that
    between tasks, and the interval is Wilson's for as many independent observations as have that variance. Where all
    tasks agree there is no variance to see, and each task counts once. Of a single task the interval is that of its
    own chance. None = no task has k attempts.
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
    """The mean over tasks of the means of their rewards, with an interval that stays within the range of rewards.

    As shares of the range the means are what pass rates are, and the interval is made as `estimate` makes it: nothing
    whose values lie between 0 and 1 varies more than what is either. Rewards of 0 and 1 give that of pass@1. A normal
    interval would leave the range where tasks are few.

    Args:
        rewards: of the attempts that were graded, by task; tasks without one are left out.
        least: the least reward that there can be.
        most: the greatest.
    """
    counted = {task: values for task, values in rewards.items() if values}
    if not counted:
        return None
    least, most = min(least, *map(min, counted.values())), max(most, *map(max, counted.values()))
    span = (most - least) or 1.0
    shares = [(math.fsum(values) / len(values) - least) / span for values in counted.values()]
    attempts = sum(map(len, counted.values()))
    value = min(max(math.fsum(shares) / len(shares), 0.0), 1.0)
    low, high = wilson(value, attempts) if len(shares) == 1 else _between_tasks(shares, value, attempts)
    mean_of_all = math.fsum(math.fsum(values) / len(values) for values in counted.values()) / len(counted)
    if most == least:
        return Estimate(mean_of_all, least, most, len(shares), attempts)
    low, high = max(least, least + low * span), min(most, least + high * span)
    return Estimate(mean_of_all, min(low, mean_of_all), max(high, mean_of_all), len(shares), attempts)


def _between_tasks(shares: Sequence[float], value: float, attempts: int) -> tuple[float, float]:
    """The interval of the mean of several tasks' shares."""
    if min(shares) == max(shares):  # the rounded mean of equal shares would show a variance where there is none
        return wilson(min(max(value, 0.0), 1.0), len(shares))
    variance = math.fsum((share - value) ** 2 for share in shares) / (len(shares) - 1) / len(shares)
    spread = value * (1 - value)
    # At most the attempts: a variance that is small by chance proves no more than they can.
    observations = len(shares) if spread <= 0 or variance <= 0 else min(spread / variance, attempts)
    return wilson(min(max(value, 0.0), 1.0), observations)


def mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and 95 % half-width of its normal interval; half-width 0.0 for equal values, None without any."""
    if not values:
        return None
    if min(values) == max(values):  # exactly: their rounded mean would have a half-width
        return float(values[0]), 0.0
    centre = math.fsum(values) / len(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return centre, Z * math.sqrt(variance / len(values))
