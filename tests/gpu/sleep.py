"""Sleep and wake, which need a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu import serving

from penstock.client.errors import FailedPrecondition

CACHE_BYTES = 1 << 30
PROMPT = np.arange(20, 60)


@pytest.mark.requirement("R63", "R87")
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_frees_its_memory_and_wakes_with_its_weights(tmp_path: Path, level: int) -> None:
    """With level 2 they are loaded again from their files; a push while it sleeps is refused."""
    async with serving.engine(tmp_path, options={"sleep": "true", "enforce_eager": "true"}, cache=CACHE_BYTES) as ps:
        await ps.inference.update_weights(1, serving.policy(1))
        await serving.assert_sampled_by(ps, 1, 1)
        awake = torch.cuda.mem_get_info()[0]
        await ps.inference.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] - awake > CACHE_BYTES // 2
        with pytest.raises(FailedPrecondition) as refused:
            await ps.inference.update_weights(2, serving.policy(2))
        assert refused.value.reason == "ENGINE_ASLEEP"
        await ps.inference.wake()
        await serving.assert_sampled_by(ps, 1, 1)
        await ps.inference.update_weights(2, serving.policy(2))
        await serving.assert_sampled_by(ps, 2, 2)
