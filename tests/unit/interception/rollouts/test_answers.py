"""What trainers bring is judged alone: an answer that breaks a rule is a verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.services.inner_gate import inner_gate

from penstock_codec.chat import FinishReason
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.results import Rejection, RejectionReason


@pytest.mark.requirement("R83", "R101")
@pytest.mark.parametrize("last", [-1, 10_000_000], ids=["negative", "unknown"])
async def test_an_answer_with_a_stop_text_and_a_wrong_last_token_is_invalid_alone(tmp_path: Path, last: int) -> None:
    """It ended the trainer's whole session with INTERNAL."""
    async with inner_gate(tmp_path) as gate:
        call = await gate.ask(await gate.open(), "one")
        gate.join()
        answer = Completion(Tokens(np.asarray([last], np.int32)), finish_reason=FinishReason.STOP, stop_text="END")
        verdict = await gate.interceptor.deliver(call.id, call.lease_id, answer)
        assert isinstance(verdict, Rejection) and verdict.reason is RejectionReason.INVALID
        assert [text.split(":")[0] for text in verdict.violations] == ["completion.span.token_ids"]
