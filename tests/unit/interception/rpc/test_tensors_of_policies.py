"""Tensors of tokens where a rollout's models are of several policies: refused by field, however they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.values.token_tensors import TokenTensor
from penstock_chassis import auth
from penstock_chassis.auth.callers import Caller, serve_for
from penstock_chassis.errors import InvalidArgument
from penstock_codec.chat import Sampling
from penstock_interception.domain.calls import CallRule, RolloutModel
from penstock_interception.domain.results import Accepted, Rejection
from penstock_interception.rpc.gate_service import spec_from

WHY = "must be empty: the rollout's models are of several policies"
EXPERTS = Sampling(token_tensors=("routed_experts",))


def opened_with(*policy_ids: str) -> pb.OpenRolloutRequest:
    models = [interception_pb2.RolloutModel(name=one, policy_id=one) for one in policy_ids]
    return pb.OpenRolloutRequest(
        request_id="q1",
        rollout_id="r1",
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
        sampling_override=chat_pb2.Sampling(token_tensors=["routed_experts"]),
        models=models,
    )


@pytest.mark.requirement("R29", "R132", "R133")
async def test_a_rollout_of_several_policies_is_not_opened_with_them() -> None:
    """One of a single policy is."""
    serve_for(Caller(auth.Role.OPERATOR, None))
    assert spec_from(opened_with("student"), {})[0].sampling_override == EXPERTS
    with pytest.raises(InvalidArgument) as refused:
        spec_from(opened_with("teacher", "student"), {})
    (found,) = refused.value.violations
    assert (found.field, found.description) == ("sampling_override.token_tensors", WHY)


@pytest.mark.requirement("R29", "R132", "R133")
async def test_no_row_of_a_policy_gets_into_anothers_sample(tmp_path: Path) -> None:
    """A trainer's answer and its delegation are invalid with tensors; the call stays with it."""
    teacher = RolloutModel("", "teacher", trained=False, rule=CallRule(until_index=1))
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open(run_id="run", models=(teacher, RolloutModel("", "student")))
        session = gate.join()
        call = await gate.ask(rollout, "list the files")
        plain = completion("Run", version=3)
        assert plain.tokens is not None
        rows = TokenTensor("routed_experts", "uint8", 0, (1, 1, 1), b"\1").digested()
        with_rows = replace(plain, tokens=replace(plain.tokens, tensors=(rows,)))
        refused = await gate.interceptor.deliver(call.id, call.lease_id, with_rows, session=session)
        assert isinstance(refused, Rejection) and refused.violations == (f"tensors: {WHY}",)
        refused = await gate.interceptor.delegate(call.id, call.lease_id, EXPERTS, session=session)
        assert isinstance(refused, Rejection)
        assert refused.violations == (f"sampling_override.token_tensors: {WHY}",)
        assert isinstance(await gate.interceptor.deliver(call.id, call.lease_id, plain, session=session), Accepted)
