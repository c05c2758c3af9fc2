"""The features of the installed vLLM, detected by inspection, not by its version.

The distribution may have another name than `vllm` (builds for other platforms do), so its metadata is not used.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from importlib.util import find_spec

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from penstock_chassis.errors import FailedPrecondition

LEAST_VERSION = (0, 21)


@dataclass(frozen=True, slots=True)
class Features:
    """The features of the vLLM in this process."""

    version: str
    platform: str
    """Such as "cpu" or "cuda"."""
    version_spans: bool
    """Each output reports which weights sampled which tokens (vLLM 0.32)."""
    weight_version: bool
    """The engine accepts the version of its weights (0.27)."""
    sleep: bool
    structured_output: bool
    """A grammar compiler is installed; not every platform has one."""
    transfer_backends: tuple[str, ...]
    routed_experts: bool
    """Each output can have its routed experts, from a position on (0.32). vLLM's runner for CPUs has no capture: its
    other one, which has it, needs a Triton that compiles for CPUs."""

    @property
    def scores_alone_with_adapters(self) -> bool:
        """With adapters, a prompt whose logprobs are wanted must be the only request of vLLM's step.

        Its kernels for CPUs take the logits' adapters by request, not by position: with two requests the process ends.
        """
        return self.platform == "cpu"

    @classmethod
    def detect(cls) -> Features:
        """Raises FailedPrecondition (ENGINE_TOO_OLD)."""
        parts = vllm.__version__.split(".")
        numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
        # A build from a working tree has no meaningful number.
        if len(numbers) == 2 and (0, 0) < numbers < LEAST_VERSION:
            least = ".".join(map(str, LEAST_VERSION))
            raise FailedPrecondition(
                f"vLLM {vllm.__version__} is installed, but {least} or newer is needed",
                reason="ENGINE_TOO_OLD",
                metadata={"version": vllm.__version__, "least": least},
            )
        outputs = {field.name for field in dataclasses.fields(CompletionOutput)}
        weight_version = hasattr(AsyncLLM, "update_weight_version")
        return cls(
            version=vllm.__version__,
            platform=str(getattr(current_platform, "device_type", "") or "unknown"),
            version_spans="weight_versions" in outputs and weight_version,
            weight_version=weight_version,
            sleep=bool(current_platform.is_sleep_mode_available()),
            structured_output=find_spec("xgrammar") is not None,
            transfer_backends=_transfer_backends(),
            routed_experts=(
                bool(current_platform.is_cuda_alike())
                and "enable_return_routed_experts" in cls.argument_names()
                and hasattr(SamplingParams, "routed_experts_prompt_start")
            ),
        )

    @staticmethod
    def argument_names() -> frozenset[str]:
        """The arguments that AsyncEngineArgs accepts."""
        return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))

    @staticmethod
    def shutdown_timeout() -> bool:
        """Whether AsyncLLM.shutdown accepts a timeout."""
        return "timeout" in inspect.signature(AsyncLLM.shutdown).parameters


def _transfer_backends() -> tuple[str, ...]:
    """The backends that vLLM registers and that can work on this platform: its own all need a GPU."""
    if not all(hasattr(AsyncLLM, name) for name in ("start_weight_update", "update_weights", "finish_weight_update")):
        return ()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.plugins import load_general_plugins

    own = set(WeightTransferEngineFactory._registry)  # noqa: SLF001 - it has no public list
    load_general_plugins()
    known = set(WeightTransferEngineFactory._registry)  # noqa: SLF001
    return tuple(sorted(known if current_platform.is_cuda_alike() else known - own))
