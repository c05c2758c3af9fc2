"""vLLM with its compiler and CUDA graphs, which its tests on a CPU switch off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu import serving


@pytest.mark.requirement("R82", "R87")
async def test_graphs_sample_by_the_weights_in_force(tmp_path: Path) -> None:
    """At several sizes of batches; a graph keeps its addresses, so new weights must come to them."""
    async with serving.engine(tmp_path, options={"enforce_eager": "false"}) as ps:
        for count in (1, 5, 16):
            await serving.assert_sampled_by(ps, 0, 0, count=count)
        await ps.inference.update_weights(1, serving.policy(1))
        await serving.assert_sampled_by(ps, 1, 1)
