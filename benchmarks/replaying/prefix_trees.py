"""What a prefix tree saves: tokens that a trainer computes of real rollouts, by rows of three kinds.

A row for each trained call, as a trainer has it that takes each turn for a training example; the samples of Penstock,
in which a branch is one sequence; and `prefix_tree.pack` of those samples. Counts, which do not depend on the machine;
the time to pack does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

from benchmarks import rollouts, world
from benchmarks.gate import words
from benchmarks.gate.conversations import COMMAND, Conversation, Opening, Size
from benchmarks.gate.words import Writer
from benchmarks.report import Row, Section
from penstock.adapters.trainers import Selection, select
from penstock.adapters.trainers.prefix_tree import TreeSample, pack, tree_samples
from penstock.client import Completion, LogprobsMode, ModelCall, Penstock, RolloutResult, Tokenizer, connect
from penstock.client.types.trajectories import Reward, Trajectory
from penstock.local.stack import LocalStack
from penstock_codec import Codec, TokenizerFiles
from penstock_demo import model, train
from penstock_demo.display import Display
from penstock_demo.rollouts import GROUP_SIZE, Collected, ToLearn, by_rollout
from penstock_demo.tasks import build_codec

SEED: Final = 1
ROW_TOKENS: Final = 65_536
"""Of a row that has room for a whole group."""
TIGHT: Final = (1.25, 2.0)
"""Of rows that may not have it, in lengths of the longest sample."""
CALLS: Final = 12
BRANCHED_AT: Final = 6
"""The call at which the branches part from their parent."""
BRANCHES: Final = 8
TURNS: Final = 6
"""Of a conversation with agent-size system prompt and tools."""
ANSWER_WORDS: Final = 40
_LABELS: Final = {"bench": "prefix-tree"}


@dataclass(frozen=True, slots=True)
class _Taken:
    """Tokens of rows, how many rows, and pairs of query and key under a causal mask or the tree's."""

    tokens: int
    rows: int
    pairs: int

    def row(self, name: str, samples: _Taken, note: str = "") -> Row:
        also = {"of the samples'": self.tokens / samples.tokens, "pairs": self.pairs / samples.pairs, "rows": self.rows}
        return Row(name, self.tokens, "tokens", note, also)


async def measure(place: Path) -> list[Section]:
    """Tokens by kind of row: of a step of the demo, of a conversation with branches, of a group of a coding agent."""
    demo = await _demo(place / "demo")
    branched = await _branched(place / "branched")
    agents = await _agents(place / "agents")
    return [
        section(f"The demo's first step, {len(demo)} groups of {GROUP_SIZE}", demo),
        section(f"A conversation of {CALLS} calls, and {BRANCHES} branches from call {BRANCHED_AT}", [branched]),
        section(f"A group of {GROUP_SIZE}, system prompt and 20 tools of 63 KB, {TURNS} calls", [agents]),
    ]


def section(title: str, groups: Sequence[Selection]) -> Section:
    """The figures of groups, each of which is packed alone.

    Raises:
        RuntimeError: a batch does not unpack to its samples.
    """
    made = [tree_samples(group) for group in groups]
    flat = [sample for group in made for sample in group]
    longest = max(map(len, flat))
    samples = _rows_of(list(map(len, flat)))
    turns = [turn for group in groups for row in group.rows for turn in row.sample.turns if not turn.untrained_reason]
    began = time.thread_time()
    whole = _packed(made, ROW_TOKENS)
    took = 1e3 * (time.thread_time() - began)
    limits = [int(share * longest) for share in TIGHT]
    shares = [_packed([one], ROW_TOKENS).tokens / sum(map(len, one)) for one in made]
    spread = f"by group {min(shares):.2f} to {max(shares):.2f}" if len(groups) > 1 else ""
    trained = sum(int(one.loss_mask.sum()) for one in flat)
    return Section(
        title,
        [
            _rows_of([turn.end for turn in turns]).row("a row for each call", samples),
            samples.row("a row for each sample", samples, f"the longest {longest:,}; {trained:,} tokens are trained"),
            whole.row("prefix tree, a row for each group", samples, spread),
            *(_packed(made, limit).row(f"prefix tree, rows of at most {limit:,}", samples) for limit in limits),
            Row("to pack them all, and to unpack and compare", took, "ms", "CPU"),
        ],
    )


def _rows_of(lengths: Sequence[int]) -> _Taken:
    return _Taken(sum(lengths), len(lengths), sum(size * (size + 1) // 2 for size in lengths))


def _packed(groups: Sequence[Sequence[TreeSample]], max_tokens: int) -> _Taken:
    batches = [pack(group, max_tokens=max_tokens) for group in groups]
    for group, batch in zip(groups, batches, strict=True):
        for one, back in zip(group, batch.unpack(), strict=True):
            same = (one.input_ids == back.input_ids).all() and (one.loss_mask == back.loss_mask).all()
            if not (same and (one.logprobs == back.logprobs).all() and (one.advantages == back.advantages).all()):
                raise RuntimeError(f"sample {one.sample_id} was not unpacked as it was")
    rows = [row for batch in batches for row in batch.rows]
    # A query sees one key for each token above it, and itself.
    pairs = sum(int((row.position_ids.astype(np.int64) + 1).sum()) for row in rows)
    return _Taken(sum(map(len, rows)), len(rows), pairs)


async def _demo(place: Path) -> list[Selection]:
    """The groups of the first step of `make demo`, sampled by the policy that its training starts from."""
    place.mkdir()
    model.use_compilation_cache(place / "cache" / "xla")
    codec = build_codec()
    ended: list[RolloutResult] = []

    async def collect(ps: Penstock, run_id: str, step: int, tasks: Sequence[ToLearn]) -> Collected:
        collected = await by_rollout(ps, run_id, step, tasks)
        ended.extend(collected.whole)
        return collected

    run = place / "run"
    run.mkdir()
    with redirect_stdout(StringIO()), Display("") as display:
        learner = train.warm_start(codec, SEED, run, display)
        await train.train(learner, codec, train.Course(SEED, 1, collect), run, 0.0, display)
    groups: dict[str | None, list[RolloutResult]] = {}
    for result in ended:
        groups.setdefault(result.rollout.group_id, []).append(result)
    return [select(group) for group in groups.values()]


async def _branched(place: Path) -> Selection:
    """Rollouts of the `shell` agent: a parent, and branches of it. A trainer answers with words and a command."""
    place.mkdir()
    async with world.scripted(place) as running, running.ps.intercept(labels=_LABELS) as session:
        codec = Codec.load(TokenizerFiles.from_directory(place / "model"))

        async def answer(call: ModelCall) -> None:
            work = world.REPLIES[{CALLS - 1: -1, CALLS - 2: 1}.get(call.index, 0)]
            await call.deliver(_completion(codec, f"{_said(call)}\n{work}" if call.index < CALLS - 1 else work))

        async def answer_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for call in session.calls():
                    tasks.create_task(answer(call))

        answering = asyncio.create_task(answer_all())
        parent = await running.ps.rollouts.create(rollouts.task(0), "shell", labels=_LABELS)
        await parent.result()
        group = await parent.branch(BRANCHED_AT, BRANCHES)
        first = await parent.trajectory(samples_only=True)
        results: list[RolloutResult | Trajectory] = [first, *await group.results()]
        session.finish()
        await answering
    selection = select(results)
    if selection.dropped:
        raise RuntimeError(f"rollouts went wrong: {[*map(str, selection.dropped)]}")
    return selection


async def _agents(place: Path) -> Selection:
    """Conversations at the gate as a coding agent has them: the same system prompt, tools and task, answers of their
    own. Nobody grades them; a reward of 0 or 1 by turns is put in."""
    place.mkdir()
    words.write_tokenizer(place / "tokenizer")
    codec = Codec.load(TokenizerFiles.from_directory(place / "tokenizer"))
    opening = Opening.of(Size.AGENT, "prefix-tree")
    stack = LocalStack(tokenizers={"bench": place / "tokenizer"}, state_dir=place / "state")
    async with (
        stack,
        connect(stack.endpoints) as ps,
        ps.intercept(run_id="prefix-tree") as session,
        aiohttp.ClientSession() as http,
    ):

        async def answer_all() -> None:
            async for call in session.calls():
                await call.deliver(_completion(codec, _said(call) + COMMAND))

        async def conversation(index: int) -> Trajectory:
            agent = Conversation(opening, "the same")
            rollout = await ps.gate.open(
                rollout_id=f"agent-{index}", group_id="agents", run_id="prefix-tree",
                source=Tokenizer(name="bench"),
            )  # fmt: skip
            url = f"{rollout.base_url('chat_completions')}/chat/completions"
            headers = {"Authorization": f"Bearer {rollout.token}", "Content-Type": "application/json"}
            for _ in range(TURNS):
                async with http.post(url, data=agent.body(), headers=headers) as answer:
                    agent.answered(await answer.read())
            await rollout.close()
            return replace(await ps.gate.capture(rollout.rollout_id), reward=Reward(float(index % 2)))

        answering = asyncio.create_task(answer_all())
        ended = await asyncio.gather(*map(conversation, range(GROUP_SIZE)))
        session.finish()
        await answering
    selection = select(ended)
    if selection.dropped:
        raise RuntimeError(f"conversations went wrong: {[*map(str, selection.dropped)]}")
    return selection


def _said(call: ModelCall) -> str:
    """Words of this call alone."""
    writer = Writer(f"{call.rollout_id} {call.index}")
    return " ".join(" ".join(writer.sentence() for _ in range(ANSWER_WORDS // 8)).split()[:ANSWER_WORDS])


def _completion(codec: Codec, text: str) -> Completion:
    ids = np.asarray([*codec.encode(text), codec.end_of_turn_id], np.int32)
    return Completion.of_tokens(
        ids, np.full(ids.size, -0.5, np.float32), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )
