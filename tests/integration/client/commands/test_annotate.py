"""Rewards of turns and tokens by a verifier, and annotations of judges outside: in samples, grades and exports."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import pytest
from tests.integration.client.conftest import TASK
from tests.integration.client.test_watch import connection
from tests.support.terminal.commands import invoke

from penstock.analysis.export import Table, read_rows, write
from penstock.analysis.regraded_rows import with_grade
from penstock.client import (
    Annotation,
    Command,
    FailedPrecondition,
    InvalidArgument,
    Mode,
    NotFound,
    Penstock,
    RewardFrom,
    RolloutHandle,
    TurnReward,
    Verifier,
)

__all__ = ["connection"]  # a fixture
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.requirement("R135")]
JUDGE = "judge-v2"


def writes(**reward: object) -> Verifier:
    """A verifier that writes this reward, if the note was copied."""
    content = orjson.dumps(reward).decode()
    shell = f"""grep -q word out.txt && echo '{content}' > "$PENSTOCK_REWARD_FILE" """
    return Verifier(commands=[Command(shell=shell)], reward=RewardFrom.FILE)


async def ended(ps: Penstock, run_id: str, verifier: Verifier) -> RolloutHandle:
    task = replace(TASK, verifier=verifier)
    handle = await ps.rollouts.create(task, "shell", run_id=run_id, mode=Mode.TRANSPARENT_PROXY)
    result = await handle.result()
    assert result.reward is not None, result.outcome
    return handle


async def test_turns_and_tokens_have_rewards_in_samples_and_further_grades_have_their_own(
    ps: Penstock, tmp_path: Path
) -> None:
    """A turn without a reward has NaN, which is not zero."""
    turns = [{"call": 1, "reward": 0.0, "components": {"style": 0.5}}, {"call": 0, "reward": -2}]
    handle = await ended(ps, "turns", writes(reward=0.75, turns=turns))
    whole = await handle.trajectory()
    first, second = whole.calls[:2]
    assert whole.reward is not None and whole.reward.turns == (
        TurnReward(first.call_id, -2.0),
        TurnReward(second.call_id, 0.0, {"style": 0.5}),
    )
    (sample,) = whole.samples
    assert sample.turn_rewards.tolist() == [-2.0, 0.0] and sample.token_rewards is None

    values = [float(number) for number in range(second.sampled_count)]
    await handle.regrade(writes(reward=1, turns=[{"call": 1, "tokens": values}]), name="tokens")
    (sample,) = (await handle.trajectory(samples_only=True, grade="tokens")).samples
    span = sample.turns[1]
    assert sample.turn_rewards.dtype == np.float64 and all(map(math.isnan, sample.turn_rewards))
    assert sample.token_rewards is not None and sample.token_rewards.dtype == np.float32
    assert sample.token_rewards.shape == sample.input_ids.shape
    assert sample.token_rewards[span.start : span.end].tolist() == values
    assert sample.token_rewards.sum() == sum(values)
    wrong = await handle.regrade(writes(reward=1, turns=[{"call": 9, "reward": 1}]), name="wrong")
    assert wrong.failure is not None and (wrong.failure.reason, wrong.reward) == ("REWARD_INVALID", None)

    rollouts = [one async for one in ps.rollouts.list(run_id="turns")]
    for table in (Table.SEQUENCES, Table.TURNS):
        files = {grade: tmp_path / f"{table}-{grade}.jsonl" for grade in ("first", "tokens")}
        for grade, file in files.items():
            await write(ps.rollouts.export(run_id="turns", grade=grade), file, table=table)
        assert list(with_grade(read_rows(files["first"]), rollouts, "tokens")) == list(read_rows(files["tokens"]))
    rows = list(read_rows(tmp_path / "turns-first.jsonl"))
    assert [(row["turn_reward"], row["turn_reward_components"]) for row in rows] == [(-2.0, {}), (0.0, {"style": 0.5})]
    (row,) = read_rows(tmp_path / "sequences-tokens.jsonl")
    assert row["turn_rewards"] == [None, None] and row["token_rewards"] == sample.token_rewards.tolist()


async def test_annotations_stay_beside_the_reward_and_outlive_a_further_grade(ps: Penstock, tmp_path: Path) -> None:
    handle = await ended(ps, "judged", writes(reward=0.75))
    before = await handle.trajectory()
    call = before.calls[1]
    tokens = np.arange(call.sampled_count, dtype=np.float32)
    given = (
        Annotation(name="helpful", author=JUDGE, value=0.9, details={"why": "clear"}, chain_sha256=before.chain_sha256),
        Annotation(name="step", author=JUDGE, call_id=call.call_id, value=-1, token_values=tokens),
    )
    await handle.annotate(*given)
    await ps.rollouts.annotate(handle.rollout_id, *given)
    await handle.regrade(writes(reward=0.5), name="again")
    found = await handle.trajectory(grade="again", samples_only=True)
    assert found.reward is not None and found.reward.value == 0.5 and found.chain_sha256 == before.chain_sha256
    whole, step = found.annotations
    assert (whole.name, whole.author, whole.call_id, whole.value) == ("helpful", JUDGE, None, 0.9)
    assert (whole.details, whole.chain_sha256) == ({"why": "clear"}, before.chain_sha256)
    assert step.token_values is not None and step.token_values.tolist() == tokens.tolist()
    assert whole.create_time is not None and whole.create_time == step.create_time
    (sample,) = found.samples
    span = sample.turns[1]
    by_turn = found.turn_values(sample, "step", JUDGE)
    assert math.isnan(by_turn[0]) and by_turn[1] == -1.0
    by_token = found.token_values(sample, "step", JUDGE)
    assert by_token is not None and by_token.dtype == np.float32 and len(by_token) == len(sample)
    assert by_token[span.start : span.end].tolist() == tokens.tolist() and by_token.sum() == tokens.sum()
    assert found.token_values(sample, "step", "another") is None

    for name in ("annotations.jsonl", "annotations.parquet"):
        assert await write(ps.rollouts.export(run_id="judged"), tmp_path / name, table="annotations") == 2
    first, second = read_rows(tmp_path / "annotations.parquet")
    assert [first, second] == list(read_rows(tmp_path / "annotations.jsonl"))
    assert (first["details"], first["value"], first["call_id"]) == ({"why": "clear"}, 0.9, None)
    assert (second["token_values"], second["rollout_rows"]) == (tokens.tolist(), 2)
    assert first["judged_chain_sha256"] == first["rollout_chain_sha256"] == before.chain_sha256.hex()


async def test_what_cannot_be_annotated_is_refused(ps: Penstock) -> None:
    """A rollout that runs, another's call or chain, and a text for numbers."""
    handle = await ended(ps, "refused-judgements", writes(reward=1))
    judged = Annotation(name="helpful", author=JUDGE, value=1.0)
    with pytest.raises(NotFound, match="has no call") as caught:
        await handle.annotate(judged, replace(judged, call_id="other"))
    assert caught.value.reason == "CALL_UNKNOWN"
    with pytest.raises(InvalidArgument, match=r"annotations\[0\].chain_sha256: is that of another trajectory"):
        await handle.annotate(replace(judged, chain_sha256=bytes(32)))
    with pytest.raises(InvalidArgument, match="token_values must be"):
        await handle.annotate(replace(judged, token_values=["high"]))  # type: ignore[arg-type]
    assert not (await handle.trajectory(samples_only=True)).annotations
    waiting = await ps.rollouts.create(TASK, "shell", run_id="nobody-answers")
    with pytest.raises(FailedPrecondition) as runs:
        await waiting.annotate(judged)
    await waiting.cancel()
    assert runs.value.reason == "ROLLOUT_RUNNING"


async def test_the_command_takes_one_annotation_or_a_file_of_them(
    ps: Penstock, connection: Mapping[str, str], tmp_path: Path
) -> None:
    handle = await ended(ps, "by-command", writes(reward=1))

    async def annotate(*given: str) -> tuple[int, str, str]:
        command = partial(invoke, "annotate", handle.rollout_id, *given, environment=connection)
        return await asyncio.to_thread(command)

    code, printed, said = await annotate("--name", "step", "--author", "me", "--call", "1", "--value", "0.5")
    assert (code, printed) == (0, f"1 annotation of {handle.rollout_id}\n"), said
    calls = (await handle.trajectory()).calls
    lines = [
        {"name": "helpful", "value": 1, "details": {"why": "clear"}},
        {"call": calls[0].call_id, "token_values": [0.5] * calls[0].sampled_count},
    ]
    file = tmp_path / "judged.jsonl"
    file.write_bytes(b"\n\n".join(map(orjson.dumps, lines)))
    of_file = ("--file", str(file), "--name", "step", "--author", JUDGE)
    _, printed, said = await annotate(*of_file, "--json")
    assert orjson.loads(printed) == {"rollout_id": handle.rollout_id, "annotations": 2}, said
    found = [(one.name, one.author, one.call_id, one.value) for one in (await handle.trajectory()).annotations]
    assert found == [
        ("step", "me", calls[1].call_id, 0.5),
        ("helpful", JUDGE, None, 1.0),
        ("step", JUDGE, calls[0].call_id, None),
    ]
    file.write_text('{"value": 1}\n{"value": 1, "score": 2}')
    code, _, said = await annotate(*of_file)
    assert code == 2 and f"line 2 of {file}: unknown score; there are name" in said
