"""Agents whose sandbox is lost make the same calls again in a fresh one: two or three of them; the benchmark has all.

`python -m benchmarks replayed-agents` has all built-in agents and twenty tasks.
"""

from __future__ import annotations

import pytest
from tests.conformance.agents.test_agents import in_tokens
from tests.support.services.stack import Running

from penstock.agents.replay_check import check_replay


@pytest.mark.requirement("R128")
@pytest.mark.parametrize(
    "agent",
    ["shell", "pi", pytest.param("mini-swe-agent", marks=pytest.mark.on_demand("replayed agents: shell and pi run"))],
)
async def test_a_replayed_agent_reaches_its_last_call_with_the_same_tokens(stack: Running, agent: str) -> None:
    """All calls before the last one are answered again, and the last one is asked with the prompt that it had."""
    made = await check_replay(stack.ps, await stack.ps.agents.get(agent), speak=in_tokens)
    assert made.reached and made.divergences == (), made
    assert made.replayed == made.calls - 1 > 0
    assert made.result.rollout.attempts == 2
    assert made.result.reward is not None and made.result.reward.value == 1.0
    assert made.finding().outcome == "ok"
