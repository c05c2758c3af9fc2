"""Every agent of the registry, installed for real and run in a real sandbox at a real gate, by its spec alone."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.installed_agents import ON_DEMAND
from tests.support.policy import calling, sampled
from tests.support.services.stack import Running

from penstock.agents.smoke_test import Reply, run_trial
from penstock.client import Completion, LogprobsMode, ModelCall
from penstock_driver.agents.registry import built_in_specs

AGENTS = [
    pytest.param(spec.name, marks=pytest.mark.on_demand(ON_DEMAND[spec.name])) if spec.name in ON_DEMAND else spec.name
    for spec in built_in_specs()
]
"""What comes with the driver: a new file there is covered without a line here."""


def in_tokens(call: ModelCall, said: Reply) -> Completion:
    """What the script says as an engine would have sampled it."""
    text = calling(said.tool, **said.arguments) if said.tool else said.text
    ids, logprobs = sampled(text)
    return Completion.of_tokens(
        np.array(ids), np.array(logprobs), policy_version=3, logprobs_mode=LogprobsMode.PROCESSED
    )


@pytest.mark.requirement("R1", "R2", "R18", "R59", "R67", "R69", "R71", "R82", "R84", "R85", "R87")
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_does_what_its_spec_says(stack: Running, agent: str) -> None:
    """It is installed and reaches the gate; an awkward instruction
    of 100 KB arrives whole; its events are parsed; it ends as it should; no process has the key among its arguments; it
    calls a tool over MCP where it has that; and its trajectory is token-exact."""
    registered = await stack.ps.agents.get(agent)
    trial = await run_trial(stack.ps, registered, speak=in_tokens)
    findings = trial.findings()
    assert {finding.outcome for finding in findings} <= {"ok", "warning"}, "\n".join(map(str, findings))
    assert trial.argv is not None

    trajectory = await trial.handle.trajectory()
    assert trajectory.grade == "exact", trajectory.findings
    for call in trajectory.calls:
        assert call.completion is not None
        np.testing.assert_array_equal(call.completion.token_ids, trial.answers[call.call_id].token_ids)
    [sample] = [sample for sample in trajectory.samples if sample.branch_class == "main"]
    mask = np.zeros(len(sample.input_ids), bool)
    for span in sample.turns:
        mask[span.start : span.end] = True
        answer = trial.answers[span.call_id]
        np.testing.assert_array_equal(sample.input_ids[span.start : span.end], answer.token_ids)
        assert sample.logprobs is not None
        np.testing.assert_array_equal(sample.logprobs[span.start : span.end], answer.logprobs)
    np.testing.assert_array_equal(sample.loss_mask, mask)
