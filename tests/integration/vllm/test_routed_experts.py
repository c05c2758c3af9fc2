"""Routed experts of the real vLLM: what it has on this machine, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_chassis.errors import InvalidArgument
from penstock_inference.engines.base import Sampling
from penstock_inference.engines.vllm.params import sampling_params
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.requirement("R63", "R132")
async def test_a_cpu_refuses_routed_experts_by_name(tmp_path: Path) -> None:
    """vLLM's runner for CPUs captures none; it is not started to find that out."""
    config = random_config("qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    model = write_model(tmp_path / "model", config, random_tensors(config))
    with pytest.raises(InvalidArgument) as refused:
        async with open_inference(model, tmp_path / "state", engine="vllm", engine_options={"routed_experts": "true"}):
            raise AssertionError("the engine opened")
    assert refused.value.reason == "ENGINE_OPTIONS_INVALID"
    assert [violation.field for violation in refused.value.violations] == ["engine_options.routed_experts"]


@pytest.mark.requirement("R132")
async def test_only_requests_for_experts_set_vllms_parameter() -> None:
    """From the wanted position on; vLLM before 0.32 does not know it."""
    asks = Sampling(max_tokens=1, token_tensors=("routed_experts",))
    assert sampling_params(asks, [2], whole=True, tensor_start=7).routed_experts_prompt_start == 7
    assert sampling_params(Sampling(max_tokens=1), [2], whole=True, tensor_start=7).routed_experts_prompt_start == 0
