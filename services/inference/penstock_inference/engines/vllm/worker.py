"""Runs inside vLLM's workers: loads weights from files between two steps, and watches the service.

vLLM mixes this class into its worker and calls it by name (`collective_rpc`), on every rank; each loads its own part of
every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from penstock_inference.engines.vllm.parent_death import follow


class WeightLoader:
    """Extends vLLM's worker; its names begin with `penstock_`, because they share the worker's namespace."""

    def penstock_follow(self, service: int) -> bool:
        """See `follow`."""
        return follow(service)

    def penstock_load(self, plan: list[list[Any]]) -> None:
        """Replace all weights by those of the plan (`Checkpoint.plan`), laid out as at the start."""
        worker: Any = self
        # Graphs and kernels keep their addresses: copy values into the existing tensors.
        with torch.no_grad():
            worker.model_runner.reload_weights(weights_iterator=_tensors(plan), is_checkpoint_format=True)


def _tensors(plan: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, names in plan:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(name)
