"""Probes an endpoint: its model, token ids, the distribution of its logprobs, scores.

Everything testable is tested, one generated token at a time, from a prompt of a few tokens. The logprobs mode is
measured. Logprobs of the sampled distribution change with the temperature and become 0 where top-k leaves one token;
those of the model's own distribution do neither. Anything between is ambiguous and not passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from tokenizers import Tokenizer

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Unavailable, Violation
from penstock_inference.domain.generation import LogprobsMode
from penstock_inference.engines.openai.answers import read_choice
from penstock_inference.engines.openai.wire import RETRY_S, STATUS, Endpoint

F = TypeVar("F")

PROBE_S = 120.0
TEXT = "def total(items):\n    return sum(item.price for item in items)  # naïve"
_ALTERNATIVES = 5
_PROMPTS = 4
"""Number of prompts tried before the logprobs mode counts as ambiguous."""
_SAME, _DIFFERENT = 0.05, 0.2
"""Natural logarithms: batches differ by less than the first, distinguishable distributions by more than the second."""
_NOT_THERE = frozenset({"400", "404", "405", "422", "501"})


class Level(Enum):
    """Which data of a completion the endpoint returns."""

    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Facts:
    model: str
    """The model's name there."""
    server: str
    """The server and its version, as far as it reports them."""
    level: Level
    logprobs_mode: LogprobsMode
    max_context_tokens: int | None
    score: bool = False
    ids_by_name: bool = False
    """Token ids come only as names in the logprobs table, which must then be requested."""
    stream_interval: bool = False
    """A stream can send several tokens per event on request."""
    shortfall: str = ""
    """Why there are no token ids, or no logprobs."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known before the probe."""

    model: str
    """Its name there; empty searches for it."""
    shown: str
    """Its name here."""
    vocab_size: int | None
    tokenizer: Tokenizer | None
    stated_mode: LogprobsMode | None


async def probe(endpoint: Endpoint, wanted: Wanted) -> Facts:
    """Probe the endpoint. Raises Unavailable while it is unreachable, FailedPrecondition for errors that only a person
    can fix.
    """
    return await in_time(_Probe(endpoint, wanted).run())


async def in_time(probing: Awaitable[F]) -> F:
    """Returns what a probe found. Raises Unavailable (UPSTREAM_SILENT) after `PROBE_S` seconds."""
    try:
        async with asyncio.timeout(PROBE_S):
            return await probing
    except TimeoutError as error:
        raise Unavailable(
            f"The upstream did not answer a request for one token in {PROBE_S:.0f} s.",
            reason="UPSTREAM_SILENT",
            retry_after_s=RETRY_S,
        ) from error


class _Probe:
    def __init__(self, endpoint: Endpoint, wanted: Wanted) -> None:
        self._endpoint = endpoint
        self._wanted = wanted
        self._model = ""

    async def run(self) -> Facts:
        listing = await self._try_get("/models")
        card = self._card(listing)
        self._model = str(card.get("id") or self._wanted.model or self._wanted.shown)
        server = await self._server(card)
        context = card.get("max_model_len")
        context = context if isinstance(context, int) and context > 1 else None
        text = Facts(self._model, server, Level.TEXT, LogprobsMode.NONE, context)
        vocab = self._wanted.vocab_size
        if vocab is None:
            return self._text(text, listing, "model_dir has no tokenizer.json and no config.json, which token ids need")
        prompt = [n % vocab for n in (1, 2, 3)]
        choice = await self._ask(prompt, logprobs=0) or await self._ask(prompt)
        if choice is None:
            return self._text(text, listing, "it has no /completions for prompts of token ids")
        if not read_choice(choice, vocab).token_ids:
            return self._text(text, listing, "its /completions returns no token ids (return_token_ids)")
        if choice.get("prompt_token_ids") not in (None, prompt):
            raise FailedPrecondition(
                "The upstream changes prompts of token ids: it reports other tokens than were sent.",
                reason="UPSTREAM_PROMPT_CHANGED",
            )
        await self._same_tokenizer()
        mode, why = await self._mode(prompt, vocab)
        return Facts(
            self._model,
            server,
            Level.TOKENS,
            mode,
            context,
            score=await self._scores(prompt),
            ids_by_name=choice.get("token_ids") is None,
            stream_interval=await self._ask(prompt, stream_interval=8) is not None,
            shortfall=why,
        )

    def _text(self, facts: Facts, listing: Any, why: str) -> Facts:
        if listing is None:
            raise self._endpoint.invalid("it has neither /models nor /completions for token ids")
        return Facts(facts.model, facts.server, Level.TEXT, LogprobsMode.NONE, facts.max_context_tokens, shortfall=why)

    def _card(self, listing: Any) -> Mapping[str, Any]:
        """The model's entry in the model list; empty if the endpoint has no list."""
        if listing is None:
            return {}
        data = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            raise self._endpoint.invalid("/models is not a list of models")
        cards: dict[str, Mapping[str, Any]] = {str(item.get("id")): item for item in data}
        names = [name for name in (self._wanted.model or self._wanted.shown,) if name in cards]
        if not names and not self._wanted.model and len(cards) == 1:
            names = list(cards)
        if not names:
            asked = self._wanted.model or self._wanted.shown
            shown = ", ".join(sorted(cards)[:8]) or "none"
            raise FailedPrecondition(
                f"The upstream has no model {asked!r}; its models: {shown}. Set the option model to one of them.",
                reason="UPSTREAM_MODEL_UNKNOWN",
            )
        return cards[names[0]]

    async def _server(self, card: Mapping[str, Any]) -> str:
        """vLLM and some others report their version at a separate URL."""
        owner = card.get("owned_by")
        name = owner if isinstance(owner, str) else ""
        try:
            answer = await self._endpoint.get("/version", root=True)
        except PenstockError:
            return name
        version = answer.get("version") if isinstance(answer, dict) else None
        return f"{name} {version}".strip() if isinstance(version, str) else name

    async def _same_tokenizer(self) -> None:
        """Check that a text has the same ids here and there; otherwise every prompt would be garbage."""
        tokenizer = self._wanted.tokenizer
        if tokenizer is None:
            return
        choice = await self._ask(TEXT, add_special_tokens=False)
        there = None if choice is None else choice.get("prompt_token_ids")
        if isinstance(there, list) and there != tokenizer.encode(TEXT, add_special_tokens=False).ids:
            raise FailedPrecondition(
                "The upstream's tokenizer is not that of model_dir: the same text has other token ids there. Set "
                "model_dir to the files of the model that the upstream serves.",
                reason="UPSTREAM_TOKENIZER_DIFFERS",
            )

    async def _mode(self, prompt: list[int], vocab: int) -> tuple[LogprobsMode, str]:
        """The logprobs mode, and why there are no logprobs."""
        stated = self._wanted.stated_mode
        if stated is LogprobsMode.NONE:
            return stated, "the option logprobs is none"
        measured = None
        for start in range(0, _PROMPTS * len(prompt), len(prompt)):
            if measured is not None:
                break
            ids = [(token + start) % vocab for token in prompt]
            tables = [await self._table(ids, vocab, **asked) for asked in ({}, {"temperature": 2.0}, {"top_k": 1})]
            known = [table for table in tables if table is not None]
            if len(known) < len(tables):
                return LogprobsMode.NONE, "it gives no logprobs"
            measured = mode_of(*known)
        if stated is not None:
            if measured not in (None, stated):
                raise InvalidArgument(
                    f"the option logprobs is {stated.value}, but the upstream's are {measured.value}",
                    reason="ENGINE_OPTIONS_INVALID",
                    violations=[Violation("engine_options.logprobs", f"they are {measured.value}; auto measures it")],
                )
            return stated, ""
        if measured is None:
            return LogprobsMode.NONE, "the distribution of its logprobs is unknown: set the option logprobs"
        return measured, ""

    async def _table(self, prompt: list[int], vocab: int, **asked: Any) -> dict[int, float] | None:
        """Logprobs of the most likely first tokens, including the sampled one."""
        choice = await self._ask(prompt, logprobs=_ALTERNATIVES, **asked)
        read = None if choice is None else read_choice(choice, vocab)
        if read is None or not read.logprobs:
            return None
        table = dict(zip(*read.top[0], strict=True)) if read.top else {}
        return table | {read.token_ids[0]: read.logprobs[0]}

    async def _scores(self, prompt: list[int]) -> bool:
        choice = await self._ask(prompt, prompt_logprobs=0)
        scores = None if choice is None else choice.get("prompt_logprobs")
        return isinstance(scores, list) and len(scores) == len(prompt)

    async def _ask(self, prompt: list[int] | str, **more: Any) -> dict[str, Any] | None:
        """Generate one token; None if the endpoint does not support the request."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True} | more
        try:
            answer = await self._endpoint.post("/completions", body)
        except PenstockError as error:
            if error.metadata.get(STATUS) in _NOT_THERE:
                return None
            raise
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise self._endpoint.invalid("a completion without choices") from None
        if not isinstance(choice, dict):
            raise self._endpoint.invalid("a choice that is not an object")
        return choice

    async def _try_get(self, path: str) -> Any:
        try:
            return await self._endpoint.get(path)
        except PenstockError as error:
            if error.metadata.get(STATUS) in _NOT_THERE:
                return None
            raise


def mode_of(plain: dict[int, float], warm: dict[int, float], narrow: dict[int, float]) -> LogprobsMode | None:
    """The logprobs mode, from three tables of the most likely first tokens; None if ambiguous.

    The tables map token ids to logprobs at temperature 1, at temperature 2, and with top-k 1, where the sampled token
    is the most likely one.
    """
    best = max(plain, key=lambda token: plain[token])
    common = plain.keys() & warm.keys()
    spread = max(plain.values()) - min(plain.values())
    if not common or best not in narrow or len(plain) < 2:
        return None
    moved = max(abs(plain[token] - warm[token]) for token in common)
    certain = plain[best] > -_DIFFERENT
    filtered, unfiltered = narrow[best] > -_SAME, abs(narrow[best] - plain[best]) < _SAME
    if moved > _DIFFERENT and filtered and not certain:
        return LogprobsMode.PROCESSED
    if moved < _SAME and spread > _DIFFERENT and unfiltered and not certain:
        return LogprobsMode.RAW
    return None
