"""Rollouts for a trainer under test: services, tasks, an engine in the place of its GPUs, and the judge of its tensors.

The engine answers by a script, one id per byte, with logprobs that depend on the place: what a trainer makes of them is
compared with the trajectories and with what the engine gave, token for token.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from tests.support.policy import CODEC, FILES, Reply, in_shell, in_turn, sampled
from tests.support.services.stack import Running, running

from penstock.client import Penstock, Trajectory
from penstock.client.transport.endpoints import CONNECTION_FILE, state_dir, write_connection
from penstock_inference.testing import random_config, random_tensors, write_model

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples" / "trainers"

PER_TASK: Final = 4
"""Rollouts of each task: half of them do the work."""
VERSION: Final = 3
TASK_IDS: Final = ("kiwi", "plum")

Token = tuple[int, float]


def policy(word: str, works: bool) -> Reply:
    """Three turns with a tool's output between them; only one that works is rewarded."""
    return in_turn(in_shell("echo one"), in_shell(f"echo {word} > out.txt" if works else "echo idle"), "That was all.")


@dataclass
class Engine:
    """In the place of the trainer's servers: every second conversation of a task does the work."""

    answers: list[tuple[Token, ...]] = field(default_factory=list)
    _works: dict[tuple[str, str], bool] = field(default_factory=dict)
    _seen: Counter[str] = field(default_factory=Counter)

    def answer(self, prompt_ids: Sequence[int], session: str = "") -> tuple[list[int], list[float]]:
        """The ids and logprobs for a prompt; without a session, its first answers tell conversations apart."""
        text = CODEC.decode(np.array(prompt_ids, np.int32))
        word = next(task_id for task_id in TASK_IDS if task_id in text)
        first = text.count("<|im_start|>assistant") == 1
        if session:
            if (session, word) not in self._works:
                self._works[session, word] = not self._seen[word] % 2
                self._seen[word] += 1
            works = self._works[session, word]
        elif first:
            works = True
        else:
            works = not self._seen[word] % 2
            if text.count("<|im_start|>assistant") == 2:
                self._seen[word] += 1
        ids, logprobs = sampled(policy(word, works)(text))
        self.answers.append(tokens(ids, logprobs))
        return ids, logprobs


@dataclass(frozen=True, slots=True)
class Learned:
    """One sequence as the trainer has it: ids, which of them it trains, their logprobs (0.0 elsewhere), its reward."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    reward: float

    @classmethod
    def of(cls, ids: Any, mask: Any, logprobs: Any, reward: Any) -> Learned:
        """From arrays of one length."""
        ids, mask, logprobs = np.asarray(ids), np.asarray(mask, bool), np.asarray(logprobs, np.float32)
        if not len(ids) == len(mask) == len(logprobs):
            raise ValueError(f"lengths differ: {len(ids)}, {len(mask)}, {len(logprobs)}")
        kept = np.where(mask, logprobs, np.float32(0))
        return cls(tuple(ids.tolist()), tuple(mask.tolist()), tuple(kept.tolist()), round(float(reward), 6))

    def answers(self) -> list[tuple[Token, ...]]:
        """The runs of trained tokens."""
        found = []
        for trained, run in itertools.groupby(range(len(self.ids)), key=lambda index: self.mask[index]):
            if trained:
                places = list(run)
                found.append(tuple((self.ids[place], self.logprobs[place]) for place in places))
        return found


@dataclass(frozen=True)
class Driven:
    """What a trainer's check works with."""

    ps: Penstock
    engine: Engine
    model: Path
    """A tiny model's directory, for Transformers."""

    async def faults(self, learned: Sequence[Learned]) -> tuple[list[str], list[str]]:
        """Compares the trainer's sequences with trajectories and engine; returns what was seen, and what is wrong."""
        trajectories = [
            await (await self.ps.rollouts.attach(rollout.rollout_id)).trajectory()
            async for rollout in self.ps.rollouts.list()
        ]
        wrong = differences(learned, [of_sample(trajectory) for trajectory in trajectories], self.engine.answers)
        if len(learned) != PER_TASK * len(TASK_IDS):
            wrong.append(f"{len(learned)} sequences, not {PER_TASK * len(TASK_IDS)}")
        if (rewards := sorted({one.reward for one in learned})) != [0.0, 1.0]:
            wrong.append(f"rewards {rewards}, not 0 and 1")
        if any(trajectory.grade != "exact" for trajectory in trajectories):
            wrong.append("a trajectory is not exact")
        total, trained = sum(len(one.ids) for one in learned), sum(sum(one.mask) for one in learned)
        return [
            f"{len(learned)} sequences of {total} tokens, {trained} of them trained; {len(trajectories)} trajectories",
            f"{len(self.engine.answers)} answers of the engine",
        ], wrong


def differences(
    learned: Sequence[Learned], expected: Sequence[Learned], answers: Sequence[tuple[Token, ...]]
) -> list[str]:
    """What a trainer's sequences have otherwise than the trajectories, and than the answers of its engine."""
    wrong = []
    if Counter(learned) != Counter(expected):
        wrong.append(f"{len(set(learned) ^ set(expected))} sequences differ from the trajectories'")
    trained = Counter(answer for one in learned for answer in one.answers())
    if unknown := (trained - Counter(answers)).total():
        wrong.append(f"{unknown} trained answers are not the engine's")
    if left := (Counter(answers) - trained).total():
        wrong.append(f"{left} answers of the engine are not trained")
    return wrong


def tokens(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Token, ...]:
    """As the judge compares them: logprobs are float32."""
    return tuple((int(one), float(np.float32(two))) for one, two in zip(ids, logprobs, strict=True))


def of_sample(trajectory: Trajectory) -> Learned:
    """The only sequence of a trajectory."""
    (sample,) = trajectory.samples
    assert trajectory.reward is not None and sample.logprobs is not None
    return Learned.of(sample.input_ids, sample.loss_mask, sample.logprobs, trajectory.reward.value)


def task(task_id: str) -> dict[str, Any]:
    """A task file's content: reward 1 when out.txt has the word."""
    return {
        "task_id": task_id,
        "instruction": f"Write {task_id} to out.txt.",
        "verifier": {
            "commands": [
                {"shell": f'[ "$(cat out.txt)" = {task_id} ]; echo $((1 - $?)) >"$PENSTOCK_REWARD_FILE"'},
            ],
            "reward": "file",
        },
    }


@asynccontextmanager
async def driven(folder: Path) -> AsyncIterator[Driven]:
    """Services as `penstock up` leaves them, with `folder` as the working directory: the tasks are in its `tasks`."""
    tasks, model, home = folder / "tasks", folder / "policy", folder / "home"
    tasks.mkdir()
    for task_id in TASK_IDS:
        (tasks / f"{task_id}.yaml").write_text(yaml.safe_dump(task(task_id)))
    config = random_config("qwen3", architectures=["Qwen3ForCausalLM"], max_position_embeddings=4096)
    write_model(model, config, random_tensors(config))
    FILES.write(model)
    found: Running
    async with running(folder, agents=False) as found:
        os.environ["XDG_STATE_HOME"] = str(home)
        state_dir().mkdir(parents=True)
        write_connection(state_dir() / CONNECTION_FILE, found.stack.endpoints, pid=os.getpid())
        with contextlib.chdir(folder):
            yield Driven(found.ps, Engine(), model)
