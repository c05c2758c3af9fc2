"""Chooses the calls that are worth branches, for a given number of branches.

What is chosen are turns; to know what a turn changed takes the values before and after it, which are those of its call
and of the next one. Deterministic: equal input and seed give equal plans.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, TypeAlias

import numpy as np

from penstock.analysis.credit_values import turns_of
from penstock.client.errors import InvalidArgument
from penstock.client.types.trajectories import Call, Trajectory

By: TypeAlias = Literal["parting", "surprise"]
"""What ranks turns: first the number of siblings that part there, or the surprise of the answer alone."""

MAX_BRANCHES = 256
"""Branches of one call at most, as `ps.rollouts.branch` takes them."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call that is to be branched."""

    rollout_id: str
    call_id: str
    index: int


def surprise(call: Call) -> float | None:
    """Returns minus the logprob of a call's whole answer, in nats, >= 0; None without logprobs.

    It estimates the entropy of the answers from one of them without bias, and a branch gives the same answer with the
    probability exp(-surprise): branches of a call of which the model was sure would show nothing.
    """
    logprobs = None if call.completion is None else call.completion.logprobs
    return None if logprobs is None else max(0.0, -float(logprobs.sum(dtype=np.float64)))


def partings(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Returns, by call id, how many siblings gave another answer there after the same path of tokens.

    Rollouts whose prompts part first, as by the output of a command, part at no answer. Those without tokens part at
    none.
    """
    paths = [_path(trajectory) for trajectory in trajectories]
    found: Counter[str] = Counter()
    for number, path in enumerate(paths):
        for other in paths[number + 1 :]:
            for one, another in zip(path, other, strict=False):
                if one[1] != another[1]:
                    break
                if one[2] != another[2]:
                    found.update((one[0], another[0]))
                    break
    return dict(found)


def plan(
    trajectories: Sequence[Trajectory],
    *,
    budget: int,
    n: int,
    by: By = "parting",
    seed: int = 0,
    known: Mapping[str, object] | None = None,
) -> tuple[Point, ...]:
    """Returns the calls to branch, those of the turns that show most first.

    A turn is chosen if branches are left for both its sides. Turns of equal rank, and those without logprobs, which
    come last, are in an order drawn by the seed.

    Args:
        trajectories: rollouts with their calls; siblings, if they are to be compared.
        budget: branches in all, at least n.
        n: branches of each call, 1 to 256.
        by: what ranks the turns.
        seed: of the order of equal ones.
        known: call ids whose value is known already.

    Raises:
        InvalidArgument: `BRANCH_PLAN`.
    """
    if not 1 <= n <= MAX_BRANCHES or budget < n:
        raise InvalidArgument(
            f"n must be 1 to {MAX_BRANCHES} and the budget at least n, not n={n} and budget={budget}: "
            "one call costs n branches",
            reason="BRANCH_PLAN",
        )
    if by not in ("parting", "surprise"):
        raise InvalidArgument(f"by must be parting or surprise, not {by!r}", reason="BRANCH_PLAN")
    parted = partings(trajectories) if by == "parting" else {}
    sides: list[tuple[Point, ...]] = []
    ranks: list[tuple[int, float]] = []
    for trajectory in trajectories:
        turns = turns_of(trajectory)
        points = [Point(trajectory.rollout_id, call.call_id, call.index) for call in turns]
        for number, call in enumerate(turns):
            of_answer = surprise(call)
            ranks.append((-parted.get(call.call_id, 0), 1.0 if of_answer is None else -of_answer))
            sides.append(tuple(points[number : number + 2]))
    drawn = np.random.default_rng(seed).permutation(len(sides)).tolist()
    chosen: dict[str, Point] = {}
    for turn in sorted(drawn, key=ranks.__getitem__):
        needed = [point for point in sides[turn] if point.call_id not in chosen and point.call_id not in (known or {})]
        if (len(chosen) + len(needed)) * n <= budget:
            chosen |= {point.call_id: point for point in needed}
    return tuple(chosen.values())


def _path(trajectory: Trajectory) -> list[tuple[str, bytes, bytes]]:
    """Returns id and digests of prompt and answer of each turn, up to the first without tokens."""
    found = []
    for call in turns_of(trajectory):
        sampled = None if call.completion is None else call.completion.token_ids
        if sampled is None:
            break
        prompt = trajectory.prompt_of(call.call_id)
        found.append((call.call_id, sha256(prompt.tobytes()).digest(), sha256(sampled.tobytes()).digest()))
    return found
