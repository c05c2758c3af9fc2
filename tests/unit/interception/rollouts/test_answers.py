"""What trainers bring is judged alone: an answer that breaks a rule is a verdict, and a repeat is no error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.services.inner_gate import inner_gate

from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason


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


@pytest.mark.requirement("R29")
async def test_a_repeated_delegation_is_accepted_again(tmp_path: Path) -> None:
    """Its acknowledgement was lost: while the source is asked, after its answer, and after a restart."""
    async with inner_gate(tmp_path) as gate:
        call = await gate.ask(await gate.open(), "one")
        gate.join()
        lease_id, delegate = call.lease_id, gate.interceptor.delegate
        for temperature in (0.5, 0.9):
            verdict = await delegate(call.id, lease_id, Sampling(temperature=temperature))
            assert isinstance(verdict, Accepted)
            assert (call.sampling.temperature, call.leases) == (0.5, 2)  # once: the repeat changes nothing
        await call.ended
        assert isinstance(await delegate(call.id, lease_id, None), Accepted)
    async with inner_gate(tmp_path) as gate:
        verdict = await gate.interceptor.delegate(call.id, lease_id, None)
        assert isinstance(verdict, Accepted)
        await verdict.committed
        for other in ("", "another"):
            refused = await gate.interceptor.delegate(call.id, other, None)
            assert isinstance(refused, Rejection) and refused.reason is RejectionReason.CALL_ENDED
