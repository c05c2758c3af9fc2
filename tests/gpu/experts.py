"""The experts that vLLM reports are those that computed the tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.gpu import serving
from tests.support import vllm_models as models

from penstock_inference.testing import one_pass, random_config

MIXTURE = random_config(
    "qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    **{name: models.CONFIG[name] for name in ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings")},
    num_experts=8,
    moe_intermediate_size=64,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eos_token_id=models.CONFIG["eos_token_id"],
)


@pytest.mark.requirement("R82", "R132")
async def test_experts_of_a_conversation_are_those_of_one_forward_pass(tmp_path: Path) -> None:
    """Two turns: the second asks from the first token without a row. Its tokens' logprobs agree too."""
    options = {"routed_experts": "true", "enforce_eager": "true"}
    async with serving.engine(tmp_path, MIXTURE, options=options) as ps:
        await serving.assert_sampled_by(ps, 0, 0, MIXTURE)
        whole, rows, start = np.arange(20, 60), [], 0
        for _ in range(2):
            done = await serving.sample(ps, whole, tensor_start=start, token_tensors=("routed_experts",))
            (tensor,) = done.tensors
            assert done.token_ids is not None and tensor.rows is not None and tensor.start == start
            rows.append(tensor.rows)
            whole = np.concatenate([whole, done.token_ids])
            start = whole.size - 1
        _, expected = one_pass(MIXTURE, serving.policy(0, MIXTURE), whole.astype(np.int32))
        assert expected is not None
        found = np.concatenate(rows)
        assert found.shape == expected.shape
        # Two experts that are nearly as likely may change places, or the last one of a token.
        same = (np.sort(found, axis=-1) == np.sort(expected, axis=-1)).all(axis=-1)
        assert same.mean() > 0.98
        await ps.inference.update_weights(1, serving.policy(1, MIXTURE))
        await serving.assert_sampled_by(ps, 1, 1, MIXTURE)
