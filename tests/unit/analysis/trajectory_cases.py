"""Trajectories made by hand and by hypothesis, for the tests of exports and trainers' forms."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
from hypothesis import strategies as st

from penstock.client.types.chat import LogprobsMode, VersionSpan
from penstock.client.types.results import Failure, FailureCause, Outcome, Phase, Rollout, RolloutResult
from penstock.client.types.trajectories import Finding, Reward, Sample, Trajectory, TurnSpan


def sample(
    sample_id: str,
    turns: list[tuple[int, int, bool]],
    *,
    weight: float = 1.0,
    version: int = 1,
    truncated: bool = False,
    with_logprobs: bool = True,
) -> Sample:
    """A sample of `turns`: tokens of context, sampled tokens, and whether those are trained. Ids count from 100."""
    mask: list[bool] = []
    spans: list[TurnSpan] = []
    for number, (context, sampled, trained) in enumerate(turns):
        mask += [False] * context
        reason = "" if trained else "TRUNCATED"
        spans.append(TurnSpan(f"{sample_id}-{number}", len(mask), len(mask) + sampled, reason))
        mask += [trained] * sampled
    trained_tokens = np.array(mask, np.bool_)
    logprobs = np.where(trained_tokens, -(np.arange(len(mask)) + 1) / 8, 0).astype(np.float32)
    return Sample(
        sample_id=sample_id,
        branch_id=f"b-{sample_id}",
        input_ids=np.arange(100, 100 + len(mask), dtype=np.int32),
        loss_mask=trained_tokens,
        logprobs=logprobs if with_logprobs else None,
        logprobs_mode=LogprobsMode.PROCESSED,
        versions=tuple(VersionSpan(version + i, span.start, span.end) for i, span in enumerate(spans)),
        turns=tuple(spans),
        prompt_count=turns[0][0],
        weight=weight,
        branch_class="main",
        truncated=truncated,
    )


def trajectory(
    rollout_id: str,
    samples: list[Sample],
    *,
    reward: float | None = 1.0,
    group: str | None = "g",
    grade: str = "exact",
    cause: str = "",
    reason: str = "",
) -> Trajectory:
    """A trajectory with samples only, as a group's results have it."""
    return Trajectory(
        rollout_id=rollout_id,
        group_id=group,
        run_id="run",
        group_index=0,
        labels={},
        task_id="task",
        agent="shell",
        agent_spec_sha256="",
        calls=(),
        branches=(),
        samples=tuple(samples),
        reward=None if reward is None else Reward(reward),
        grade=grade,
        findings=(Finding("fatal", "LOGPROBS_SCRIPTED", "", None),) if grade == "unusable" else (),
        capture_level="tokens_and_logprobs",
        tokenizer_sha256=b"\1" * 32,
        chat_template_sha256=b"",
        chain_sha256=b"",
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
        end_time=None,
        duration=None,
        task_metadata={},
        failure_cause=cause.upper(),  # as the wire has it
        failure_caused_by="",
        failure_reason=reason,
    )


def failed(rollout_id: str, cause: FailureCause, *, group: str = "g") -> RolloutResult:
    """A rollout that ended before its first call."""
    failure = Failure(cause=cause, reason="SANDBOX_LOST", message="", retriable=True, phase=Phase.PREPARING)
    outcome = Outcome(failure=failure)
    rollout = Rollout(
        rollout_id=rollout_id,
        group_id=group,
        index=0,
        phase=Phase.ENDED,
        outcome=outcome,
        agent="shell",
        agent_spec_sha256="",
        task_id="task",
        labels={},
        create_time=None,
        end_time=None,
        phase_times={},
        last_sequence=0,
    )
    return RolloutResult(rollout, outcome)


TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=4)


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory | RolloutResult]:
    """Some groups of rollouts: with branches, masked turns, failures, and without rewards."""
    results: list[Trajectory | RolloutResult] = []
    for number in range(draw(st.integers(1, 6))):
        group, rollout_id = draw(st.sampled_from("gh")), f"r{number}"
        if draw(st.integers(0, 5)) == 0:
            results.append(failed(rollout_id, draw(st.sampled_from(FailureCause)), group=group))
            continue
        count = draw(st.integers(0, 3))
        samples = [
            sample(
                f"{rollout_id}.{i}",
                draw(TURNS),
                weight=1 / count,
                version=draw(st.integers(0, 9)),
                truncated=draw(st.booleans()),
                with_logprobs=draw(st.integers(0, 5)) > 0,
            )
            for i in range(count)
        ]
        results.append(
            trajectory(
                rollout_id,
                samples,
                group=group,
                reward=draw(st.none() | st.sampled_from([0.0, 0.25, 1.0])),
                grade=draw(st.sampled_from(["exact", "exact", "usable", "unusable"])),
                cause=draw(st.sampled_from(["", "", "agent", "infrastructure", "verifier"])),
            )
        )
    return results
