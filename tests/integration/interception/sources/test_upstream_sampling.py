"""Sampling at an upstream: what it is asked where a budget or an override replaces what the agent asks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.interception.test_sources import ASK, PROXY, from_caller, said, upstream

from penstock.interception.v1 import interception_pb2

LIMITED = interception_pb2.Budgets(max_tokens_per_call=10)


def answer(_request: Any, _body: dict[str, Any]) -> dict[str, Any]:
    return said("well")


def spelled(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields of these names, in any spelling."""
    return {name: value for name, value in body.items() if name.lower().replace("_", "") in names}


@pytest.mark.requirement("R35")
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {"max_tokens": 10}),
        ({"max_tokens": 50}, {"max_tokens": 10}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 10}),
        ({"max_tokens": 50, "max_completion_tokens": 5000}, {"max_tokens": 10}),
        ({"max_tokens": None, "max_completion_tokens": 5000}, {"max_completion_tokens": 10}),
        ({"max_tokens": 5, "max_completion_tokens": 5000}, {"max_tokens": 5}),
        ({"max_tokens": 50, "MaxTokens": 5000, "Max_Completion_Tokens": 5000}, {"max_tokens": 10}),
        ({"max_output_tokens": 5000}, {"max_tokens": 10}),
    ],
)
async def test_token_limit_reaches_an_upstream_once_however_the_agent_writes_it(
    service: Any, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    """Servers disagree which of two fields counts, and some read names in any spelling."""
    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url), budgets=LIMITED)
        await rollout.client().chat.completions.create(model="m", messages=ASK, extra_body=asked)
    assert spelled(seen[0][1], "maxtokens", "maxcompletiontokens", "maxoutputtokens") == sent


@pytest.mark.requirement("R35")
async def test_an_upstream_is_asked_for_one_completion_however_the_agent_writes_it(service: Any) -> None:
    """Each further one would be sampled beside the limit of tokens."""
    async with upstream(answer) as (url, seen):
        rollout = await service.open(mode=PROXY, source=from_caller(url), budgets=LIMITED)
        more = {"n": 1, "N": 5, "best_of": 5}
        await rollout.client().chat.completions.create(model="m", messages=ASK, extra_body=more)
    assert not spelled(seen[0][1], "n", "bestof")
