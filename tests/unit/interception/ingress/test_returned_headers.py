"""Headers of an endpoint's answer to a black box: what identifies the operator's account is kept back."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from penstock_interception.ingress.black_box_filter import returned_headers


@pytest.mark.parametrize("name", ["OpenAI-Organization", "openai-project", "anthropic-organization-id", "Set-Cookie"])
def test_an_agent_does_not_learn_whose_account_it_uses(name: str) -> None:
    headers = CIMultiDictProxy(CIMultiDict({name: "an account", "request-id": "r"}))
    assert dict(returned_headers(headers)) == {"request-id": "r"}
