"""Converts a request's sampling to vLLM's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from penstock_inference.domain.generation import Sampling
from penstock_inference.domain.response_format import FormatKind, ResponseFormat


def sampling_params(sampling: Sampling, stops: Iterable[int], *, whole: bool, tensor_start: int = 0) -> Any:
    """Parameters of a generation that ends at `stops`; `whole` requests all output at the end, not token by token.

    `tensor_start`: the first position whose routed experts are wanted.
    """
    form = sampling.response_format
    # Only a vLLM that captures experts knows the parameter.
    experts = {"routed_experts_prompt_start": tensor_start} if sampling.token_tensors else {}
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop_token_ids=sorted(stops),
        # The model's own stops are among those above, where vLLM reports them by id.
        ignore_eos=True,
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
        structured_outputs=None if form is None else _structured(form),
        **experts,
    )


def score_params(top_logprobs: int) -> Any:
    """Parameters for the logprobs of a prompt and its alternatives; vLLM must sample at least one token."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _structured(form: ResponseFormat) -> Any:
    match form.kind:
        case FormatKind.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)
        case FormatKind.JSON_SCHEMA:
            return StructuredOutputsParams(json=form.text)
        case FormatKind.REGEX:
            return StructuredOutputsParams(regex=form.text)
        case FormatKind.CHOICE:
            return StructuredOutputsParams(choice=list(form.choices))
        case FormatKind.GRAMMAR:
            return StructuredOutputsParams(grammar=form.text)
