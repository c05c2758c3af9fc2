"""Continuous batching: chooses the tokens of each step and handles their results.

Synchronous and single-threaded; `engine.NumpyEngine` runs it in its own thread. One `step` admits requests that fit,
runs one forward pass over all decoding sequences plus a bounded piece of the prompts, samples one token for every ready
sequence, and returns the events. Aborts and weight changes happen only between two steps, so a token has exactly one
policy version.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.values.token_tensors import ROUTED_EXPERTS, TokenTensor
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError
from penstock_inference.domain.engine_info import EngineStats
from penstock_inference.domain.generation import Done, FinishReason, GenerateRequest, Scores, Started, Timings
from penstock_inference.engines.numpy.decoder import Chunk, Decoder, KVCache
from penstock_inference.engines.numpy.model import Array, ModelConfig, Weights
from penstock_inference.engines.numpy.sampling import Distribution, Uniforms, apply_penalties, drop_unlikely
from penstock_inference.engines.numpy.sequence import Event, Sequence
from penstock_inference.engines.numpy.slots import Slots

PREFILL_TOKENS_PER_STEP = 512
"""Maximum prompt tokens per step, so that decoding sequences wait for a bounded time."""

PREFILL_SCORES_PER_STEP = 4 << 20
"""Maximum attention scores (tokens x heads x context) of one prompt per step: 16 MiB, and some 0.1 s."""

_LEAST_PREFILL = 16

DELTA_INTERVAL_S = 0.05
"""Minimum interval between deltas of a stream: a message per token would cost more than the token."""

_REMEMBERED_VERSIONS = 16
_LANES = 16


class Scheduler:
    """All sequences of one engine."""

    def __init__(self, config: ModelConfig, weights: Weights, slots: int, max_tokens: int) -> None:
        self._config = config
        self._decoder = Decoder(config, max_tokens)
        self._cache = KVCache(config, slots, max_tokens)
        self._slots = Slots(self._cache, slots, max_tokens)
        self._waiting: deque[Sequence] = deque()
        self._early: list[Sequence] = []
        """Sequences that wait for a policy version."""
        self._running: dict[int, Sequence] = {}
        """By slot."""
        self._padded_vocab = -(-config.vocab_size // _LANES) * _LANES
        self._tokens_by_version: dict[int, int] = {}
        self._stats = EngineStats(slots=slots)
        self._counts = dict.fromkeys(
            ("steps", "prompt_tokens", "cached_tokens", "sampled_tokens", "finished", "aborted", "failed"), 0
        )
        self._busy_s = 0.0
        self.weights = weights
        self.version = 0
        self.label = ""
        self.admitting = True
        self.frozen = False
        self.held_for_update = False
        """Nothing is admitted until an update is in force: apart from a pause, which others end."""

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self.frozen and (bool(self._running) or (self._admits and bool(self._waiting)))

    @property
    def _admits(self) -> bool:
        return self.admitting and not self.held_for_update

    def submit(self, sequence: Sequence) -> None:
        """Queue a checked request."""
        sequence.stop_ids = frozenset(sequence.request.sampling.stop_token_ids)
        if not sequence.request.sampling.ignore_eos:
            sequence.stop_ids |= frozenset(self._config.stop_token_ids)
        self._queue(sequence)

    def replace_weights(self, weights: Weights, version: int, label: str) -> list[tuple[Sequence, Event]]:
        """Swap the policy; return the events of the swap.

        Sequences that have sampled something continue with their keys and values; prompts in progress are computed
        again, so only a completion that spans the swap is of mixed origin. A prompt for an exact version ends in error.
        """
        now = time.monotonic()
        events: list[tuple[Sequence, Event]] = [(s, s.delta(now)) for s in self._running.values() if s.unsent]
        self.weights, self.version, self.label = weights, version, label
        for sequence in tuple(self._running.values()):
            refusal = None if sequence.token_ids else self._version_refusal(sequence.request)
            if refusal is not None:
                self._counts["failed"] += 1
                self._let_go(sequence)
                events.append((sequence, refusal))
        self._slots.weights_changed()
        for slot, sequence in self._running.items():
            if not sequence.token_ids:
                self._slots.restart(slot, version)
                sequence.cached = 0
                sequence.scores.clear()
                sequence.top.clear()
        early, self._early = self._early, []
        for sequence in early:
            self._queue(sequence)
        return events

    def abort(self, chosen: Callable[[Sequence], bool]) -> list[tuple[Sequence, Event]]:
        """End every sequence for which `chosen` is true, queued or running."""
        ended = [s for s in (*self._running.values(), *self._waiting, *self._early) if chosen(s)]
        self._waiting = deque(s for s in self._waiting if not chosen(s))
        self._early = [s for s in self._early if not chosen(s)]
        self._counts["aborted"] += len(ended)
        for sequence in ended:
            self._let_go(sequence)
        return [event for s in ended for event in self._end(s, FinishReason.ABORT)]

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._early),
            slots=self._stats.slots,
            policy_version=self.version,
            cache_use=self._slots.use(),
            paused=self.frozen or not self.admitting,
            busy_s=self._busy_s,
            tokens_by_version=dict(self._tokens_by_version),
            **self._counts,  # type: ignore[arg-type]
        )

    def step(self) -> list[tuple[Sequence, Event]]:
        """Compute one step and return its events, in order for each sequence."""
        began = time.monotonic()
        events: list[tuple[Sequence, Event]] = []
        if self._admits:
            self._admit(events)
        decoding, chunks = self._plan()
        if decoding or chunks:
            # Diverged weights overflow; the result is checked where it matters, on the logits.
            with np.errstate(all="ignore"):
                self._compute(decoding, chunks, events)
            self._counts["steps"] += 1
        self._busy_s += time.monotonic() - began
        return events

    def _admit(self, events: list[tuple[Sequence, Event]]) -> None:
        """Give slots to queued sequences, first come first served, except for those that wait for a shared prefix."""
        held: list[Sequence] = []
        while self._waiting and self._slots.free:
            sequence = self._waiting.popleft()
            refusal = self._version_refusal(sequence.request)
            if refusal is not None:
                self._counts["failed"] += 1
                events.append((sequence, refusal))
                continue
            # Scoring needs logits of the whole prompt, so it cannot reuse a prefix.
            placement = self._slots.place(sequence.prompt, self.version, reuse=sequence.score_temperature is None)
            if placement is None:
                held.append(sequence)
                continue
            sequence.slot, sequence.cached = placement.slot, placement.reused
            sequence.admitted_at = time.monotonic()
            sequence.uniforms = Uniforms(sequence.seed)
            self._running[placement.slot] = sequence
            self._counts["cached_tokens"] += placement.reused
            if sequence.request.stream and sequence.score_temperature is None:
                events.append((sequence, Started(self.version, placement.reused)))
        self._waiting.extendleft(reversed(held))

    def _queue(self, sequence: Sequence) -> None:
        least = sequence.request.min_policy_version
        (self._early if least is not None and least > self.version else self._waiting).append(sequence)

    def _version_refusal(self, request: GenerateRequest) -> PenstockError | None:
        if request.exact_policy_version in (None, self.version):
            return None
        return FailedPrecondition(
            f"policy version {request.exact_policy_version} was requested, but {self.version} is in force",
            reason="POLICY_VERSION_UNAVAILABLE",
            metadata={"policy_version": str(self.version)},
        )

    def _plan(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Sequences that compute one token and then sample (by slot); the others, with their number of prompt tokens.

        A prompt with one token left, the rest cached, counts as a decoding sequence and shares its products.
        """
        decoding: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        budget = PREFILL_TOKENS_PER_STEP
        prefilling: list[Sequence] = []
        for slot in sorted(self._running):
            sequence = self._running[slot]
            last = bool(sequence.token_ids) or (
                sequence.score_temperature is None and self._slots.written[slot] == sequence.prompt.size - 1
            )
            (decoding if last else prefilling).append(sequence)
        for sequence in sorted(prefilling, key=lambda s: s.admitted_at):
            start = int(self._slots.written[sequence.slot])
            most = max(_LEAST_PREFILL, PREFILL_SCORES_PER_STEP // (self._config.heads * (start + budget + 1)))
            tokens = min(budget, most, sequence.prompt.size - start)
            if tokens:
                chunks.append((sequence, tokens))
                budget -= tokens
        return decoding, chunks

    def _compute(
        self, decoding: list[Sequence], chunks: list[tuple[Sequence, int]], events: list[tuple[Sequence, Event]]
    ) -> None:
        slots = self._slots
        rows = np.fromiter((s.slot for s in decoding), np.int64, len(decoding))
        positions = slots.written[rows]
        pieces = []
        for sequence, tokens in chunks:
            start = int(slots.written[sequence.slot])
            pieces.append(Chunk(sequence.slot, start, sequence.prompt[start : start + tokens]))
        hidden = self._decoder.forward(self.weights, self._cache, slots.ids[rows, positions], positions, rows, pieces)
        slots.written[rows] += 1
        self._counts["prompt_tokens"] += sum(not s.token_ids for s in decoding)
        ready = list(decoding)
        ready_rows = list(range(len(decoding)))
        row = len(decoding)
        for sequence, tokens in chunks:
            slots.written[sequence.slot] += tokens
            self._counts["prompt_tokens"] += tokens
            if sequence.score_temperature is not None:
                self._score(sequence, hidden[row : row + tokens], events)
            elif slots.written[sequence.slot] == sequence.prompt.size:
                ready.append(sequence)
                ready_rows.append(row + tokens - 1)
            row += tokens
        if ready:
            self._sample(ready, self._decoder.logits(self.weights, hidden[ready_rows]), events)

    def _sample(self, ready: list[Sequence], logits: Array, events: list[tuple[Sequence, Event]]) -> None:
        vocab = self._config.vocab_size
        # Padding keeps each row's arithmetic in whole vector lanes, at any row position.
        wide = np.full((len(ready), self._padded_vocab), -np.inf)
        wide[:, :vocab] = logits
        uniforms = np.zeros(len(ready))
        greedy: list[int] = []
        for n, sequence in enumerate(ready):
            sampling, row = sequence.request.sampling, wide[n, :vocab]
            if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
                apply_penalties(row, sampling, sequence.prompt, np.array(sequence.token_ids, np.int32))
            if sampling.min_tokens > len(sequence.token_ids) and sequence.stop_ids:
                row[sorted(sequence.stop_ids)] = -np.inf
            if sampling.temperature == 0:
                greedy.append(n)
            elif sequence.uniforms is not None:
                uniforms[n] = sequence.uniforms.next()
                if sampling.temperature != 1.0:
                    row /= sampling.temperature
                if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
                    drop_unlikely(row, sampling.top_k, sampling.top_p, sampling.min_p)
        distribution = Distribution(wide)
        tokens = distribution.draw(uniforms)
        for n in greedy:
            tokens[n] = distribution.likeliest(n)
        chosen, valid = distribution.logprobs(tokens).tolist(), distribution.valid.tolist()
        self._counts["sampled_tokens"] += len(ready)
        now = time.monotonic()
        for n, token in enumerate(tokens.tolist()):
            if not valid[n]:
                self._fail(ready[n], events)
                continue
            top = ready[n].request.sampling.top_logprobs
            if top:
                ready[n].top.append(distribution.top(n, top))
            self._take(ready[n], token, chosen[n], now, events)
        counted = self._tokens_by_version
        counted[self.version] = counted.get(self.version, 0) + len(ready)
        if len(counted) > _REMEMBERED_VERSIONS:
            del counted[min(counted)]

    def _take(
        self, sequence: Sequence, token: int, logprob: float, now: float, events: list[tuple[Sequence, Event]]
    ) -> None:
        """Append a sampled token, emit its event, and end the sequence if it was the last."""
        if not sequence.token_ids:
            sequence.first_token_at = now
        sequence.record(token, logprob, self.version)
        if sequence.request.stream and now - sequence.sent_at >= DELTA_INTERVAL_S:
            events.append((sequence, sequence.delta(now)))
        text = sequence.stop_texts.push(token) if sequence.stop_texts is not None else None
        if token in sequence.stop_ids:
            self._finish(sequence, FinishReason.STOP, events, stop_token_id=token)
        elif text is not None and len(sequence.token_ids) >= sequence.request.sampling.min_tokens:
            self._finish(sequence, FinishReason.STOP, events, stop_text=text)
        elif len(sequence.token_ids) == sequence.request.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, events)
        else:
            self._slots.ids[sequence.slot, sequence.prompt.size + len(sequence.token_ids) - 1] = token

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        events: list[tuple[Sequence, Event]],
        *,
        stop_token_id: int | None = None,
        stop_text: str | None = None,
    ) -> None:
        self._counts["finished"] += 1
        self._let_go(sequence)
        events.extend(self._end(sequence, reason, stop_token_id, stop_text))

    def _score(self, sequence: Sequence, hidden: Array, events: list[tuple[Sequence, Event]]) -> None:
        """Logprobs of the tokens that follow each row of this piece of the prompt."""
        done = int(self._slots.written[sequence.slot])
        targets = sequence.prompt[done - hidden.shape[0] + 1 : done + 1]
        logits = self._decoder.logits(self.weights, hidden[: targets.size])
        wide = np.full((targets.size, self._padded_vocab), -np.inf)
        wide[:, : self._config.vocab_size] = logits
        if sequence.score_temperature != 1.0:
            wide /= sequence.score_temperature or 1.0
        distribution = Distribution(wide)
        if not distribution.valid.all():
            self._fail(sequence, events)
            return
        logprobs = distribution.logprobs(targets.astype(np.int64))
        sequence.scores.append(logprobs.astype(np.float32))
        wanted = min(sequence.request.sampling.top_logprobs, self._config.vocab_size)
        if wanted:
            sequence.top += [distribution.top(row, wanted) for row in range(targets.size)]
        if done == sequence.prompt.size:
            self._counts["finished"] += 1
            self._let_go(sequence)
            events.append((sequence, Scores(np.concatenate(sequence.scores), self.version, sequence.all_top())))

    def _fail(self, sequence: Sequence, events: list[tuple[Sequence, Event]]) -> None:
        """End a sequence with a non-finite logit: there is nothing to sample, and its slot must not spread it."""
        self._counts["failed"] += 1
        self._running.pop(sequence.slot)
        self._slots.discard(sequence.slot)
        events.append(
            (
                sequence,
                Internal(
                    f"the model's output is not finite under policy version {self.version}: its weights have diverged",
                    reason="LOGITS_NOT_FINITE",
                    metadata={"policy_version": str(self.version)},
                ),
            )
        )

    def _let_go(self, sequence: Sequence) -> None:
        if self._running.get(sequence.slot) is sequence:
            del self._running[sequence.slot]
            self._slots.release(sequence.slot)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_token_id: int | None = None,
        stop_text: str | None = None,
    ) -> list[tuple[Sequence, Event]]:
        now = time.monotonic()
        rest: list[tuple[Sequence, Event]] = [(sequence, sequence.delta(now))] if sequence.unsent else []
        admitted = sequence.admitted_at or now
        first = sequence.first_token_at or now
        done = Done(
            finish_reason=reason,
            token_ids=np.array(sequence.token_ids, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            version_spans=sequence.spans(),
            stop_token_id=stop_token_id,
            prompt_tokens=sequence.prompt.size,
            cached_tokens=sequence.cached,
            timings=Timings(admitted - sequence.queued_at, first - admitted, now - first),
            seed=sequence.seed,
            top=sequence.all_top(),
            stop_text=stop_text,
            tensors=self._tensors(sequence),
        )
        return [*rest, (sequence, done)]

    def _tensors(self, sequence: Sequence) -> tuple[TokenTensor, ...]:
        """The experts of the tokens that were computed, if requested. The slot has them until another takes it."""
        routes, start = self._cache.routes, sequence.request.tensor_start
        if routes is None or not sequence.request.sampling.token_tensors or sequence.slot < 0:
            return ()
        end = min(int(self._slots.written[sequence.slot]), sequence.prompt.size + len(sequence.token_ids) - 1)
        if start >= end:
            return ()
        rows = routes[sequence.slot, start:end]
        little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
        return (TokenTensor(ROUTED_EXPERTS, rows.dtype.name, start, rows.shape, little.tobytes()),)
