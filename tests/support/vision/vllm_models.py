"""Tiny vision models with random weights, made on the spot by transformers, for vLLM on a CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tests.support import vision
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from penstock_codec.images import ImageRule

VOCAB: Final = 512
_IDS: Final = {text: index for index, text in enumerate(vision.CONTROLS)}
_STOP: Final = _IDS["<|im_end|>"]
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": _STOP,
    "bos_token_id": _IDS["<|endoftext|>"],
    "pad_token_id": _IDS["<|endoftext|>"],
}
_LLAVA_SIDE: Final = 56


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of vision models: a small one's configuration, its preprocessor's files, and the rule that they mean."""

    config: PreTrainedConfig
    model: type[PreTrainedModel]
    files: dict[str, dict[str, Any]]
    rule: ImageRule


def qwen2_vl() -> Family:
    """The size of an image decides. Its preprocessor needs torchvision."""
    text = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
    eyes = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": vision.PATCH,
        "spatial_merge_size": vision.MERGE,
        "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=eyes,
        image_token_id=vision.PLACEHOLDER_ID,
        video_token_id=_IDS[vision.VIDEO],
        vision_start_token_id=_IDS[vision.START],
        vision_end_token_id=_IDS[vision.END],
        eos_token_id=_STOP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    pixels = {"shortest_edge": vision.RULE.min_pixels, "longest_edge": vision.RULE.max_pixels}
    sizes = {"patch_size": vision.PATCH, "merge_size": vision.MERGE, "temporal_patch_size": 2, "size": pixels}
    names = {"processor_class": "Qwen2VLProcessor"}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **names, **sizes},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor", **names, **sizes},
    }
    return Family(config, Qwen2VLForConditionalGeneration, files, vision.RULE)


def llava() -> Family:
    """All images have one size."""
    config = LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": _LLAVA_SIDE,
            "patch_size": vision.PATCH,
            "projection_dim": 64,
        },
        image_token_index=vision.PLACEHOLDER_ID,
        image_seq_length=(_LLAVA_SIDE // vision.PATCH) ** 2,
        eos_token_id=_STOP,
        tie_word_embeddings=False,
        dtype="float32",
    )
    names = {"processor_class": "LlavaProcessor"}
    side = {"height": _LLAVA_SIDE, "width": _LLAVA_SIDE}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            **names,
            "size": {"shortest_edge": _LLAVA_SIDE},
            "crop_size": side,
        },
        "processor_config.json": {
            **names,
            "patch_size": vision.PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": vision.PLACEHOLDER,
        },
    }
    rule = ImageRule(vision.PLACEHOLDER_ID, (_LLAVA_SIDE // vision.PATCH) ** 2)
    return Family(config, LlavaForConditionalGeneration, files, rule)


def write(family: Family, directory: Path) -> PreTrainedModel:
    """The model directory, with the preprocessor's files as the models of this family have them; the model itself."""
    torch.manual_seed(0)
    model = family.model(family.config).eval()
    model.save_pretrained(directory)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    # Models of this family are published under their older names, which vLLM reads.
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in tensors.items()}
    save_file(older if family.model is LlavaForConditionalGeneration else tensors, weights, {"format": "pt"})
    (directory / "generation_config.json").unlink(missing_ok=True)
    vision.tokenizer_files(["what is on the screen"], rule=None).write(directory)
    for name, content in family.files.items():
        (directory / name).write_text(json.dumps(content))
    return model
