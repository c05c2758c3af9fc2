"""LoRA adapters as vLLM takes them."""

from __future__ import annotations

from typing import Any

from vllm.lora.request import LoRARequest

from penstock_inference.engines.adapters import LoadedAdapter


def lora_request(adapter: LoadedAdapter) -> Any:
    """vLLM's argument for each generation with the adapter."""
    return LoRARequest(adapter.versioned_name, adapter.number, str(adapter.directory))
