"""The training policies of harness workers, as sampling."""

from typing import Any

import pytest

from penstock.adapters.harness.tasks import sampling_of
from penstock.client import InvalidArgument, Sampling


@pytest.mark.requirement("R63", "R64")
@pytest.mark.parametrize("off", [-1, 0], ids=str)
def test_a_policy_over_the_whole_vocabulary_overrides_every_filter_of_the_agents(off: int) -> None:
    """As TRL's worker passes it: what is left out would leave the agents' own."""
    policy: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": off, "min_p": 0.0, "max_tokens": None}
    assert sampling_of(policy) == Sampling(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0)


@pytest.mark.requirement("R63")
def test_a_policy_with_filters_is_kept_and_one_with_an_unknown_field_refused() -> None:
    assert sampling_of({"top_k": 20, "min_p": 0.1}) == Sampling(top_k=20, min_p=0.1)
    with pytest.raises(InvalidArgument, match="top_a") as refused:
        sampling_of({"top_a": 1})
    assert refused.value.reason == "HARNESS_SAMPLING"
