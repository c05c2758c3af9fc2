"""The exact paired permutation test: were the signs of the differences between two evaluations chance?

Source: R. A. Fisher, "The Design of Experiments" (1935), section 21, for paired differences. It assumes nothing about
the form of the differences, which are few values for binary rewards; only that tasks are independent.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np

_MOST_STEPS: Final = 2_000_000_000
"""Maximum additions of the table of sums: a few seconds."""
_MOST_SUMS: Final = 1 << 24
_MOST_ENUMERATED: Final = 20
"""Maximum differences of which all combinations of signs are enumerated."""


def sign_flips(differences: Sequence[Fraction]) -> float | None:
    """Returns the share of all assignments of signs whose sum is at least as far from 0 as that of `differences`.

    None = there is no difference to test, or too many of them have too little in common for an exact result.
    """
    if not differences:
        return None
    scale = math.lcm(*(item.denominator for item in differences))
    sizes = [abs(int(item * scale)) for item in differences if item]
    if not sizes:
        return 1.0
    common = math.gcd(*sizes)
    observed = abs(int(sum(differences) * scale)) // common
    sizes = [size // common for size in sizes]
    whole = sum(sizes)
    # The sum of a choice of signs is 2 * (the sum of those with a plus) - whole.
    if whole < _MOST_SUMS and whole * len(sizes) <= _MOST_STEPS:
        sums = np.arange(whole + 1)
        return min(1.0, float(_distribution(sizes, whole)[np.abs(2 * sums - whole) >= observed].sum()))
    if len(sizes) > _MOST_ENUMERATED:
        return None
    counts = Counter({0: 1})
    for size in sizes:
        shifted = Counter({total + size: count for total, count in counts.items()})
        counts.update(shifted)
    extreme: int = sum(count for total, count in counts.items() if abs(2 * total - whole) >= observed)
    return float(Fraction(extreme, 1 << len(sizes)))


def _distribution(sizes: Sequence[int], whole: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Returns the probability of each sum of those sizes that get a plus."""
    found = np.zeros(whole + 1, np.float64)
    found[0] = 1.0
    for size in sizes:
        found *= 0.5
        shifted = found[:-size].copy()
        found[size:] += shifted
    return found
