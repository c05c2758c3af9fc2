"""Probes an SGLang server: its model and version, its context, what its logprobs are of, and what it was started with.

Its logprobs are measured: those of the sampled distribution change with the temperature, the model's own do not
(`SGLANG_RETURN_ORIGINAL_LOGPROB`). What sampling filters leave has logprobs of its own, which are asked for.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Violation
from penstock_inference.domain.generation import LogprobsMode
from penstock_inference.engines.openai.answers import broken
from penstock_inference.engines.openai.probe import TEXT, Level, in_time
from penstock_inference.engines.openai.wire import STATUS, Endpoint
from penstock_inference.engines.sglang.answers import Asked, meta_info, read_chunk

MASK_TOKENS = 4096
"""The server's default of --sampling-mask-max-tokens."""
_ALTERNATIVES = 5
_PROMPTS = 4
"""Number of prompts tried before the distribution counts as unknown."""
_SAME, _DIFFERENT = 0.05, 0.2
"""Natural logarithms: batches differ by less than the first, distinguishable distributions by more than the second."""
_NOT_THERE = frozenset({"400", "404", "405", "422", "501"})


@dataclass(frozen=True, slots=True)
class Facts:
    server: str
    """SGLang and its version, as far as it reports it."""
    logprobs_mode: LogprobsMode
    max_context_tokens: int | None
    version_spans: bool
    """It reports which weights sampled which tokens."""
    filtered_tokens: int
    """Most tokens that a filter may leave where logprobs of what is left are wanted; 0: it gives none."""
    seed: bool
    text: bool
    """It has the tokenizer, which stop texts and a least number of tokens need."""
    grammar: bool
    adapters: bool
    max_adapter_rank: int
    """0: unknown."""
    shortfall: str = ""
    """Why there are no logprobs."""
    level: Level = Level.TOKENS


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights the server serves."""

    model_path: str
    """Where it found them."""
    weight_version: str
    """Its name of them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known before the probe."""

    vocab_size: int
    tokenizer: Tokenizer | None
    stated_mode: LogprobsMode | None


async def identify(endpoint: Endpoint) -> Identity:
    """Ask the server which weights it serves; it samples nothing. Raises the errors of `probe`."""
    model = await _first_of(endpoint, "/model_info", "/get_model_info")
    path, named = model.get("model_path"), model.get("weight_version")
    if not isinstance(path, str) or not path or model.get("is_generation") is False:
        raise endpoint.invalid("it has no /model_info of a model that generates")
    return Identity(path, named if isinstance(named, str) else "")


async def probe(endpoint: Endpoint, wanted: Wanted) -> Facts:
    """Probe the server. Raises Unavailable while it is unreachable, FailedPrecondition or InvalidArgument for what only
    a person can fix.
    """
    return await in_time(_Probe(endpoint, wanted).run())


class _Probe:
    def __init__(self, endpoint: Endpoint, wanted: Wanted) -> None:
        self._endpoint = endpoint
        self._wanted = wanted

    async def run(self) -> Facts:
        server = await _first_of(self._endpoint, "/server_info", "/get_server_info")
        meta = await self._meta(self._prompt(0))
        if meta is None:
            raise self._endpoint.invalid("its /generate takes no input_ids")
        has_text = server.get("skip_tokenizer_init") is not True
        if has_text:
            await self._same_tokenizer()
        mode, why = await self._mode()
        version, rank = server.get("version"), server.get("max_lora_rank")
        return Facts(
            server=f"SGLang {version}" if isinstance(version, str) else "SGLang",
            logprobs_mode=mode,
            max_context_tokens=await self._context(server),
            version_spans=isinstance(meta.get("weight_versions"), list),
            filtered_tokens=await self._filtered(server) if mode is LogprobsMode.PROCESSED else 0,
            seed=server.get("enable_deterministic_inference") is True,
            text=has_text,
            grammar=has_text and server.get("grammar_backend", "none") not in (None, "none"),
            adapters=server.get("enable_lora") is True,
            max_adapter_rank=rank if type(rank) is int and rank > 0 else 0,
            shortfall=why,
        )

    def _prompt(self, start: int) -> list[int]:
        return [(start + n) % self._wanted.vocab_size for n in (1, 2, 3)]

    async def _mode(self) -> tuple[LogprobsMode, str]:
        """What its logprobs are of, and why there are none."""
        stated = self._wanted.stated_mode
        if stated is LogprobsMode.NONE:
            return stated, "the option logprobs is none"
        measured = None
        for start in range(0, _PROMPTS * 3, 3):
            plain, warm = [await self._table(self._prompt(start), heat) for heat in (1.0, 2.0)]
            if not plain or not warm:
                return LogprobsMode.NONE, "it gives no logprobs"
            measured = mode_of(plain, warm)
            if measured is not None:
                break
        if stated is not None and measured not in (None, stated):
            raise InvalidArgument(
                f"the option logprobs is {stated.value}, but other ones were measured",
                reason="ENGINE_OPTIONS_INVALID",
                violations=[Violation("engine_options.logprobs", "is not what was measured; auto measures it")],
            )
        mode = stated if measured is None else measured
        if mode is None:
            return LogprobsMode.NONE, "the distribution of its logprobs is unknown: set the option logprobs"
        return mode, ""

    async def _table(self, prompt: list[int], temperature: float) -> dict[int, float]:
        """Logprobs of the likeliest first tokens; empty if it gives none."""
        asked = Asked(len(prompt), "output_token_logprobs", _ALTERNATIVES, frozenset(), "sampling")
        more = {"return_logprob": True, "top_logprobs_num": _ALTERNATIVES}
        answer = await self._ask(prompt, {"temperature": temperature}, **more)
        if answer is None or "output_token_logprobs" not in meta_info(answer):
            return {}
        read = read_chunk(answer, [], self._wanted.vocab_size, asked).read
        return dict(zip(*read.top[0], strict=True)) if read.top else {}

    async def _filtered(self, server: Mapping[str, Any]) -> int:
        """Of how many tokens that filters leave it gives logprobs; 0: of none."""
        sampling = {"temperature": 1.0, "top_k": 2}
        meta = await self._meta(self._prompt(0), sampling, return_sampling_mask=True)
        values = None if meta is None else meta.get("output_token_sampling_logprobs")
        if not isinstance(values, list) or len(values) != 1 or type(values[0]) not in (int, float):
            return 0
        most = server.get("sampling_mask_max_tokens", MASK_TOKENS)
        return most if type(most) is int and most > 0 else 0

    async def _context(self, server: Mapping[str, Any]) -> int | None:
        length = server.get("context_length")
        try:
            length = (await self._endpoint.get("/v1/models"))["data"][0]["max_model_len"]
        except PenstockError as error:
            if error.metadata.get(STATUS) not in _NOT_THERE:
                raise
        except (KeyError, IndexError, TypeError):
            pass
        return length if type(length) is int and length > 1 else None

    async def _same_tokenizer(self) -> None:
        """Check that a text has the same ids here and there; otherwise every prompt would be garbage."""
        tokenizer = self._wanted.tokenizer
        if tokenizer is None:
            return
        answer = await self._post({"text": TEXT, "return_prompt_token_ids": True}, {})
        there = None if answer is None else answer.get("prompt_token_ids")
        bare = tokenizer.encode(TEXT, add_special_tokens=False).ids
        # The server may put a token in front that begins every text.
        if isinstance(there, list) and there[-len(bare) :] != bare:
            raise FailedPrecondition(
                "The upstream's tokenizer is not that of model_dir: the same text has other token ids there. Set "
                "model_dir to the files of the model that the upstream serves.",
                reason="UPSTREAM_TOKENIZER_DIFFERS",
            )

    async def _meta(
        self, prompt: list[int], sampling: Mapping[str, Any] | None = None, **more: Any
    ) -> Mapping[str, Any] | None:
        answer = await self._ask(prompt, sampling or {}, **more)
        return None if answer is None else meta_info(answer)

    async def _ask(self, prompt: list[int], sampling: Mapping[str, Any], **more: Any) -> dict[str, Any] | None:
        """Generate one token; None if the server does not support the request."""
        return await self._post({"input_ids": prompt} | more, sampling)

    async def _post(self, body: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any] | None:
        params = {"max_new_tokens": 1, "ignore_eos": True} | dict(sampling)
        try:
            answer = await self._endpoint.post(
                "/generate", {"rid": uuid.uuid4().hex, **body, "sampling_params": params}
            )
        except PenstockError as error:
            if error.metadata.get(STATUS) in _NOT_THERE:
                return None
            raise
        if not isinstance(answer, dict):
            raise broken("an answer that is no object")
        return answer


async def _first_of(endpoint: Endpoint, *paths: str) -> Mapping[str, Any]:
    """The object at the first path that there is; empty without one."""
    for path in paths:
        try:
            answer = await endpoint.get(path)
        except PenstockError as error:
            if error.metadata.get(STATUS) not in _NOT_THERE:
                raise
        else:
            return answer if isinstance(answer, dict) else {}
    return {}


def mode_of(plain: Mapping[int, float], warm: Mapping[int, float]) -> LogprobsMode | None:
    """The distribution, from the likeliest tokens' logprobs at temperatures 1 and 2; None if ambiguous."""
    common = plain.keys() & warm.keys()
    if len(common) < 2 or max(plain.values()) - min(plain.values()) < _DIFFERENT:
        return None
    moved = max(abs(plain[token] - warm[token]) for token in common)
    if moved > _DIFFERENT:
        return LogprobsMode.PROCESSED
    return LogprobsMode.RAW if moved < _SAME else None
