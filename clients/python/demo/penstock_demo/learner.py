"""Supervised warm start, GRPO updates and distillation: from scored token sequences to new weights.

Nothing here knows about rollouts, agents or services. All randomness comes from the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from penstock_demo import model
from penstock_demo.model import Batch, ModelConfig
from penstock_demo.tasks import Examples

WARM_STEPS, WARM_CHUNK, WARM_BATCH = 500, 50, 8
WARM_LR, WARM_LR_END = 3e-3, 3e-4
MINIBATCH = 16  # sequences per Adam step
LEARNING_RATE = 5e-4
DISTILL_BATCH, DISTILL_PASSES = 8, 6
BUCKET = 32  # sequences are padded to a multiple of this, so that XLA compiles few shapes


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: ids int32 [t]; by token, float32 [t], a mask (1 = sampled), the engine's logprobs, advantages."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray

    @classmethod
    def alike(cls, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, advantage: float) -> Self:
        """A row whose tokens share one advantage."""
        return cls(ids, mask, logprobs, np.full(len(ids), advantage, np.float32))


def advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Each reward of a group relative to the group's mean, in standard deviations.

    None is a rollout that nobody graded: it gets no advantage and does not count in the mean. Equal rewards have
    advantages of exactly 0.0, which their rounded mean would not give. No advantage is below -1:
    one failure among seven successes would have -2.6, and pushing its tokens down that hard takes the good ones, which
    share most of them, down as well.
    """
    graded = np.array([reward for reward in rewards if reward is not None])
    if graded.size == 0:
        return [None] * len(rewards)
    equal = graded.min() == graded.max()
    mean, spread = (graded[0] if equal else graded.mean()), graded.std() + 1e-4
    return [None if reward is None else max(float((reward - mean) / spread), -1.0) for reward in rewards]


def step_advantages(groups: Sequence[Sequence[float | None]], behind: float = 0.0) -> list[list[float | None]]:
    """The `advantages` of each group of a step.

    A group whose rollouts all do alike has none, so a policy that has become sure of a mistake would keep it. With
    `behind`, such a group, if it is below the mean of all groups, has its distance from that mean as the advantage of
    all its rollouts: in standard deviations of all rewards, at least -1, times `behind`.
    """
    answers = [advantages(rewards) for rewards in groups]
    known = np.array([reward for rewards in groups for reward in rewards if reward is not None])
    for rewards, answer in zip(groups, answers, strict=True):
        graded = {reward for reward in rewards if reward is not None}
        if behind and len(graded) == 1 and min(graded) < known.mean():
            lack = behind * max(float((min(graded) - known.mean()) / (known.std() + 1e-4)), -1.0)
            answer[:] = [None if reward is None else lack for reward in rewards]
    return answers


class Learner:
    """The policy's weights and their optimizer."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.params = model.init(config, seed)
        self._adam = model.adam_init(self.params)
        self._seed = seed
        self._rng = np.random.default_rng([seed, 1])
        self._updates = 0

    def warm_start(self, corpus: Examples, cache: Path, say: Callable[[str], None]) -> None:
        """Learn the format and a weak prior from the corpus; once, then from the cache."""
        path = cache / f"warm-{self._fingerprint(corpus)}.safetensors"
        if path.is_file():
            self.params = {name: jnp.asarray(value) for name, value in load_file(path).items()}
            return
        rng = np.random.default_rng([self._seed, 0])  # its own: the updates go on alike after a cached start
        for first in range(0, WARM_STEPS, WARM_CHUNK):
            drawn = corpus.draw(rng, WARM_CHUNK * WARM_BATCH)
            rows = [Row.alike(ids, mask, np.zeros_like(mask), 0.0) for ids, mask in drawn]
            steps = first + np.arange(WARM_CHUNK)
            rates = WARM_LR * (WARM_LR_END / WARM_LR) ** (steps / WARM_STEPS) * np.minimum(1.0, (steps + 1) / 20)
            loss, _ = self._train(_stack(rows, (WARM_CHUNK, WARM_BATCH)), rates, "supervised")
            say(f"warm start: step {first + WARM_CHUNK} of {WARM_STEPS}, loss {loss:.3f}")
        self._adam = model.adam_init(self.params)
        cache.mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), path)

    def update(self, rows: Sequence[Row], passes: int = 1, highest: float = LEARNING_RATE) -> tuple[float, float]:
        """`passes` over `rows`, each in a random order, one Adam step per minibatch.

        Answers the mean loss, and the largest difference between our logprobs and the engine's before the first step.

        Rows without an advantage teach nothing and are left out. Adam makes a full step of whatever gradient is there,
        so the fewer rows have something to say, the smaller the rate: without that, a few rare failures near the end
        of training can undo it. `highest` is the rate if all have.
        """
        telling = [row for row in rows if (row.advantages * row.mask).any()]
        if not telling:
            return 0.0, 0.0
        rate = highest * max(0.25, len(telling) / len(rows))
        answers = [answer for _ in range(passes) for answer in self._pass(telling, rate, MINIBATCH, "grpo")]
        return float(np.mean([loss for loss, _ in answers])), answers[0][1]

    def distill(self, rows: Sequence[Row]) -> tuple[float, float]:
        """As `update`, for advantages that are a teacher's logprobs minus the engine's, in several passes.

        A reward says nothing about a policy that has moved on; a teacher's logprobs say the same about every policy, so
        that the same tokens can be learned from again.
        """
        if not rows:
            return 0.0, 0.0
        answers = []
        for _ in range(DISTILL_PASSES):
            answers += self._pass(rows, LEARNING_RATE, DISTILL_BATCH, "reverse_kl")
        return float(np.mean([loss for loss, _ in answers])), answers[0][1]

    def imitate(self, rows: Sequence[Row], passes: int, rate: float) -> None:
        """`passes` over `rows` as examples: their sampled tokens become likelier, whatever their advantages."""
        for _ in range(passes):
            self._pass(rows, rate, MINIBATCH, "supervised")

    def weights(self) -> dict[str, np.ndarray]:
        """The weights under their checkpoint names, float32."""
        return {name: np.asarray(value) for name, value in self.params.items()}

    def _pass(self, rows: Sequence[Row], rate: float, size: int, loss: str) -> list[tuple[float, float]]:
        """One pass over the rows in random order, `size` of them for each step."""
        answers = []
        order = self._rng.permutation(len(rows))
        for first in range(0, len(rows), size):
            self._updates += 1
            batch = _stack([rows[i] for i in order[first : first + size]], (1, size))
            answers.append(self._train(batch, np.array([rate * min(1.0, self._updates / 10)]), loss))
        return answers

    def _fingerprint(self, corpus: Examples) -> str:
        """Of everything that the warm start is made from."""
        digest = hashlib.sha256(f"{self._seed} {self.config} {jax.__version__}".encode())
        for module in ("model.py", "learner.py", "tasks.py"):
            digest.update(Path(__file__).with_name(module).read_bytes())
        for ids, mask in corpus.all():
            digest.update(ids.tobytes() + mask.tobytes())
        return digest.hexdigest()[:16]

    def _train(self, batch: Batch, rates: np.ndarray, loss: str) -> tuple[float, float]:
        self.params, self._adam, (losses, gaps) = model.train(
            self.params, self._adam, batch, jnp.asarray(rates, jnp.float32), config=self.config, loss=loss
        )
        return float(losses.mean()), float(gaps.max())


def _stack(rows: Sequence[Row], shape: tuple[int, int]) -> Batch:
    """Pad rows to one length, and with empty rows to `shape` (steps, sequences)."""
    count = shape[0] * shape[1]
    length = -(-max(len(row.ids) for row in rows) // BUCKET) * BUCKET
    ids = np.zeros((count, length), np.int32)
    mask, logprobs, advantages = (np.zeros((count, length), np.float32) for _ in range(3))
    for i, row in enumerate(rows):
        part = (i, slice(len(row.ids)))
        ids[part], mask[part], logprobs[part], advantages[part] = row.ids, row.mask, row.logprobs, row.advantages
    return Batch(*(jnp.asarray(array).reshape(*shape, length) for array in (ids, mask, logprobs, advantages)))
