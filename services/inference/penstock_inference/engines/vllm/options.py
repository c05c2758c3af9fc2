"""An operator's choices for vLLM: checked engine options, and the resulting arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_chassis.validation import violations_of
from penstock_codec.errors import CodecError
from penstock_codec.tokenizer_files import read_image_rule
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checks import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from penstock_inference.engines.vllm.features import Features

WORKER_EXTENSION = "penstock_inference.engines.vllm.worker.WeightLoader"
CPU_KV_CACHE_BYTES = 1 << 30
"""vLLM's own default is most of the machine's memory."""
_TOKENIZER = "tokenizer.json"


class VllmOptions(BaseModel):
    """The keys of `engine_options`; those declared on one line are passed to vLLM unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    data_parallel_size: int = Field(1, ge=1)
    enable_expert_parallel: bool = False
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    block_size: int | None = Field(None, ge=1)
    enforce_eager: bool = False
    seed: int = Field(0, ge=0)
    max_adapters: int = Field(0, ge=0, le=1024)
    """Adapters that may be in force at once; 0 disables them, which makes every token a little cheaper."""
    max_adapters_per_namespace: int | None = Field(None, ge=1, le=1024)
    """How many of them may be one team's; unset: all."""
    max_adapter_rank: int = Field(16, ge=1, le=512)
    sleep: bool = False
    """Allocate memory so that it can be freed while asleep."""
    structured_output: bool | None = None
    """Whether completions may have a required form, for which vLLM loads the tokenizer; unset: if there is one."""
    reasoning_parser: str | None = None
    """vLLM's name of the model's reasoning format: a form then applies after the reasoning. Unset: from the start."""
    routed_experts: bool = False
    """Return the experts that computed each token, of a mixture-of-experts model."""
    transfer_backend: str = ""
    """How trainers move weights themselves: nccl, ipc, or another of vLLM's; empty disables it."""

    @classmethod
    def parse(cls, extra: Mapping[str, str]) -> VllmOptions:
        """Raises InvalidArgument (ENGINE_OPTIONS_INVALID) naming every key at fault."""
        try:
            return cls.model_validate(dict(extra))
        except ValidationError as error:
            violations = violations_of(error, "engine_options", "engine_options.")
            raise InvalidArgument(
                f"{violations[0].field}: {violations[0].description}",
                reason="ENGINE_OPTIONS_INVALID",
                violations=violations,
            ) from error


def structured_output(options: EngineOptions, chosen: VllmOptions, features: Features) -> bool:
    """Whether completions may have a required form."""
    if chosen.structured_output is False or not features.structured_output:
        return False
    return (options.model_dir / _TOKENIZER).is_file()


def takes_images(options: EngineOptions) -> bool:
    """Whether the model takes images, in a way that is known here. Raises FailedPrecondition (MODEL_UNREADABLE)."""
    try:
        return read_image_rule(options.model_dir) is not None
    except CodecError as error:
        raise FailedPrecondition(str(error), reason="MODEL_UNREADABLE") from error


def engine_arguments(options: EngineOptions, chosen: VllmOptions, features: Features) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    Raises InvalidArgument (ENGINE_OPTIONS_INVALID) for features that this vLLM, or this machine, does not have.
    """
    refused = []
    structured = structured_output(options, chosen, features)
    if chosen.sleep and not features.sleep:
        refused.append(
            Violation("engine_options.sleep", f"needs a GPU; this machine's platform is {features.platform}")
        )
    if chosen.transfer_backend and chosen.transfer_backend not in features.transfer_backends:
        known = ", ".join(features.transfer_backends) or "none"
        refused.append(
            Violation(
                "engine_options.transfer_backend",
                f"{chosen.transfer_backend} does not work with vLLM {features.version} on {features.platform}; "
                f"supported: {known}",
            )
        )
    if chosen.routed_experts and not features.routed_experts:
        needs = "a GPU and vLLM 0.32 or newer"
        refused.append(
            Violation(
                "engine_options.routed_experts",
                f"needs {needs}; this is vLLM {features.version} on {features.platform}",
            )
        )
    if chosen.structured_output and not structured:
        missing = "xgrammar, which is not installed" if not features.structured_output else f"{_TOKENIZER} in model_dir"
        refused.append(Violation("engine_options.structured_output", f"needs {missing}"))
    if chosen.reasoning_parser and not structured:
        refused.append(Violation("engine_options.reasoning_parser", "is for structured output, which is off"))
    if refused:
        raise InvalidArgument(
            f"{refused[0].field}: {refused[0].description}", reason="ENGINE_OPTIONS_INVALID", violations=refused
        )
    arguments: dict[str, Any] = {
        "model": str(options.model_dir),
        # The codec handles text; vLLM sees only ids, and each request states its stop tokens. Only grammars need text,
        # and the preprocessors of images.
        "skip_tokenizer_init": not structured and not takes_images(options),
        "generation_config": "vllm",
        "max_model_len": options.max_context_tokens,
        "max_num_seqs": options.max_concurrency,
        "max_logprobs": MAX_TOP_LOGPROBS,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "kv_cache_memory_bytes": options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if features.platform == "cpu" else None),
    }
    arguments |= chosen.model_dump(
        exclude={
            *("max_adapters", "max_adapters_per_namespace", "max_adapter_rank", "sleep", "transfer_backend"),
            *("structured_output", "routed_experts"),
        }
    )
    if chosen.max_adapters:
        # Two versions of each may be in use during a replacement.
        most = 2 * chosen.max_adapters
        arguments |= {"enable_lora": True, "max_loras": chosen.max_adapters, "max_cpu_loras": most}
        arguments |= {"max_lora_rank": chosen.max_adapter_rank}
    if chosen.sleep:
        arguments["enable_sleep_mode"] = True
    if chosen.routed_experts:
        arguments["enable_return_routed_experts"] = True
    return {name: value for name, value in arguments.items() if value is not None}
