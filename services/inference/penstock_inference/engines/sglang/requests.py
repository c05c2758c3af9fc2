"""Checks a request against what an SGLang server can do, and writes it in the server's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock_chassis.errors import Violation
from penstock_inference.domain.generation import SAMPLING_FIELDS, GenerateRequest, LogprobsMode, Sampling
from penstock_inference.domain.response_format import FIELD as FORMAT_FIELD
from penstock_inference.domain.response_format import FormatKind, ResponseFormat
from penstock_inference.engines.sglang.answers import Asked
from penstock_inference.engines.sglang.probe import Facts

LEAST_TEMPERATURE = 1e-6
"""The server takes any smaller one for 0."""
MAX_PENALTY = 2.0
EVENTS = 16
STREAM_EVENTS = 64
"""Events per completion, about: in each the server may repeat all tokens before."""
FILTERS = ("top_p", "top_k", "min_p")


def sampling_fields(facts: Facts) -> tuple[str, ...]:
    """The fields that take effect there.

    Not `repetition_penalty`, which counts the completion alone there, and not the prompt. Not the other penalties where
    the logprobs are the model's own: there they include penalties.
    """
    absent = {"repetition_penalty"}
    if not facts.seed:
        absent.add("seed")
    if not facts.text:
        absent |= {"stop", "min_tokens"}
    if facts.logprobs_mode is LogprobsMode.NONE:
        absent.add("top_logprobs")
    if facts.logprobs_mode is LogprobsMode.RAW:
        absent |= {"presence_penalty", "frequency_penalty"}
    if facts.logprobs_mode is LogprobsMode.PROCESSED and not facts.filtered_tokens:
        absent |= set(FILTERS)
    return tuple(name for name in SAMPLING_FIELDS if name not in absent)


def check_request(sampling: Sampling, facts: Facts, vocab_size: int) -> list[Violation]:
    """The violations of what this server cannot do, or would do otherwise; ranges are checked before."""
    s, plain, fields = sampling, Sampling(max_tokens=sampling.max_tokens), sampling_fields(facts)
    found = [
        Violation(f"sampling.{name}", "is not supported by this SGLang server; leave it unset")
        for name in SAMPLING_FIELDS
        if name not in fields and getattr(s, name) != getattr(plain, name)
    ]
    found += [
        Violation(f"sampling.{name}", f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}] on SGLang")
        for name in ("presence_penalty", "frequency_penalty")
        if abs(getattr(s, name)) > MAX_PENALTY
    ]
    if 0 < s.temperature < LEAST_TEMPERATURE:
        found.append(Violation("sampling.temperature", f"must be 0 or at least {LEAST_TEMPERATURE} on SGLang"))
    if s.ignore_eos and s.stop_token_ids:
        found.append(Violation("sampling.stop_token_ids", "cannot be combined with ignore_eos on SGLang"))
    if s.response_format is not None and s.min_tokens > 0:
        found.append(Violation("sampling.min_tokens", "cannot be combined with a response format"))
    if needs_filtered_logprobs(s, facts):
        most = facts.filtered_tokens
        if not 1 <= (s.top_k or vocab_size) <= most:
            text = (
                f"must be in [1, {most}] with a filter: SGLang gives logprobs of at most so many tokens that are left"
            )
            found.append(Violation("sampling.top_k", text))
        if s.top_p < 1 and s.min_p > 0:
            found.append(Violation("sampling.min_p", "cannot be combined with top_p on SGLang, which applies it last"))
        if s.top_logprobs:
            found.append(Violation("sampling.top_logprobs", "cannot be combined with top_p, top_k or min_p on SGLang"))
    return found


def needs_filtered_logprobs(sampling: Sampling, facts: Facts) -> bool:
    """Whether the logprobs must come from the filtered distribution.

    The server's usual ones are of that after penalties and temperature, but before its filters.
    """
    s = sampling
    filtered = s.temperature > 0 and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0)
    return filtered and facts.logprobs_mode is LogprobsMode.PROCESSED


def asked_for(request: GenerateRequest, facts: Facts) -> Asked:
    """What the answer must have."""
    s = request.sampling
    logprobs = "output_token_logprobs" if facts.logprobs_mode is not LogprobsMode.NONE else ""
    return Asked(
        request.prompt_token_ids.size,
        "output_token_sampling_logprobs" if needs_filtered_logprobs(s, facts) else logprobs,
        s.top_logprobs,
        frozenset(s.stop),
        "sampling" if s.response_format is None else FORMAT_FIELD,
    )


def generate_body(
    request: GenerateRequest,
    facts: Facts,
    *,
    rid: str,
    stop_token_ids: Iterable[int],
    vocab_size: int,
    cache_salt: str,
    adapter: str,
) -> dict[str, Any]:
    """The body of `/generate`.

    Args:
        request: the checked request.
        facts: what the server can do.
        rid: its name there. The server aborts by prefix, so that no name may begin with another.
        stop_token_ids: all that end it.
        vocab_size: of the model.
        cache_salt: separates cached prefixes; empty for none.
        adapter: the adapter's name there; empty for the base weights.
    """
    s = request.sampling
    greedy, filtered = s.temperature == 0, needs_filtered_logprobs(s, facts)
    params: dict[str, Any] = {
        # All of them, or the server would use its own defaults.
        "n": 1,
        "max_new_tokens": s.max_tokens,
        "min_new_tokens": s.min_tokens,
        "temperature": s.temperature,
        "top_p": 1.0 if greedy else s.top_p,
        "top_k": -1 if greedy else s.top_k or (vocab_size if filtered else -1),
        "min_p": 0.0 if greedy else s.min_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": 1.0,
        "stop": list(s.stop),
        "stop_token_ids": sorted(stop_token_ids),
        "ignore_eos": s.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stream_interval": max(1, s.max_tokens // (STREAM_EVENTS if request.stream else EVENTS)),
    }
    if s.seed is not None:
        params["sampling_seed"] = s.seed
    if s.response_format is not None:
        params |= grammar(s.response_format)
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt_token_ids.tolist(),
        "sampling_params": params,
        "stream": True,
        "return_logprob": asked_for(request, facts).logprobs == "output_token_logprobs",
        "logprob_start_len": -1,
        "top_logprobs_num": s.top_logprobs,
        "return_text_in_logprobs": False,
    }
    if filtered:
        body["return_sampling_mask"] = True
    if cache_salt:
        body["cache_salt"] = cache_salt
    if adapter:
        body["lora_path"] = adapter
    return body


def score_body(token_ids: list[int], *, rid: str, top_logprobs: int, cache_salt: str, adapter: str) -> dict[str, Any]:
    """The body of `/generate` that samples nothing and returns the prompt's logprobs. See `generate_body`."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": token_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_logprobs,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    if adapter:
        body["lora_path"] = adapter
    return body


def grammar(form: ResponseFormat) -> dict[str, str]:
    """The sampling parameter for a required form."""
    match form.kind:
        case FormatKind.JSON_OBJECT:
            return {"json_schema": '{"type": "object"}'}
        case FormatKind.JSON_SCHEMA:
            return {"json_schema": form.text}
        case FormatKind.REGEX:
            return {"regex": form.text}
        case FormatKind.CHOICE:
            return {"ebnf": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choices)}
        case FormatKind.GRAMMAR:
            return {"ebnf": form.text}
