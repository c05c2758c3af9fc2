"""How far replays of the built-in agents get: twenty scripted tasks each, each lost at its last call.

Counted are the replays that come to the last call with the token ids that it had. Where two attempts part, the call,
the texts and what the difference looks like are printed.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import world
from benchmarks.replayed_agents.tasks import WORKS, Work, step_file
from benchmarks.report import Row, Section
from penstock.agents.replay_check import ReplayTrial, Script, run_replay
from penstock.agents.smoke_test import WORD_HERE, Reply, acting, text_of
from penstock.client import Completion, LogprobsMode, ModelCall, Penstock, PenstockError
from penstock.client.agents import Agent
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

AT_ONCE: Final = 3
ROLLOUT_S: Final = 900.0
AIM: Final = 0.95
TASKS: Final = len(WORKS)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which agents (empty = the built-in ones) and how many of the tasks.

    `kept` has a line for each pair of an agent and a task that was played: those are not played again, so all pairs can
    be played in parts. A pair whose rollout could not be run has none.
    """

    agents: Sequence[str] = ()
    tasks: int = TASKS
    kept: Path | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """How one replay went. `why` is what kept it from its last call, `cause` what the first difference looks like."""

    agent: str
    work: str
    calls: int = 0
    replayed: int = 0
    reached: bool = False
    why: str = ""
    cause: str = ""

    @classmethod
    def of(cls, agent: str, work: Work, trial: ReplayTrial) -> Played:
        failure = trial.result.failure
        why = "it never came to its last call" if failure is None else f"{failure.reason}: {failure.message}"
        parts = trial.divergences[0] if trial.divergences else None
        reached = trial.reached and parts is None
        return cls(
            agent,
            work.name,
            trial.calls,
            trial.replayed,
            reached,
            "" if reached else why if parts is None else str(parts),
            "" if parts is None else parts.cause,
        )


def kept_in(file: Path | None) -> list[Played]:
    """What earlier runs played."""
    if file is None or not file.is_file():
        return []
    return [Played(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def keep(file: Path | None, one: Played) -> None:
    """Add it to the file, which a kill leaves as it was before or after."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{json.dumps(asdict(item))}\n" for item in (*kept_in(file), one)), encoding="utf-8")
    new.replace(file)


async def measure(place: Path, plan: Plan | None = None) -> list[Section]:
    """The share of replays that reach the last call, by agent, and why the others do not."""
    plan = plan or Plan()
    from tests.support import toolboxes

    with toolboxes.brought(place / "state" / "sandbox"):
        return await _measured(place, plan)


async def _measured(place: Path, plan: Plan) -> list[Section]:
    async with world.scripted(place) as running:
        codec = Codec.load(TokenizerFiles.from_directory(place / "model"))
        agents = [agent async for agent in running.ps.agents.list() if agent.built_in]
        chosen = [agent for agent in agents if not plan.agents or agent.name in plan.agents]
        wanted = [(agent, work) for work in WORKS[: plan.tasks] for agent in chosen]
        names = {(agent.name, work.name) for agent, work in wanted}
        slots = asyncio.Semaphore(AT_ONCE)
        played = [one for one in kept_in(plan.kept) if (one.agent, one.work) in names]
        done = {(one.agent, one.work) for one in played}
        print(f"  {len(done)} of {len(wanted)} are known", flush=True)

        async def play(agent: Agent, work: Work) -> None:
            async with slots:
                one, is_whole = await _played(running.ps, agent, work, codec)
            played.append(one)
            if is_whole:
                keep(plan.kept, one)
            print(f"  {agent.name}, {work.name}: {'reached' if one.reached else one.why}", flush=True)

        left = [(agent, work) for agent, work in wanted if (agent.name, work.name) not in done]
        await asyncio.gather(*(play(agent, work) for agent, work in left))
    return sections([agent.name for agent in chosen], played)


async def _played(ps: Penstock, agent: Agent, work: Work, codec: Codec) -> tuple[Played, bool]:
    """How it went, and whether the rollout could be run at all."""

    def speak(call: ModelCall, reply: Reply) -> Completion:
        return _in_tokens(codec, reply)

    try:
        full = await ps.agents.get(agent.name)
        async with asyncio.timeout(ROLLOUT_S):
            trial = await run_replay(ps, full, work.task(), _script(full, work), speak=speak)
            return Played.of(agent.name, work, trial), True
    except (PenstockError, TimeoutError) as error:
        problem = "".join(traceback.format_exception_only(error)).strip()
        return Played(agent.name, work.name, why=problem), False


def _script(agent: Agent, work: Work) -> Script:
    trial = agent.spec.trial
    edits = WORD_HERE in trial.work

    def by_steps(call: ModelCall) -> Reply:
        if call.call_class == "title":
            return Reply("A title")
        done = work.done("\n".join(text_of(message) for message in call.messages))
        if done < len(work.steps):
            return acting(trial, call, f"bash {step_file(done + 1)}")
        end = acting(trial, call, trial.end_command) if trial.end_command else Reply(trial.end or "All steps are done.")
        return replace(end, is_last=True)

    def by_edits(call: ModelCall) -> Reply:
        """Edits that do not apply, about which the agent complains, and at last one that does."""
        if call.call_class == "title":
            return Reply("A title")
        conversation = "\n".join(text_of(message) for message in call.messages)
        made = sum(f"not there {number}" in conversation for number in range(1, len(work.steps)))
        old = f"not there {made + 1}" if made < len(work.steps) - 1 else "kiwi"
        return Reply(_EDIT.format(old=old), is_last=old == "kiwi")

    return by_edits if edits else by_steps


_EDIT: Final = "note.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\nfig\n>>>>>>> REPLACE\n```\n"


def _in_tokens(codec: Codec, reply: Reply) -> Completion:
    text = reply.text
    if reply.tool:
        text = f"<tool_call>\n{json.dumps({'name': reply.tool, 'arguments': reply.arguments})}\n</tool_call>"
    ids = np.asarray([*tiny_tokenizer.bytewise(text), codec.end_of_turn_id], np.int32)
    return Completion.of_tokens(
        ids, np.full(ids.size, -0.5, np.float32), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )


def sections(agents: Sequence[str], played: Sequence[Played]) -> list[Section]:
    """The share that reached its last call, by agent, and why the others did not."""
    rows = [_row(name, [one for one in played if one.agent == name]) for name in agents]
    rows.append(_row("all", played))
    prints = {work.name for work in WORKS if work.prints}
    same = [one for one in played if one.work not in prints]
    rows.append(_row("all, of tasks whose programs print the same each time", same))
    causes = Counter(f"{one.agent}: {one.cause or one.why}" for one in played if not one.reached)
    found = [Section("Replays that reach the last call with identical prompt ids", rows)]
    if causes:
        found.append(Section("Why the others do not", [Row(name, count, "") for name, count in causes.most_common()]))
    return found


def _row(name: str, played: Sequence[Played]) -> Row:
    calls = sum(one.calls for one in played)
    again = sum(one.replayed for one in played)
    reached = sum(one.reached for one in played)
    share = reached / len(played) if played else 0.0
    return Row(name, share, "", f"{reached} of {len(played)}; {calls} calls, {again} replayed", {})
