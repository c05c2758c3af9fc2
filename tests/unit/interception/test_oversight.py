"""What the gate takes for trouble: what has waited longer than somebody is ready to, by who is to look at it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import orjson
import pytest
from tests.unit.interception.test_gate_machine import Machine, completion

from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.calls import Arrival, Dialect, Mode, Opening, PolicyBounds, TokenizerRef
from penstock_interception.completions import Completion, Tokens
from penstock_interception.graph import LogprobsMode, VersionSpan
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import Ask, Route
from penstock_interception.oversight import Oversight
from penstock_interception.ports import Rejection, RejectionReason
from penstock_interception.sessions import Credits, Selector, Session, View

PATIENCE_S = 60.0


class Watched(Machine):
    """A gate with a call that only weights of version 7 may answer, and a clock that the test owns."""

    def begin(self) -> None:
        """The agent asks."""
        self.run(self._start())
        opening = Opening(
            request_id="open",
            rollout_id="r",
            mode=Mode.INTERCEPTION_GATE,
            source=TokenizerRef("tiny"),
            policy=PolicyBounds(min_version=7),
        )
        rollout = self.run(self.turns.open(opening, None))
        body = orjson.dumps({"messages": [{"role": "user", "content": "a"}]})
        request = ChatCompletions().parse(body, Route(Ask.COMPLETION))
        digest = hashlib.sha256(body).digest()
        arrival = Arrival(Dialect.CHAT_COMPLETIONS, body, digest, "k", False, Sampling(), "m")
        self.call = self.run(self.turns.begin(rollout, arrival, request))
        self.gate.attach(self.call)
        self.oversight = Oversight(self.gate)

    def answer(self, session: Session, version: int) -> object:
        """The trainer's, sampled by these weights."""
        text = completion("bb").tokens
        assert text is not None
        versions = (VersionSpan(version, 0, text.ids.size),)
        tokens = Tokens(text.ids, np.full(text.ids.size, -0.5, np.float32), LogprobsMode.PROCESSED, versions)
        answer = Completion(tokens, finish_reason=FinishReason.STOP)
        return self.run(self.gate.answers.accept(self.call.id, self.call.lease_id, answer, session=session))

    def reasons(self) -> list[str]:
        """What is wrong for somebody with the usual patience."""
        return [trouble.reason for trouble in self.oversight.troubles(PATIENCE_S)]


@pytest.fixture
def gate() -> Iterator[Watched]:
    """Begun, and ended."""
    machine = Watched()
    machine.begin()
    yield machine
    machine.teardown()


def test_an_answer_by_old_weights_is_trouble_only_when_none_by_newer_ones_follows(gate: Watched) -> None:
    """R41: a trainer that samples again has its time from the refusal on, however old the call; one gone is absent."""
    session = gate.gate.dispatcher.join(Selector(), Credits(1), identity="t", view=View())
    gate.now += PATIENCE_S - 1
    refused = gate.answer(session, 6)
    assert isinstance(refused, Rejection) and refused.reason is RejectionReason.STALE_POLICY
    gate.now += 1
    assert gate.reasons() == []
    gate.now += PATIENCE_S
    assert gate.reasons() == ["POLICY_STUCK"]
    gate.gate.dispatcher.leave(session)
    assert gate.reasons() == ["TRAINER_ABSENT"]
