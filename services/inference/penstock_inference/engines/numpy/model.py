"""A decoder's configuration and weights, read from a local directory in Hugging Face's layout.

Families: Llama, Qwen2 (bias on q, k, v), Qwen3 (norm on each query and key head) and Qwen3-MoE (Qwen3 with a mixture of
experts in place of the dense product). Features that this engine does not compute (sliding windows, scaled rotary
embeddings, other activations) are refused by name: a model that would compute wrong results never loads. Weights are
immutable once built; an update builds new ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unsupported, Violation
from penstock_chassis.validation import violations_of
from penstock_inference.engines.checkpoint import parse_safetensors

MAX_PARAMETERS = 50_000_000
"""Above this the NumPy engine would be misleadingly slow; the error points to vLLM instead."""

MAX_EXPERTS = 65_536
"""The most experts of a layer whose ids fit the type of routed experts."""

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")

Array = NDArray[np.float32]


class _RopeFile(BaseModel):
    model_config = ConfigDict(extra="ignore")
    rope_type: str = "default"
    rope_theta: float | None = None


class _ConfigFile(BaseModel):
    """The part of `config.json` that affects the computation."""

    model_config = ConfigDict(extra="ignore")
    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: _RopeFile | None = None
    max_position_embeddings: int = Field(2048, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    eos_token_id: int | list[int] | None = None
    num_experts: int = Field(0, ge=0, le=MAX_EXPERTS)
    num_experts_per_tok: int = Field(0, ge=0)
    moe_intermediate_size: int = Field(0, ge=0)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of some layers."""

    count: int
    """Experts of each such layer."""
    chosen: int
    """How many of them compute each token."""
    intermediate_size: int
    normalised: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    layers: tuple[int, ...]
    """The layers that have them, ascending; the others are dense."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an expert's id, as vLLM's: one byte if that is enough."""
        return np.dtype(np.uint8 if self.count <= 256 else np.uint16)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder."""

    family: str
    """One of `_FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    stop_token_ids: tuple[int, ...]
    experts: ExpertsConfig | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From the contents of `config.json` and, if present, `generation_config.json` (its stop ids win).

        Raises InvalidArgument for a malformed file and Unsupported for a model that this engine does not compute.
        """
        try:
            file = _ConfigFile.model_validate(raw)
        except ValidationError as error:
            raise InvalidArgument(
                "config.json is not a decoder's configuration",
                reason="MODEL_CONFIG_INVALID",
                violations=violations_of(error, "config.json"),
            ) from error
        family = file.model_type
        if family not in _FAMILIES:
            raise _unsupported(f"model_type {family!r}; it supports {', '.join(_FAMILIES)}")
        rope = file.rope_parameters
        scaling = (file.rope_scaling or {}).get("rope_type", (file.rope_scaling or {}).get("type", "default"))
        if scaling != "default" or (rope is not None and rope.rope_type != "default"):
            raise _unsupported(f"rope scaling {scaling if scaling != 'default' else rope and rope.rope_type!r}")
        if file.use_sliding_window:
            raise _unsupported("use_sliding_window")
        if file.hidden_act != "silu":
            raise _unsupported(f"hidden_act {file.hidden_act!r}")
        if file.mlp_bias:
            raise _unsupported("mlp_bias")
        kv_heads = file.num_key_value_heads or file.num_attention_heads
        head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
        if file.num_attention_heads % kv_heads or head_dim % 2:
            raise InvalidArgument(
                "config.json asks for heads that cannot be grouped",
                reason="MODEL_CONFIG_INVALID",
                violations=[
                    Violation("num_key_value_heads", f"{kv_heads} does not divide {file.num_attention_heads} heads"),
                ]
                if file.num_attention_heads % kv_heads
                else [Violation("head_dim", f"{head_dim} is odd, rotary embeddings need an even size")],
            )
        eos = (generation or {}).get("eos_token_id", file.eos_token_id)
        stop = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
        return cls(
            family=family,
            vocab_size=file.vocab_size,
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            layers=file.num_hidden_layers,
            heads=file.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=file.rms_norm_eps,
            rope_theta=(rope.rope_theta if rope is not None and rope.rope_theta else file.rope_theta),
            max_position=file.max_position_embeddings,
            tied_embeddings=file.tie_word_embeddings,
            # Qwen2 always has the three biases; the others have a flag.
            qkv_bias=family == "qwen2" or file.attention_bias,
            out_bias=family != "qwen2" and file.attention_bias,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            stop_token_ids=stop,
            experts=_experts(file) if family == "qwen3_moe" else None,
        )

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`."""
        generation = directory / "generation_config.json"
        try:
            raw = json.loads((directory / "config.json").read_text("utf-8"))
            extra = json.loads(generation.read_text("utf-8")) if generation.exists() else None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise FailedPrecondition(
                f"cannot read the model's configuration: {error}", reason="MODEL_UNREADABLE"
            ) from error
        return cls.from_dict(raw, extra)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its published name, matrices as (out, in)."""
        d, f, q, kv = (
            self.hidden_size,
            self.intermediate_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for n in range(self.layers):
            p = f"model.layers.{n}."
            shapes[p + "input_layernorm.weight"] = (d,)
            shapes[p + "post_attention_layernorm.weight"] = (d,)
            for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{p}self_attn.{name}.weight"] = (size, d)
                if self.qkv_bias:
                    shapes[f"{p}self_attn.{name}.bias"] = (size,)
            shapes[p + "self_attn.o_proj.weight"] = (d, q)
            if self.out_bias:
                shapes[p + "self_attn.o_proj.bias"] = (d,)
            if self.qk_norm:
                shapes[p + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[p + "self_attn.k_norm.weight"] = (self.head_dim,)
            if self.experts is None or n not in self.experts.layers:
                shapes |= _products(p + "mlp.", d, f)
                continue
            shapes[p + "mlp.gate.weight"] = (self.experts.count, d)
            for expert in range(self.experts.count):
                shapes |= _products(f"{p}mlp.experts.{expert}.", d, self.experts.intermediate_size)
        shapes["model.norm.weight"] = (d,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        return sum(int(np.prod(shape)) for shape in self.tensor_shapes().values())

    def check_size(self) -> None:
        """Raises FailedPrecondition above `MAX_PARAMETERS`."""
        if self.parameter_count > MAX_PARAMETERS:
            raise FailedPrecondition(
                f"the model has {self.parameter_count / 1e6:.0f} M parameters; the numpy engine is a reference for up "
                f"to {MAX_PARAMETERS / 1e6:.0f} M. Use the vllm engine (PENSTOCK_INFERENCE_ENGINE=vllm).",
                reason="MODEL_TOO_LARGE",
                metadata={"parameters": str(self.parameter_count), "limit": str(MAX_PARAMETERS)},
            )


def _products(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def _experts(file: _ConfigFile) -> ExpertsConfig | None:
    """The mixture of a Qwen3-MoE; None if all its layers are dense. Raises InvalidArgument for one without experts."""
    layers = tuple(
        n
        for n in range(file.num_hidden_layers)
        if n not in file.mlp_only_layers and (n + 1) % file.decoder_sparse_step == 0
    )
    if not layers or not file.num_experts:
        return None
    violations = []
    if not 1 <= file.num_experts_per_tok <= file.num_experts:
        violations.append(
            Violation("num_experts_per_tok", f"must be in [1, {file.num_experts}], the number of experts")
        )
    if file.moe_intermediate_size < 1:
        violations.append(Violation("moe_intermediate_size", "must be at least 1"))
    if violations:
        raise InvalidArgument(
            "config.json asks for experts that cannot be computed", reason="MODEL_CONFIG_INVALID", violations=violations
        )
    return ExpertsConfig(
        count=file.num_experts,
        chosen=file.num_experts_per_tok,
        intermediate_size=file.moe_intermediate_size,
        normalised=file.norm_topk_prob,
        layers=layers,
    )


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated product: `gate_up` (hidden, 2 * inner), `down` (inner, hidden)."""

    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: `router` (hidden, experts) chooses among the experts."""

    router: Array
    experts: tuple[Dense, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, float32; matrices are (in, out), which BLAS multiplies fastest.

    Matrices that one product computes together are stored side by side.
    """

    attn_norm: Array
    qkv: Array
    qkv_bias: Array | None
    qk_norm: Array | None
    """(heads + kv_heads, head_dim): each head's norm, query heads first."""
    out: Array
    out_bias: Array | None
    mlp_norm: Array
    mlp: Dense | Experts


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one policy version."""

    embed: Array
    """(vocab, hidden)."""
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array
    """(hidden, vocab)."""
    tensors: Mapping[str, Array]
    """The same numbers by published name (views where the engine stacks them)."""

    @classmethod
    def build(cls, config: ModelConfig, tensors: Mapping[str, NDArray[Any]]) -> Weights:
        """From tensors by published name, copied to float32.

        With tied embeddings a `lm_head.weight` is the embedding under a second name and is ignored. Raises
        FailedPrecondition (TENSOR_MISSING, TENSOR_UNKNOWN, TENSOR_SHAPE) or InvalidArgument (TENSOR_NOT_FINITE), naming
        every tensor at fault.
        """
        shapes = config.tensor_shapes()
        _check_tensors(config, shapes, tensors)
        named: dict[str, Array] = {}

        def take(name: str) -> Array:
            named[name] = np.array(tensors[name], dtype=np.float32, order="C")
            return named[name]

        def stack(*names: str) -> Array:
            """Vectors end to end, or matrices transposed and side by side."""
            whole = np.ascontiguousarray(np.concatenate([np.asarray(tensors[n], dtype=np.float32) for n in names]).T)
            start = 0
            for name in names:
                stop = start + shapes[name][0]
                named[name] = whole[..., start:stop].T
                start = stop
            return whole

        def layer(n: int) -> Layer:
            p = f"model.layers.{n}."
            qkv = [f"{p}self_attn.{name}_proj" for name in "qkv"]
            qk_norm = None
            if config.qk_norm:
                q_norm, k_norm = take(p + "self_attn.q_norm.weight"), take(p + "self_attn.k_norm.weight")
                qk_norm = np.concatenate([np.tile(q_norm, (config.heads, 1)), np.tile(k_norm, (config.kv_heads, 1))])
            return Layer(
                attn_norm=take(p + "input_layernorm.weight"),
                qkv=stack(*(name + ".weight" for name in qkv)),
                qkv_bias=stack(*(name + ".bias" for name in qkv)) if config.qkv_bias else None,
                qk_norm=qk_norm,
                out=stack(p + "self_attn.o_proj.weight"),
                out_bias=take(p + "self_attn.o_proj.bias") if config.out_bias else None,
                mlp_norm=take(p + "post_attention_layernorm.weight"),
                mlp=mlp(n, p + "mlp."),
            )

        def dense(prefix: str) -> Dense:
            return Dense(
                gate_up=stack(prefix + "gate_proj.weight", prefix + "up_proj.weight"),
                down=stack(prefix + "down_proj.weight"),
            )

        def mlp(n: int, prefix: str) -> Dense | Experts:
            mixture = config.experts
            if mixture is None or n not in mixture.layers:
                return dense(prefix)
            experts = tuple(dense(f"{prefix}experts.{expert}.") for expert in range(mixture.count))
            return Experts(router=stack(prefix + "gate.weight"), experts=experts)

        embed = take("model.embed_tokens.weight")
        layers = tuple(layer(n) for n in range(config.layers))
        final_norm = take("model.norm.weight")
        head = np.ascontiguousarray(embed.T) if config.tied_embeddings else stack("lm_head.weight")
        return cls(embed=embed, layers=layers, final_norm=final_norm, head=head, tensors=named)

    @classmethod
    def from_directory(cls, config: ModelConfig, directory: Path) -> Weights:
        """Read `model.safetensors`."""
        path = directory / "model.safetensors"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FailedPrecondition(
                f"cannot read {path.name} in the model directory: {error.strerror}", reason="MODEL_UNREADABLE"
            ) from error
        return cls.build(config, parse_safetensors(data))

    def merged(self, config: ModelConfig, tensors: Mapping[str, NDArray[Any]]) -> Weights:
        """These weights with some tensors replaced."""
        return Weights.build(config, {**self.tensors, **tensors})


def _check_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, NDArray[Any]]
) -> None:
    missing = [Violation(name, "is missing") for name in shapes if name not in tensors]
    unknown: list[Violation] = []
    misshapen: list[Violation] = []
    infinite: list[Violation] = []
    for name, tensor in tensors.items():
        if name not in shapes:
            if not (name == "lm_head.weight" and config.tied_embeddings) and not name.endswith("rotary_emb.inv_freq"):
                unknown.append(Violation(name, "is not a tensor of this model"))
        elif tuple(tensor.shape) != shapes[name]:
            misshapen.append(Violation(name, f"has shape {tuple(tensor.shape)}, the model's is {shapes[name]}"))
        elif not bool(np.isfinite(tensor).all()):
            infinite.append(Violation(name, "has a value that is not finite"))
    for kind, reason, violations in (
        (FailedPrecondition, "TENSOR_MISSING", missing),
        (FailedPrecondition, "TENSOR_UNKNOWN", unknown),
        (FailedPrecondition, "TENSOR_SHAPE", misshapen),
        (InvalidArgument, "TENSOR_NOT_FINITE", infinite),
    ):
        if violations:
            first = f"{violations[0].field} {violations[0].description}"
            raise kind(f"the weights do not fit the model: {first}", reason=reason, violations=violations)


def _unsupported(what: str) -> Unsupported:
    return Unsupported(f"the numpy engine does not support this model: {what}", reason="MODEL_UNSUPPORTED")
