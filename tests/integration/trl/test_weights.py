"""How the example gives an engine its weights: by the names and types of the model's files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from penstock.client.sync import connect
from penstock_inference.testing import one_pass, open_inference, random_config, random_tensors, write_model

TIED = random_config("qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
IDS = np.arange(5, 40, dtype=np.int32)


@pytest.mark.requirement("R63", "R87")
@pytest.mark.parametrize("by_path", [False, True])
async def test_a_model_whose_head_is_its_embeddings_is_pushed_as_its_files_have_it(
    example: ModuleType, tmp_path: Path, by_path: bool
) -> None:
    """Small open models are tied, and larger ones than 512 MiB go by path. The old weights' files do not pile up."""
    model_dir = write_model(tmp_path / "model", TIED, random_tensors(TIED))
    weights = tmp_path / "weights"
    weights.mkdir()

    def push(address: str) -> list[np.ndarray]:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
        accelerator = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda one: one, wait_for_everyone=lambda: None
        )
        trainer: Any = SimpleNamespace(model=model, accelerator=accelerator, state=SimpleNamespace(global_step=0))
        scored = []
        with connect({"inference": address}) as ps:
            rollouts = example.Rollouts(ps, model_dir, [], ["shell"], weights if by_path else None)
            for step in range(3):
                trainer.state.global_step = step
                with torch.no_grad():
                    model.model.embed_tokens.weight *= 1.1
                for _ in range(2):  # once for each step
                    rollouts.push(trainer)
                assert ps.inference.info().policy_version == step + 1
                scored.append(ps.inference.score(IDS, 1))
        return scored

    async with open_inference(model_dir, tmp_path / "state", weights_dir=weights) as opened:
        scored = await asyncio.to_thread(push, opened.address)
    assert len([*weights.iterdir()]) == (1 if by_path else 0)
    tensors = load_file(model_dir / "model.safetensors")
    for step, found in enumerate(scored, 1):
        changed = tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"] * 1.1**step}
        expected, _ = one_pass(TIED, {name: array.astype(np.float32) for name, array in changed.items()}, IDS)
        assert np.abs(expected - found).max() < 1e-3
    assert (
        "lm_head.weight" not in tensors and json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"]
    )
