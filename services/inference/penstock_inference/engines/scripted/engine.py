"""An engine that replays a script, for tests and for checking that a real agent starts, talks and stops.

It samples nothing. Its logprobs are the script's own and declared as such (`LogprobsMode.SCRIPTED`), so that they are
not used for training by mistake. It is a strict fake: a call without a matching entry is refused, and entries left over
are an error when the engine closes.

`script` describes the format; the option `script` names the file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    Unsupported,
    Violation,
)
from penstock_codec.codec import Codec
from penstock_codec.errors import CodecError
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats
from penstock_inference.domain.generation import (
    IMAGE,
    SAMPLING_FIELDS,
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    LogprobsMode,
    Scores,
    Started,
    Timings,
    TokenIds,
    VersionSpan,
)
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checks import (
    check_prompt,
    check_sampling,
    check_update,
    closed,
    open_update,
    raise_violations,
)
from penstock_inference.engines.scripted.script import Script, Turn, read_script

MAX_CONTEXT_TOKENS = 1 << 20

_CAPABILITIES = Capabilities(
    version_spans=True, in_flight_update=True, weight_update=True, seed=True, batch_invariant=True
)
_DELTA_TOKENS = 8


@dataclass(slots=True, eq=False)
class _Flight:
    request: GenerateRequest
    aborted: bool = False


class ScriptedEngine:
    """Replays a script. See `base.Engine` for the contract of each method."""

    def __init__(self, script: Script, codec: Codec, options: EngineOptions) -> None:
        self._script = script
        self._codec = codec
        self._model = options.model_name
        self._max_context = options.max_context_tokens or MAX_CONTEXT_TOKENS
        self._replies = [self._encode(turn, f"turns.{n}.reply") for n, turn in enumerate(script.turns)]
        self._used: dict[str, set[int]] = {}
        self._flights: dict[str, _Flight] = {}
        self._paused = False
        self._changed = asyncio.Condition()
        """Notified of every change that a held request may wait for."""
        self._version, self._label = 0, ""
        self._update: tuple[int, str] | None = None
        self._stats = EngineStats(slots=options.max_concurrency)
        self._closed = False

    @classmethod
    async def open(cls, options: EngineOptions) -> ScriptedEngine:
        """Read the script named by the option `script`, and the tokenizer of the model directory."""
        unknown = options.extra.keys() - {"script"}
        raise_violations([Violation(f"engine_options.{name}", "not an option of scripted") for name in sorted(unknown)])
        if "script" not in options.extra:
            raise InvalidArgument(
                "the scripted engine needs the option script: the path of a YAML file",
                reason="SCRIPT_INVALID",
                violations=[Violation("engine_options.script", "is not set")],
            )
        path = Path(options.extra["script"])

        def build() -> ScriptedEngine:
            text = read_script(path)
            try:
                codec = Codec.load(TokenizerFiles.from_directory(options.model_dir))
            except CodecError as error:
                raise FailedPrecondition(str(error), reason=error.reason) from error
            return cls(Script.parse(text), codec, options)

        return await asyncio.to_thread(build)

    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="scripted",
            engine_version="1",
            model=self._model,
            vocab_size=self._codec.vocab_size,
            max_context_tokens=self._max_context,
            max_concurrency=self._stats.slots,
            stop_token_ids=self._codec.stop_token_ids,
            # The script is the answer for any sampling: only max_tokens has a visible effect. It has no alternatives.
            sampling_fields=tuple(name for name in SAMPLING_FIELDS if name not in ("stop", "top_logprobs")),
            dtype="none",
            parameter_count=0,
            logprobs_mode=LogprobsMode.SCRIPTED,
            capabilities=replace(_CAPABILITIES, modalities=(IMAGE,) if self._codec.images is not None else ()),
            policy_version=self._version,
            policy_label=self._label,
            paused=self._paused,
        )

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            waiting=len(self._flights),
            policy_version=self._version,
            paused=self._paused,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        if self._closed:
            raise closed()
        violations = check_sampling(request.sampling, self._codec.vocab_size)
        if request.sampling.stop:
            violations.append(Violation("sampling.stop", "is not supported by a script"))
        violations += check_prompt(
            request.prompt_token_ids, request.sampling.max_tokens, self._codec.vocab_size, self._max_context
        )
        raise_violations(violations)
        if request.request_id in self._flights:
            raise AlreadyExists(f"request {request.request_id} is in flight", reason="REQUEST_IN_FLIGHT")
        flight = self._flights[request.request_id] = _Flight(request)
        began = time.monotonic()
        try:
            await self._wait_for_turn(flight)
            ids, logprob, reason = ((), 0.0, _ABORT) if flight.aborted else self._answer(request)
        finally:
            del self._flights[request.request_id]
        queued = time.monotonic() - began
        tokens = np.array(ids, np.int32)
        logprobs = np.full(tokens.size, logprob, np.float32)
        self._stats = replace(
            self._stats,
            prompt_tokens=self._stats.prompt_tokens + request.prompt_token_ids.size,
            sampled_tokens=self._stats.sampled_tokens + tokens.size,
            aborted=self._stats.aborted + (reason is _ABORT),
            finished=self._stats.finished + (reason is not _ABORT),
        )
        version = self._version
        if request.stream and reason is not _ABORT:
            yield Started(version, 0)
            for start in range(0, tokens.size, _DELTA_TOKENS):
                piece = slice(start, start + _DELTA_TOKENS)
                yield Delta(tokens[piece], logprobs[piece], version)
        stopped = reason is FinishReason.STOP and tokens.size > 0 and int(tokens[-1]) in self._codec.stop_token_ids
        yield Done(
            finish_reason=reason,
            token_ids=tokens,
            logprobs=logprobs,
            version_spans=(VersionSpan(version, 0, tokens.size),) if tokens.size else (),
            stop_token_id=int(tokens[-1]) if stopped else None,
            prompt_tokens=request.prompt_token_ids.size,
            cached_tokens=0,
            timings=Timings(queued, 0.0, 0.0),
            seed=request.sampling.seed or 0,
        )

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Raises Unsupported: a script has no distribution."""
        raise Unsupported("the scripted engine cannot score", reason="CAPABILITY_MISSING")

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """Abort generations that a pause holds; others end at once by themselves."""
        chosen = [
            flight
            for flight in self._flights.values()
            if not flight.aborted
            and (
                everything
                or flight.request.request_id in request_ids
                or (session_id and flight.request.session_id == session_id)
            )
        ]
        for flight in chosen:
            flight.aborted = True
        await self._notify()
        return len(chosen)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests; nothing runs longer than a moment."""
        self._paused = True
        if mode is PauseMode.ABORT:
            await self.abort(everything=True)

    async def resume(self) -> None:
        """Answer the held requests."""
        self._paused = False
        await self._notify()

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """Open an update. A script has no weights: only the version changes."""
        check_update(version, self._version, another_open=self._update is not None)
        self._update = (version, label)

    async def push_tensors(self, tensors: Tensors) -> None:
        """Accept and discard any tensors."""
        open_update(self._update)

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Put the version in force."""
        (self._version, self._label), self._update = open_update(self._update), None
        await self._notify()
        return UpdatePhases(0.0, 0.0)

    async def abort_update(self) -> None:
        self._update = None

    async def aclose(self) -> None:
        """End held requests. Raises FailedPrecondition (SCRIPT_UNCONSUMED), once, for entries that were never used."""
        if self._closed:
            return
        self._closed = True
        await self.abort(everything=True)
        needed = {n for n, turn in enumerate(self._script.turns) if not turn.repeat}
        left = {session: sorted(needed - used) for session, used in (self._used or {"": set()}).items()}
        left = {session: turns for session, turns in left.items() if turns}
        if self._script.strict and left:
            session, turns = next(iter(left.items()))
            raise FailedPrecondition(
                f"the script was not played to its end: session {session!r} never requested turns {turns}"
                + (f", and {len(left) - 1} more sessions" if len(left) > 1 else ""),
                reason="SCRIPT_UNCONSUMED",
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_turn(self, flight: _Flight) -> None:
        """Wait until not paused and the version is new enough, or until aborted."""
        least, exact = flight.request.min_policy_version, flight.request.exact_policy_version
        async with self._changed:
            await self._changed.wait_for(
                lambda: flight.aborted or (not self._paused and (least is None or least <= self._version))
            )
        if not flight.aborted and exact not in (None, self._version):
            raise FailedPrecondition(
                f"policy version {exact} was requested, but {self._version} is in force",
                reason="POLICY_VERSION_UNAVAILABLE",
                metadata={"policy_version": str(self._version)},
            )

    def _answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], float, FinishReason]:
        """The entry for this call, which is thereby used up."""
        prompt = self._codec.decode(request.prompt_token_ids)
        used = self._used.setdefault(request.session_id, set())
        for n, turn in enumerate(self._script.turns):
            if (n not in used or turn.repeat) and turn.when.holds(prompt):
                used.add(n)
                ids, limit = self._replies[n], request.sampling.max_tokens
                cut = len(ids) > limit or turn.finish == "length"
                logprob = self._script.logprob if turn.logprob is None else turn.logprob
                return ids[:limit], logprob, FinishReason.LENGTH if cut else FinishReason.STOP
        raise FailedPrecondition(
            f"the script has no entry for this call (session {request.session_id!r}, {len(used)} of "
            f"{len(self._script.turns)} entries used)",
            reason="SCRIPT_NO_ENTRY",
        )

    def _encode(self, turn: Turn, where: str) -> tuple[int, ...]:
        if isinstance(turn.reply, str):
            try:
                ids = tuple(self._codec.encode(turn.reply).tolist())
            except CodecError as error:
                violation = Violation(where, str(error))
                raise InvalidArgument(str(error), reason=error.reason, violations=[violation]) from error
            end = self._codec.end_of_turn_id
            return ids if turn.finish == "length" or end is None else (*ids, end)
        bad = [token for token in turn.reply if not 0 <= token < self._codec.vocab_size]
        raise_violations([Violation(where, f"{bad[0]} is not in [0, {self._codec.vocab_size})")] if bad else [])
        return turn.reply


_ABORT = FinishReason.ABORT
