"""The fidelity suite's parts: models of every family, and the dialects of penstock_interception.conformance."""

from __future__ import annotations

import pytest
from tests.support import families

from penstock_codec import Codec
from penstock_interception.conformance.dialects import DIALECTS
from penstock_interception.conformance.scripted_conversation import ScriptedConversation


@pytest.fixture(scope="session", params=["chatml", "strips_old_reasoning", "shows_call_ids", "system_first"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec.load(families.build(request.param), parser="hermes")


@pytest.fixture(params=sorted(DIALECTS))
def conversation(request: pytest.FixtureRequest, codec: Codec) -> ScriptedConversation:
    return ScriptedConversation.start(codec, DIALECTS[request.param])
