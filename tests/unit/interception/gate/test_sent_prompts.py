"""What calls leave out of their prompts, and what a trainer makes of them that knows the protos only."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.services.inner_gate import completion, inner_gate

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_interception.domain.sent_prompts import MOST_BRANCHES, SentPrompts
from penstock_interception.domain.state import Call, Rollout, Session, View
from penstock_interception.rpc.frames import CallWriter, frames_of
from penstock_interception.testing import OpenGate, parse

VIEW = View(max_message_bytes=64 << 20)


class Trainer:
    """One session as the contract describes it: it keeps the last prompt of each of the newest 16 branches."""

    def __init__(self, gate: OpenGate, resume: str = "") -> None:
        self.session: Session = gate.join(64, resume=resume, sent_prompts=SentPrompts(), view=VIEW)
        self._writer = CallWriter(parse, gate.interceptor.fail)
        self._kept: dict[str, OrderedDict[str, tuple[str, bytes]]] = {}
        self.omitted: dict[str, int] = {}

    def receive(self) -> Iterator[tuple[pb.ModelCall, bytes]]:
        """Reads what was sent since; yields each call with its whole prompt."""
        for frame in frames_of(self.session.drain(), self._writer, VIEW, self.session.sent_prompts):
            for rollout_id in frame.rollouts_closed.rollout_ids:
                self._kept.pop(rollout_id, None)
            for call in frame.calls.calls:
                branches = self._kept.setdefault(call.rollout_id, OrderedDict())
                prompt = call.prompt_token_ids
                if call.omitted_prefix_count:
                    parent = next(ids for call_id, ids in branches.values() if call_id == call.parent_call_id)
                    prompt = parent[: 4 * call.omitted_prefix_count] + prompt
                branches[call.branch_id] = (call.call_id, prompt)
                branches.move_to_end(call.branch_id)
                if len(branches) > 16:
                    branches.popitem(last=False)
                self.omitted[call.call_id] = call.omitted_prefix_count
                yield call, prompt

    def check(self, gate: OpenGate) -> None:
        """Receives, and compares each prompt with the gate's."""
        for message, prompt in self.receive():
            plan = gate.interceptor.registry.call(message.call_id).plan
            assert plan is not None
            assert np.array_equal(np.frombuffer(prompt, "<i4"), plan.prompt_ids)
            assert hashlib.sha256(prompt).digest() == message.prompt_sha256
            assert len(prompt) == 4 * message.prompt_count


async def answer(gate: OpenGate, call: Call, text: str) -> None:
    await gate.interceptor.deliver(call.id, call.lease_id, completion(text))
    await call.ended


async def conversation(
    gate: OpenGate, trainer: Trainer, rollout: Rollout, turns: int, opening: str = "a" * 100
) -> list[str]:
    """The texts of a conversation whose turns this trainer was sent, so many of them."""
    texts = [opening]
    for turn in range(turns):
        call = await gate.ask(rollout, *texts)
        trainer.check(gate)
        await answer(gate, call, f"yes{turn}")
        texts += [f"yes{turn}", f"go on {turn}"]
    return texts


@pytest.mark.requirement("R32")
async def test_a_call_leaves_out_what_its_session_was_sent_with_the_parent(tmp_path: Path) -> None:
    """Each token of a conversation is on the stream once, as part of a prompt."""
    async with inner_gate(tmp_path) as gate:
        rollout, trainer = await gate.open(), Trainer(gate)
        texts, carried, prompt = ["a" * 100], 0, b""
        for turn in range(8):
            call = await gate.ask(rollout, *texts)
            ((message, prompt),) = trainer.receive()
            assert call.plan is not None and prompt == call.plan.prompt_ids.tobytes()
            carried += len(message.prompt_token_ids)
            await answer(gate, call, f"yes{turn}")
            texts += [f"yes{turn}", f"go on {turn}"]
        assert carried == len(prompt)


@pytest.mark.requirement("R22", "R32")
async def test_a_call_whose_parent_another_session_was_sent_is_whole(tmp_path: Path) -> None:
    """So are those of a session that was resumed: its frames may be lost."""
    async with inner_gate(tmp_path) as gate:
        rollout, first = await gate.open(), Trainer(gate)
        texts = await conversation(gate, first, rollout, 2)
        gate.interceptor.leave(first.session)
        second = Trainer(gate)
        call = await gate.ask(rollout, *texts)
        second.check(gate)
        assert second.omitted == {call.id: 0}
        gate.interceptor.sessions.lose(second.session)
        third = Trainer(gate, resume=second.session.id)
        await answer(gate, call, "yes2")
        call = await gate.ask(rollout, *texts, "yes2", "go on 2")
        third.check(gate)
        assert third.omitted == {call.id: 0}


@pytest.mark.requirement("R22", "R32")
async def test_a_call_carries_what_another_answered_between_two_prompts_of_its_session(tmp_path: Path) -> None:
    """The sampled ids of an answer are never left out, so it does not matter whose they are."""
    async with inner_gate(tmp_path) as gate:
        rollout, first = await gate.open(), Trainer(gate)
        call = await gate.ask(rollout, "a" * 100)
        first.check(gate)
        gate.interceptor.gate.release(call)
        second = Trainer(gate)
        second.check(gate)
        assert call.holder is second.session
        gate.interceptor.leave(second.session)
        await answer(gate, call, "yes")
        later = await gate.ask(rollout, "a" * 100, "yes", "go on")
        assert call.prompt is not None
        first.check(gate)
        assert first.omitted[later.id] == call.prompt.count


@pytest.mark.requirement("R22")
async def test_the_window_counts_what_is_sent_of_a_prompt(tmp_path: Path) -> None:
    """Long conversations that go on fit beside each other."""
    async with inner_gate(tmp_path) as gate:
        rollout, trainer = await gate.open(), Trainer(gate)
        texts = await conversation(gate, trainer, rollout, 1, "b" * 2000)
        call = await gate.ask(rollout, *texts)
        assert call.plan is not None
        assert trainer.session.held_bytes < 1000 < call.plan.prompt_ids.nbytes


@pytest.mark.requirement("R32")
async def test_what_a_session_was_sent_is_bounded_and_ends_with_the_rollout(tmp_path: Path) -> None:
    """The trainer keeps no more either: sixteen branches of a rollout, and none once it is closed."""
    async with inner_gate(tmp_path) as gate:
        rollout, trainer = await gate.open(), Trainer(gate)
        for number in range(MOST_BRANCHES + 8):
            await conversation(gate, trainer, rollout, 1, f"{number} " * 40)
        memory = trainer.session.sent_prompts
        assert memory is not None
        assert len(memory._rollouts[rollout.id]) == len(trainer._kept[rollout.id]) == MOST_BRANCHES
        await gate.interceptor.rollouts.close(rollout.id, "DONE")
        trainer.check(gate)
        assert not memory._rollouts and not trainer._kept


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "ask", "answer", "read", "join", "lose", "leave", "release"]),
        st.integers(0, 2**16),
        st.integers(0, 2**16),
    ),
    min_size=20,
    max_size=60,
)


async def _any_history(directory: Path, steps: list[tuple[str, int, int]]) -> None:
    async with inner_gate(directory) as gate:
        rollouts = [await gate.open(request_id=name, rollout_id=name) for name in ("r1", "r2")]
        histories: list[list[list[str]]] = [[["a" * 80], ["b" * 80]], [["a" * 80]]]
        trainers, lost, asked = [Trainer(gate)], list[Trainer](), list[tuple[int, list[str], Call]]()
        for kind, one, other in steps:
            if kind in ("turn", "ask"):
                known = histories[one % 2]
                texts = known[-1 - other % min(3, len(known))]
                if other % 5 == 0:
                    texts = [*texts[:-1], texts[-1] + "c"]  # the last message was edited
                asked.append((one % 2, texts, await gate.ask(rollouts[one % 2], *texts)))
            if kind == "turn":
                for trainer in trainers:
                    trainer.check(gate)
            if kind in ("turn", "answer") and asked:
                at, texts, call = asked.pop(-1 if kind == "turn" else one % len(asked))
                text = "yes" * (1 + other % 3)
                await gate.interceptor.deliver(call.id, call.lease_id, completion(text))
                if call.claimed:
                    await call.ended
                    histories[at].append([*texts, text, f"go on {other % 4}"])
            elif kind == "read" and trainers:
                trainers[one % len(trainers)].check(gate)
            elif kind == "join":
                old = lost.pop().session.id if lost and other % 2 else ""
                trainers.append(Trainer(gate, resume=old))
            elif kind in ("lose", "leave") and trainers:
                trainer = trainers.pop(one % len(trainers))
                if kind == "lose":
                    gate.interceptor.sessions.lose(trainer.session)
                    lost.append(trainer)
                else:
                    gate.interceptor.leave(trainer.session)
            elif kind == "release" and asked:
                _, _, call = asked[one % len(asked)]
                gate.interceptor.gate.release(call)
        for trainer in trainers:
            trainer.check(gate)


@pytest.mark.requirement("R22", "R32")
@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_every_trainer_puts_every_prompt_together_as_the_gate_has_it(steps: list[Any]) -> None:
    """Whatever branches, edits, retries and repeated leases there are, and however sessions come and go."""
    with tempfile.TemporaryDirectory(prefix="penstock-prompts-") as directory:
        asyncio.run(_any_history(Path(directory), steps))
