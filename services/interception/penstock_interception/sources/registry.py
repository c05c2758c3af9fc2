"""The available model sources: those the operator configured, and a caller's own endpoint if that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.validation import invalid_field
from penstock_codec import Codec, CodecError
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_interception.domain.calls import (
    Answerer,
    CallerUpstream,
    CodecChoice,
    Dialect,
    InferenceRef,
    Mode,
    ModelFacts,
    NamedUpstream,
    Source,
    TokenizerRef,
)
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call
from penstock_interception.sources.base import ModelSource, Resolved, SourceError
from penstock_interception.sources.codecs import CodecCache
from penstock_interception.sources.upstream import UpstreamSource

FRESH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An upstream that the operator configured."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    models: tuple[str, ...] = ("*",)
    session_header: str = ""


class Sources:
    """Finds the source of a rollout."""

    def __init__(
        self,
        codecs: CodecCache,
        http: aiohttp.ClientSession,
        parse: Callable[[Dialect, bytes], ChatRequest],
        *,
        inference: Mapping[str, Callable[[str, CodecChoice], ModelSource]],
        upstreams: Mapping[str, Endpoint],
        tokenizers: Mapping[str, Path],
        caller_endpoints: bool,
    ) -> None:
        """`parse` parses a call's body again.

        `inference` makes the source of a configured service, given an adapter ("" = the base weights) and a codec
        choice.
        """
        self._codecs = codecs
        self._http = http
        self._parse = parse
        self._inference = inference
        self._upstreams = upstreams
        self._tokenizers = tokenizers
        self._caller_endpoints = caller_endpoints
        self._resolved: SingleFlight[tuple[Source, str | None, str, str], Resolved] = SingleFlight(fresh_s=FRESH_S)

    def source(self, mode: Mode, ref: Source, caller_key: str | None) -> ModelSource:
        """Returns the source that a rollout in this mode names.

        Raises FailedPrecondition: INFERENCE_UNKNOWN, UPSTREAM_UNKNOWN, UPSTREAM_NOT_ALLOWED, TOKENIZER_UNKNOWN,
        MODEL_NOT_ALLOWED, SOURCE_UNSUITABLE; InvalidArgument for an invalid address.
        """
        match ref:
            case InferenceRef(name, adapter, codec=choice):
                if mode is Mode.BLACK_BOX:
                    raise FailedPrecondition("Black box mode needs an upstream.", reason="SOURCE_UNSUITABLE")
                make = self._inference.get(name or "default")
                if make is None:
                    raise FailedPrecondition(
                        "There is no inference service with this name.", reason="INFERENCE_UNKNOWN"
                    )
                return make(adapter, choice)
            case TokenizerRef(name, codec=choice):
                if mode is not Mode.INTERCEPTION_GATE:
                    raise FailedPrecondition("A tokenizer cannot answer calls.", reason="SOURCE_UNSUITABLE")
                path = self._tokenizers.get(name)
                if path is None:
                    raise FailedPrecondition("There is no tokenizer with this name.", reason="TOKENIZER_UNKNOWN")
                return _TokenizerSource(path, self._codecs, choice)
            case NamedUpstream(name, model):
                endpoint = self._upstreams.get(name)
                if endpoint is None:
                    raise FailedPrecondition("There is no upstream with this name.", reason="UPSTREAM_UNKNOWN")
                source = UpstreamSource(
                    self._http,
                    self._parse,
                    endpoint.base_url,
                    endpoint.api_key,
                    model,
                    shown=name,
                    models=endpoint.models,
                    session_header=endpoint.session_header,
                )
                if model and not source.allows(model):
                    raise FailedPrecondition(
                        f"The operator does not allow this model of the upstream {name}: choose one that matches"
                        f" {', '.join(endpoint.models)}.",
                        reason="MODEL_NOT_ALLOWED",
                    )
                return source
            case CallerUpstream(base_url, model):
                if not self._caller_endpoints:
                    raise FailedPrecondition(
                        "The operator allows configured upstreams only: name one of them.",
                        reason="UPSTREAM_NOT_ALLOWED",
                    )
                check_url(base_url)
                return UpstreamSource(self._http, self._parse, base_url, caller_key or None, model, shown=base_url)

    async def resolve(
        self, mode: Mode, ref: Source, caller_key: str | None, asked_model: str, namespace: str
    ) -> Resolved:
        """Checks that the source answers, and returns its properties; a namespace shares a result for up to 2 s.

        Raises what `source` raises, and PenstockError.
        """
        source = self.source(mode, ref, caller_key)
        try:
            found = await self._resolved.get(
                (ref, caller_key, asked_model, namespace), lambda: source.resolve(asked_model)
            )
        except CodecError as error:
            raise FailedPrecondition(
                f"The model's tokenizer cannot be used: {error}", reason="TEMPLATE_UNSUPPORTED"
            ) from error
        if mode is not Mode.INTERCEPTION_GATE and not found.answers:
            raise FailedPrecondition(
                "The inference service has no engine (engine = none): use mode MODE_INTERCEPTION_GATE, in which the "
                "trainer answers.",
                reason="SOURCE_UNSUITABLE",
            )
        return found

    async def codec(self, facts: ModelFacts) -> Codec | None:
        """Returns the codec of a rollout that is restored after a restart."""
        return await self._codecs.of(facts)


class _TokenizerSource(ModelSource):
    """A tokenizer directory: makes prompts, but answers no calls."""

    answerer = Answerer.TRAINER

    def __init__(self, path: Path, codecs: CodecCache, choice: CodecChoice) -> None:
        self._path = path
        self._codecs = codecs
        self._choice = choice

    async def complete(self, call: Call) -> Completion:
        raise SourceError("NOBODY_TO_DELEGATE_TO", retriable=False)

    async def answers_others(self, call: Call) -> bool:
        return False

    async def resolve(self, asked_model: str) -> Resolved:
        files = TokenizerFiles.from_directory(self._path)
        codec = await self._codecs.from_files(files, self._choice)
        facts = ModelFacts(
            asked_model,
            files.tokenizer_sha256,
            files.template_sha256,
            self._choice.parser,
            self._choice.control_tokens,
            codec.vocab_size,
            processor_sha256=files.processor_sha256,
            images=codec.images is not None,
        )
        return Resolved(facts, codec)


def check_url(base_url: str) -> None:
    """Raises InvalidArgument unless it is a plain http(s) URL; a key inside the URL would be stored and logged."""
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good, parts = False, None
    if not good or parts is None or parts.username is not None or parts.query or parts.fragment:
        raise invalid_field(
            "source.upstream.caller.base_url", "must be http(s)://host[:port]/path without credentials or query"
        )
