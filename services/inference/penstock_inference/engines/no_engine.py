"""No engine: a tokenizer and a chat template for trainers that answer every call with their own engine.

The service serves the tokenizer's files, renders and parses; it generates nothing. The model directory needs no
weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition, Unsupported, Violation
from penstock_codec.codec import Codec
from penstock_codec.errors import CodecError
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import IMAGE, GenerateEvent, GenerateRequest, LogprobsMode, Scores, TokenIds
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checks import raise_violations

NAME = "none"


class NoEngine:
    """Generates nothing. See `base.Engine` for the contract of each method."""

    def __init__(self, codec: Codec, options: EngineOptions, max_context_tokens: int) -> None:
        self._codec = codec
        self._model = options.model_name
        self._max_context = max_context_tokens

    @classmethod
    async def open(cls, options: EngineOptions) -> NoEngine:
        """Read the tokenizer of the model directory, and its context length if config.json has one."""
        raise_violations([Violation(f"engine_options.{name}", "not an option of none") for name in options.extra])

        def build() -> NoEngine:
            try:
                codec = Codec.load(TokenizerFiles.from_directory(options.model_dir))
            except CodecError as error:
                raise FailedPrecondition(str(error), reason=error.reason) from error
            return cls(codec, options, options.max_context_tokens or _context_of(options.model_dir))

        return await asyncio.to_thread(build)

    def info(self) -> EngineInfo:
        """The engine's properties; it has no capability, but the trainer that answers takes images."""
        return EngineInfo(
            engine=NAME,
            engine_version="1",
            model=self._model,
            vocab_size=self._codec.vocab_size,
            max_context_tokens=self._max_context,
            max_concurrency=0,
            stop_token_ids=self._codec.stop_token_ids,
            sampling_fields=(),
            dtype="none",
            parameter_count=0,
            logprobs_mode=LogprobsMode.NONE,
            capabilities=Capabilities(
                logprobs=False, abort=False, modalities=(IMAGE,) if self._codec.images is not None else ()
            ),
            policy_version=0,
            policy_label="",
            paused=False,
        )

    def stats(self) -> EngineStats:
        """All zero."""
        return EngineStats()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Raises FailedPrecondition (ENGINE_NONE)."""
        raise FailedPrecondition(
            "This inference service has no engine (engine = none): let the trainer answer the call, or start the"
            " service with an engine.",
            reason="ENGINE_NONE",
        )

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Raises Unsupported."""
        raise _missing("score")

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """Does nothing: no request is in flight."""
        return 0

    async def pause(self, mode: PauseMode) -> None:
        """Does nothing: no request runs."""

    async def resume(self) -> None:
        """Does nothing: no request is paused."""

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """Raises Unsupported."""
        raise _missing("weight_update")

    async def push_tensors(self, tensors: Tensors) -> None:
        """Raises Unsupported."""
        raise _missing("weight_update")

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Raises Unsupported."""
        raise _missing("weight_update")

    async def abort_update(self) -> None:
        """Does nothing: no update is open."""

    async def aclose(self) -> None:
        """Holds nothing."""


async def open_engine(options: EngineOptions) -> NoEngine:
    """The entry point `none` of the group `penstock.inference.engines`."""
    return await NoEngine.open(options)


def _missing(what: str) -> Unsupported:
    return Unsupported(f"there is no engine, so there is no {what}", reason="CAPABILITY_MISSING")


def _context_of(model_dir: Path) -> int:
    """`max_position_embeddings` of config.json; 0 if unknown, then the trainer's engine decides."""
    try:
        config = json.loads((model_dir / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise FailedPrecondition(
            f"config.json of the model directory cannot be read: {error}", reason="MODEL_UNREADABLE"
        ) from error
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
