"""The embedded engine: a Llama, Qwen2, Qwen3 or Qwen3-MoE decoder in NumPy, exact and reproducible, for small models.

async with await NumpyEngine.open(EngineOptions(model_dir=path, model_name="demo")) as engine:
    async for event in engine.generate(GenerateRequest("r1", prompt_ids, Sampling(max_tokens=32))):
        ...
"""

from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checkpoint import parse_safetensors
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.numpy.model import ModelConfig, Weights

__all__ = ["EngineOptions", "ModelConfig", "NumpyEngine", "Weights", "open_engine", "parse_safetensors"]


async def open_engine(options: EngineOptions) -> NumpyEngine:
    """The entry point `numpy` of the group `penstock.inference.engines`."""
    return await NumpyEngine.open(options)
