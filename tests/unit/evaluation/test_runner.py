"""What an evaluation adds up from the events of one rollout."""

from __future__ import annotations

import pytest
from tests.unit.analysis.test_prices import attempt_of
from tests.unit.cli.test_group_progress import LOST, event

from penstock.analysis.prices import Used
from penstock.client.types.results import AttemptFailed, CallFinished
from penstock.client.wire.results import trajectory as from_proto
from penstock.evaluation.attempts import Attempt
from penstock.evaluation.runner import _completed, _Story


@pytest.mark.requirement("R74")
def test_an_answer_that_a_further_attempt_replays_is_paid_once() -> None:
    """Also one that no attempt replayed, and one that was only seen as replayed: the driver had no event of it."""
    story = _Story()
    for call in from_proto(attempt_of("e0", "lost")).calls:
        story.add(event("r", CallFinished(call)))
    story.add(event("r", AttemptFailed(1, LOST)))
    for call in from_proto(attempt_of("c0", "c1", "c2", replayed=2)).calls:
        story.add(event("r", CallFinished(call)))
    attempt = _completed(Attempt(task_id="t", index=0, again=0, rollout_id="r"), story, {})
    assert attempt.calls == 3 and attempt.used == (Used("m", 40, 8, 12),)
