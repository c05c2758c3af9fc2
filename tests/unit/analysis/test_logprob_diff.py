"""The gap between two sides' logprobs, in figures that can be checked by hand."""

import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.analysis.logprob_diff import Scored, compare, measure
from penstock.analysis.logprob_diff_rows import RowCounts, read_arrays, with_arrays, with_column
from penstock.analysis.token_text import Pieces
from penstock.client import InvalidArgument, LogprobsMode, TurnSpan, VersionSpan
from penstock.client.types.logprob_diff import Gap
from penstock.client.types.trajectories import Sample
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec

LOGPROBS = npst.arrays(np.float32, st.integers(1, 40), elements=st.floats(-50, 0, width=32))


@pytest.mark.requirement("R83")
def test_the_figures_of_two_tokens_are_those_that_one_computes_by_hand() -> None:
    """D is ln 2 and -ln 2, so the ratios are 2 and 1/2."""
    gap = measure([-2.0, -2.0], [-2.0 + math.log(2), -2.0 - math.log(2)])
    assert gap.tokens == 2 and gap.mean == pytest.approx(0.0, abs=1e-15)
    assert gap.mean_abs == gap.max_abs == pytest.approx(math.log(2))
    # (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2
    assert gap.kl == pytest.approx(0.25)
    assert gap.ratio_mean == pytest.approx(1.25) and gap.ratio_p50 == pytest.approx(1.25)
    assert gap.clipped_share == 1.0
    # 2.5^2 / 4.25
    assert gap.effective_tokens == pytest.approx(6.25 / 4.25)
    assert gap.effective_share == pytest.approx(6.25 / 8.5)


def test_a_tiny_gap_keeps_its_digits() -> None:
    """exp(d) - 1 - d is d^2 / 2 for small d, which a subtraction of nearly equal numbers would lose."""
    assert measure([-1.0], [-1.0 + 2**-20]).kl == pytest.approx(2**-41, rel=1e-5)


@given(LOGPROBS)
def test_equal_logprobs_have_no_gap_at_all(logprobs: Any) -> None:
    """Not nearly none: zero."""
    gap = measure(logprobs, logprobs.astype(np.float64))
    assert gap.mean == gap.mean_abs == gap.max_abs == gap.kl == gap.clipped_share == 0.0
    assert gap.ratio_mean == gap.ratio_p01 == gap.ratio_p99 == 1.0
    assert gap.effective_tokens == gap.tokens == logprobs.size and gap.effective_share == 1.0


@pytest.mark.requirement("R83")
@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(*[npst.arrays(np.float64, n, elements=st.floats(-1e300, 0))] * 2))
)
def test_every_figure_is_finite_and_in_its_range_whatever_the_logprobs(pair: tuple[Any, Any]) -> None:
    """K3 is never negative, and no ratio however large becomes infinite."""
    gap = measure(*pair)
    figures = {name: value for name, value in asdict(gap).items() if name != "policy_id"}
    assert all(math.isfinite(value) for value in figures.values() if value is not None)
    assert gap.kl >= 0 and gap.ratio_mean >= 0 and 0 <= gap.clipped_share <= 1
    assert 0 < gap.effective_share <= 1 and 1 <= gap.effective_tokens <= gap.tokens * (1 + 1e-12)
    assert abs(gap.mean) <= gap.max_abs * (1 + 1e-12) and gap.mean_abs <= gap.max_abs * (1 + 1e-12)


@pytest.mark.requirement("R84")
@given(LOGPROBS, st.integers(0, 2**32 - 1))
def test_masked_tokens_change_no_figure(logprobs: Any, seed: int) -> None:
    """Context is never compared, not even when it is no number."""
    rng = np.random.default_rng(seed)
    mask = rng.random(logprobs.size) < 0.5
    mask[rng.integers(logprobs.size)] = True
    trainer = logprobs - rng.random(logprobs.size)
    hidden = np.where(mask, trainer, np.nan)
    assert measure(logprobs, hidden, mask=mask) == measure(logprobs[mask], trainer[mask])


@pytest.mark.requirement("R87")
def test_each_version_has_its_own_figures_and_missing_versions_are_unknown() -> None:
    """Per policy version, oldest first."""
    versions = (VersionSpan(4, 1, 3), VersionSpan(5, 3, 4))
    item = Scored(
        engine=[-9, -1, -1, -1, -1], trainer=[-1, -1.1, -1.3, -1.5, -1.7], mask=[0, 1, 1, 1, 1], versions=versions
    )
    report = compare([item, Scored(engine=[-2.0], trainer=[-2.0], versions=(VersionSpan(5, 0, 1),))])
    assert [(gap.policy_version, gap.tokens) for gap in report.versions] == [(None, 1), (4, 2), (5, 2)]
    assert [gap.mean_abs for gap in report.versions] == pytest.approx([0.7, 0.2, 0.25])
    assert (report.overall.tokens, report.overall.policy_version, report.sequences) == (5, None, 2)


def test_the_worst_tokens_say_where_they_stand() -> None:
    """Rollout, turn, token and text, largest first, over all sequences."""
    turns = (TurnSpan("a", 1, 2), TurnSpan("b", 3, 5))
    first = Scored(
        engine=[0, -1, 0, -1, -1],
        trainer=[0, -1.5, 0, -1, -3],
        mask=[0, 1, 0, 1, 1],
        versions=(VersionSpan(7, 0, 5),),
        token_ids=[10, 11, 12, 13, 14],
        turns=turns,
        rollout_id="r1",
    )
    second = Scored(engine=[-1.0], trainer=[-2.0], rollout_id="r2")
    report = compare([first, second], worst=2, text=lambda index: f"<{index}>")
    one, two = report.worst
    assert (one.rollout_id, one.turn, one.call_id, one.position) == ("r1", 1, "b", 4)
    assert (one.token_id, one.text, one.policy_version, one.gap) == (14, "<14>", 7, -2.0)
    assert (two.rollout_id, two.turn, two.text) == ("r2", None, "")
    table = report.table()
    assert "v7" in table and "unknown" in table and "rollout r1, turn 1, token 4, id 14 '<14>'" in table


@pytest.mark.requirement("R83")
@pytest.mark.parametrize(
    ("item", "field", "reason"),
    [
        (Scored(engine=[], trainer=[]), "mask", "GAP_EMPTY"),
        (Scored(engine=[-1.0], trainer=[-1.0], mask=[False]), "mask", "GAP_EMPTY"),
        (Scored(engine=[-1.0, -1.0], trainer=[-1.0]), "trainer", "GAP_SHAPE"),
        (Scored(engine=[[-1.0]], trainer=[[-1.0]]), "engine", "GAP_SHAPE"),
        (Scored(engine=["x"], trainer=[-1.0]), "engine", "GAP_SHAPE"),
        (Scored(engine=[-1.0], trainer=[-1.0], mask=[True, True]), "mask", "GAP_SHAPE"),
        (Scored(engine=[-1.0], trainer=[-1.0], token_ids=[1, 2]), "token_ids", "GAP_SHAPE"),
        (Scored(engine=[-1.0], trainer=[-1.0], versions=(VersionSpan(0, 0, 2),)), "versions", "GAP_SHAPE"),
        (Scored(engine=[-1.0], trainer=[-1.0], turns=(TurnSpan("a", 1, 0),)), "turns", "GAP_SHAPE"),
        (Scored(engine=[-1.0, -np.inf], trainer=[-1.0, -1.0]), "engine", "GAP_NOT_FINITE"),
        (Scored(engine=[-1.0], trainer=[np.nan]), "trainer", "GAP_NOT_FINITE"),
        (Scored(engine=[-1.0], trainer=[1.0]), "trainer", "GAP_NOT_LOGPROBS"),
        (Scored(engine=[-1.0], trainer=[-1.0], mode=LogprobsMode.SCRIPTED), "mode", "LOGPROBS_SCRIPTED"),
        (
            Scored(engine=[-1.0], trainer=[-1.0], mode=LogprobsMode.PROCESSED, trainer_mode=LogprobsMode.RAW),
            "trainer_mode",
            "LOGPROBS_MODES_MIXED",
        ),
    ],
)
def test_incomparable_rows_are_refused_by_field(item: Scored, field: str, reason: str) -> None:
    """Equal lengths, finite, at most 0; raw and processed are never mixed; nothing is left out in silence."""
    with pytest.raises(InvalidArgument) as caught:
        compare([item])
    assert caught.value.reason == reason and [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.requirement("R86")
def test_sequences_of_two_kinds_of_logprobs_are_not_one_report() -> None:
    """What a logprob is of is declared by the engine."""
    kinds = [Scored(engine=[-1.0], trainer=[-1.0], mode=mode) for mode in (LogprobsMode.RAW, LogprobsMode.PROCESSED)]
    with pytest.raises(InvalidArgument) as caught:
        compare(kinds)
    assert caught.value.reason == "LOGPROBS_MODES_MIXED"


def test_arrays_of_any_one_shape_are_measured_together() -> None:
    """A batch with its mask is what trainers have at hand."""
    engine = -np.arange(6.0).reshape(2, 3)
    assert measure(engine, engine - 0.5, mask=engine < -2).tokens == 3
    with pytest.raises(InvalidArgument) as caught:
        measure(engine, engine.ravel())
    assert caught.value.reason == "GAP_SHAPE"


def sequence(**changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": "r", "sample_id": "s", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -1.0, -2.0], "logprobs_mode": "processed",
        "turn_spans": [{"call_id": "c", "start": 2, "end": 4}],
        "policy_spans": [{"policy_version": 3, "start": 2, "end": 4}], "samplings": [{"temperature": 1.0}],
        "mine": [0.0, -1.0, -1.5, -2.0],
    } | changes  # fmt: skip


def turn(**changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": "r", "call_id": "c", "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4],
        "completion_logprobs": [-1.0, -2.0], "logprobs_mode": "processed", "sampling_used": {"temperature": 1.0},
        "policy_spans": [{"policy_version": 3, "start": 0, "end": 2}], "mine": [-1.5, -2.0],
    } | changes  # fmt: skip


@pytest.mark.requirement("R82")
def test_tables_and_both_sources_of_trainer_logprobs_agree(tmp_path: Path) -> None:
    """The engine's own logprobs of an export, beside those of a column or of an .npz by id."""
    np.savez(tmp_path / "mine.npz", s=[0.0, -1.0, -1.5, -2.0], c=[-1.5, -2.0])
    arrays, told = read_arrays(tmp_path / "mine.npz"), RowCounts()
    reports = [
        compare(found)
        for row in (sequence(), turn())
        for found in (with_column([row], "mine", told), with_arrays([row], arrays, told))
    ]
    assert {report.versions for report in reports} == {reports[0].versions}
    (gap,) = reports[0].versions
    assert (gap.policy_version, gap.tokens, gap.mean) == (3, 2, -0.25)
    assert not list(told.notes())


@pytest.mark.requirement("R82", "R87")
@pytest.mark.parametrize("row", [sequence, turn])
def test_equal_version_numbers_of_two_policies_are_not_one_version(row: Callable[..., dict[str, Any]]) -> None:
    """Each policy counts its own versions."""
    rows = [row(policy_id="solver"), row(policy_id="critic", mine=[*row()["mine"][:-1], -3.0])]
    report = compare(with_column(rows, "mine", RowCounts()))
    assert [(gap.policy_id, gap.policy_version, gap.tokens) for gap in report.versions] == [
        ("critic", 3, 2),
        ("solver", 3, 2),
    ]
    assert [gap.max_abs for gap in report.versions] == [1.0, 0.5]
    assert (report.overall.policy_id, report.overall.policy_version, report.overall.tokens) == ("", None, 4)
    assert report.policies == ("critic", "solver") and report.worst[0].policy_id == "critic"
    table = report.table()
    assert "   critic v3 " in table and "   solver v3 " in table and "rollout r, policy critic, turn 0" in table
    assert [report.name(gap) for gap in report.versions] == ["critic v3", "solver v3"]


def test_a_report_of_one_policy_names_it_in_no_line() -> None:
    """It looks as that of rollouts without names."""
    named, plain = (
        compare(with_column([turn(policy_id=name)], "mine", RowCounts())).table() for name in ("solver", None)
    )
    assert named == plain and "solver" not in named
    mixed = compare(with_column([turn(policy_id=name) for name in ("solver", None)], "mine", RowCounts()))
    assert [mixed.name(gap) for gap in mixed.versions] == ["v3", "solver v3"]


@pytest.mark.requirement("R82", "R87")
def test_samples_of_a_trajectory_keep_their_policies_apart() -> None:
    """A branch has a sample for each trained policy, with the same tokens and versions."""
    spans = (VersionSpan(0, 1, 2), VersionSpan(0, 2, 3))
    pair = [
        Sample(
            sample_id=policy, branch_id="b", input_ids=np.array([1, 2, 3], np.int32), loss_mask=np.array(mask, bool),
            logprobs=np.array([0, -1, -1], np.float32), logprobs_mode=LogprobsMode.PROCESSED, versions=spans, turns=(),
            prompt_count=1, weight=1.0, branch_class="main", truncated=False, policy_id=policy,
        )
        for policy, mask in (("solver", [0, 1, 0]), ("critic", [0, 0, 1]))
    ]  # fmt: skip
    report = compare(Scored.of_sample(sample, [0.0, -1.0, -3.0]) for sample in pair)
    assert [(gap.policy_id, gap.mean) for gap in report.versions] == [("critic", -2.0), ("solver", 0.0)]


@pytest.mark.requirement("R26", "R82")
def test_rows_of_other_policies_are_left_out_and_counted() -> None:
    """By either source of the trainer's logprobs; a policy that no row has is refused."""
    rows = [turn(policy_id="student"), sequence(policy_id="teacher"), turn()]
    arrays = {"s": np.zeros(4), "c": np.array([-1.5, -2.0])}
    column, npz = RowCounts(), RowCounts()
    for scored, told in (
        (with_column(rows, "mine", column, policy="student"), column),
        (with_arrays(rows, arrays, npz, policy="student"), npz),
    ):
        report = compare(scored, notes=told.notes())
        assert [(gap.policy_id, gap.tokens) for gap in report.versions] == [("student", 2)]
        assert report.notes == ("left out: 4 tokens of other policies (without a name, teacher)",)
    assert [one.policy_id for one in with_column(rows, "mine", RowCounts(), policy="")] == [""]
    with pytest.raises(InvalidArgument, match="teacher") as caught:
        list(with_column(rows, "mine", RowCounts(), policy="studnet"))
    assert caught.value.reason == "POLICY_UNKNOWN"


@pytest.mark.requirement("R26", "R82")
def test_row_without_engine_logprobs_is_left_out_and_counted() -> None:
    """Nothing is filled in; R26: nothing is dropped silently."""
    told = RowCounts()
    rows = [sequence(logprobs=None), turn(completion_logprobs=None), turn()]
    assert len(list(with_column(rows, "mine", told))) == 1
    assert list(told.notes()) == ["left out: 2 rows without the engine's tokens and logprobs"]


@pytest.mark.parametrize(
    "row",
    [
        {},
        sequence(logprobs=[0.0]),
        sequence(loss_mask=[1, 0, 0, 0]),
        sequence(samplings=[]),
        sequence(logprobs_mode="neither"),
        sequence(input_ids="text"),
        sequence(turn_spans=[{}]),
        sequence(mine=[0.0]),
        sequence(mine=None),
        turn(mine=["x"]),
        turn(policy_spans=3),
    ],
)
def test_a_row_that_is_none_is_refused(row: dict[str, Any]) -> None:
    """A file of the wrong table, or one that somebody changed, is a typed error with the row."""
    with pytest.raises(InvalidArgument) as caught:
        list(with_column([row], "mine", RowCounts()))
    assert caught.value.reason == "ROW_INVALID"


def test_a_file_that_is_no_archive_of_arrays_is_refused(tmp_path: Path) -> None:
    """Nothing in it is executed: pickled objects are refused like anything else."""
    np.savez(tmp_path / "objects.npz", s=np.array([{}], object))
    (tmp_path / "text.npz").write_text("no", "utf-8")
    for name in ("objects.npz", "text.npz", "absent.npz"):
        with pytest.raises(InvalidArgument) as caught:
            read_arrays(tmp_path / name)
        assert caught.value.reason == "FILE_UNREADABLE"


def test_a_token_s_text_is_what_the_tokenizer_decodes() -> None:
    """Read from the file alone, without the tokenizer's library."""
    files = tiny_tokenizer.build(["write the word plum to a.txt \u00e9"])
    pieces, codec = Pieces(files.tokenizer_json), Codec.load(files)
    for index in range(codec.vocab_size):
        assert pieces.text(index) == codec.decode([index])
    assert pieces.text(10**6) == ""
    with pytest.raises(InvalidArgument):
        Pieces(b"{}")
    spaced = orjson.dumps({"model": {"vocab": [["\u2581the", -1.0]]}, "decoder": {"type": "Metaspace"}})
    assert Pieces(spaced).text(0) == " the"


def test_a_report_is_plain_values_for_programs() -> None:
    """`--json` has what the table has."""
    report = compare([Scored(engine=[-1.0], trainer=[-1.5])])
    assert orjson.loads(orjson.dumps(report.as_dict()))["overall"].keys() == {field.name for field in fields(Gap)}
    assert "1 tokens" in str(report)
