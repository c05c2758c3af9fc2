"""What the gate takes for trouble: what has waited longer than somebody is ready to, by who is to look at it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import orjson
import pytest
from tests.support.services.inner_gate import completion
from tests.unit.interception.gate.test_gate_machine import Machine

from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, PolicyBounds, RolloutSpec, TokenizerRef
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.domain.results import Rejection, RejectionReason
from penstock_interception.domain.state import Credits, Selector, Session, SessionRequest
from penstock_interception.graph import LogprobsMode, VersionSpan
from penstock_interception.status.health import Health
from penstock_interception.testing import parse

PATIENCE_S = 60.0


class Watched(Machine):
    """A gate with a call that only weights of version 7 may answer, and a clock that the test owns."""

    def begin(self) -> None:
        """The agent asks."""
        self.run(self._start())
        opening = RolloutSpec(
            request_id="open",
            rollout_id="r",
            mode=Mode.INTERCEPTION_GATE,
            source=TokenizerRef("test"),
            policy=PolicyBounds(min_version=7),
        )
        rollout = self.run(self.interceptor.rollouts.open(opening, None))
        body = orjson.dumps({"messages": [{"role": "user", "content": "a"}]})
        parsed = parse(Dialect.CHAT_COMPLETIONS, body)
        digest = hashlib.sha256(body).digest()
        request = CallRequest(Dialect.CHAT_COMPLETIONS, body, digest, "k", False, Sampling(), "m")
        self.call = self.run(self.interceptor.begin(rollout, request, parsed))
        self.health = Health(self.registry, self.clock)

    def answer(self, session: Session, version: int) -> object:
        """The trainer's, sampled by these weights."""
        text = completion("bb").tokens
        assert text is not None
        versions = (VersionSpan(version, 0, text.ids.size),)
        tokens = Tokens(text.ids, np.full(text.ids.size, -0.5, np.float32), LogprobsMode.PROCESSED, versions)
        answer = Completion(tokens, finish_reason=FinishReason.STOP)
        return self.run(self.interceptor.deliver(self.call.id, self.call.lease_id, answer, session=session))

    def reasons(self) -> list[str]:
        """What is wrong for somebody with the usual patience."""
        return [trouble.reason for trouble in self.health.troubles(PATIENCE_S)]


@pytest.fixture
def gate() -> Iterator[Watched]:
    """Begun, and ended."""
    machine = Watched()
    machine.begin()
    yield machine
    machine.teardown()


@pytest.mark.requirement("R41")
def test_old_weights_are_trouble_only_without_newer_answers(gate: Watched) -> None:
    """A trainer that samples again has its time from the refusal on, however old the call; one gone is absent."""
    session = gate.interceptor.join(SessionRequest(Selector(), Credits(1)))
    gate.now += PATIENCE_S - 1
    refused = gate.answer(session, 6)
    assert isinstance(refused, Rejection) and refused.reason is RejectionReason.STALE_POLICY
    gate.now += 1
    assert gate.reasons() == []
    gate.now += PATIENCE_S
    assert gate.reasons() == ["POLICY_STUCK"]
    gate.interceptor.leave(session)
    assert gate.reasons() == ["TRAINER_ABSENT"]
