"""Which prompts a session was sent, so that later calls leave out what they share with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from penstock_interception.graph.values import Plan

MOST_BRANCHES = 16
"""Branches of a rollout whose last prompt a trainer keeps."""


class SentPrompts:
    """The last call that a session was sent of each of the newest `MOST_BRANCHES` branches of a rollout.

    The trainer keeps their whole prompts by the same rule, in the order of its stream. Only prompts count, not answers:
    what was sampled since is part of the later call, so it does not matter who answered, or whether that was accepted.
    """

    def __init__(self, known: Mapping[str, int] | None = None) -> None:
        """`known`: calls of any rollout whose prompts the trainer has, with the length of each in tokens."""
        self._known = known or {}
        self._rollouts: dict[str, OrderedDict[str, tuple[str, int]]] = {}

    def omitted(self, plan: Plan | None) -> int:
        """Returns how many tokens at the start of a call's prompt the trainer has: those of its parent's prompt."""
        if plan is None or plan.parent_call_id is None:
            return 0
        count = self._known.get(plan.parent_call_id, 0)
        for call_id, length in self._rollouts.get(plan.rollout_id, {}).values():
            if call_id == plan.parent_call_id:
                count = length
        return min(count, plan.shared_prefix_len)

    def add(self, call_id: str, plan: Plan) -> None:
        """Notes that a call was sent."""
        if not plan.exact:
            return
        branches = self._rollouts.setdefault(plan.rollout_id, OrderedDict())
        branches[plan.branch_id] = (call_id, int(plan.prompt_ids.size))
        branches.move_to_end(plan.branch_id)
        if len(branches) > MOST_BRANCHES:
            branches.popitem(last=False)

    def forget(self, rollout_id: str) -> None:
        """Forgets a closed rollout."""
        self._rollouts.pop(rollout_id, None)
