"""Results directories: what is written stays, what was torn goes, and nothing of another evaluation comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from penstock.analysis.prices import Used
from penstock.client import FailedPrecondition, InvalidArgument
from penstock.evaluation import Attempt, Book, Ran, read_attempts, read_config, summarise
from penstock.evaluation.attempts import ATTEMPTS_FILE, CONFIG_FILE
from penstock.evaluation.compare import compare

CONFIG: dict[str, Any] = {
    "name": "mine", "agent": "shell", "model": "m", "attempts": 2, "tasks": {"a": "1", "b": "2"}, "temperature": None,
}  # fmt: skip


def attempt(task_id: str = "a", index: int = 0, reward: float | None = 1.0, **more: Any) -> Attempt:
    return Attempt(task_id=task_id, index=index, again=more.pop("again", 0), rollout_id="r", reward=reward, **more)


def test_written_attempts_are_read_again_under_the_same_id(tmp_path: Path) -> None:
    """Issue 6, point 6: a results directory is all that an evaluation needs to go on."""
    ran = Ran(phase="verifying", command="true", end="exit 0", seconds=0.5, output="ä\n")
    full = attempt(
        reward=0.5, components={"x": 1.0}, ran=(ran,), said="<b>", range=(-1.0, 1.0), used=(Used("m", 5, 3, 2),)
    )
    with Book(tmp_path / "out", CONFIG) as book:
        book.add(full)
        eval_id = book.eval_id
    with Book(tmp_path / "out", {**CONFIG, "attempts": 5}) as book:
        assert book.attempts == [full]
        assert book.eval_id == eval_id
    assert read_config(tmp_path / "out")["attempts"] == 5


@given(st.integers(0, 2000))
def test_file_cut_by_a_crash_loses_at_most_its_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Issue 6, point 6: kill -9 while a line is written."""
    folder = tmp_path_factory.mktemp("book")
    with Book(folder, CONFIG) as book:
        for index in range(4):
            book.add(attempt(index=index))
        whole = list(book.attempts)
    file = folder / ATTEMPTS_FILE
    content = file.read_bytes()[:cut]
    file.write_bytes(content)
    kept = content.count(b"\n")
    assert read_attempts(folder) == whole[:kept]
    with Book(folder, CONFIG) as book:
        assert book.attempts == whole[:kept]
        book.add(whole[0])
    assert read_attempts(folder) == [*whole[:kept], whole[0]]


def test_two_evaluations_do_not_write_to_one_directory(tmp_path: Path) -> None:
    """Issue 6, point 6: a second process is refused by name; when the first is gone it may."""
    with Book(tmp_path, CONFIG):
        with pytest.raises(FailedPrecondition) as caught:
            Book(tmp_path, CONFIG)
        assert caught.value.reason == "EVAL_IN_USE"
    Book(tmp_path, CONFIG).close()


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "named"),
    [({"agent": "pi"}, "agent"), ({"temperature": 0.5}, "temperature"), ({"tasks": {"a": "other"}}, "task a")],
)
def test_the_results_of_another_agent_model_or_task_are_not_mixed_in(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    """What would change the results is refused; more tasks and more attempts may come."""
    Book(tmp_path, CONFIG).close()
    with pytest.raises(FailedPrecondition, match=named) as caught:
        Book(tmp_path, {**CONFIG, **change})
    assert caught.value.reason == "EVAL_CHANGED"
    with Book(tmp_path, {**CONFIG, "attempts": 9, "tasks": {"c": "3"}}) as book:
        assert book.config["tasks"] == {"a": "1", "b": "2", "c": "3"}


@pytest.mark.requirement("R74")
def test_a_resume_with_fewer_attempts_hides_none(tmp_path: Path) -> None:
    """`eval show` and `report` are over the most that were ever asked for."""
    for wanted in (5, 1, 3):
        Book(tmp_path, {**CONFIG, "attempts": wanted}).close()
    assert read_config(tmp_path)["attempts"] == 5


ANSWERS: dict[str, Any] = {
    "model_dir": "/m", "model_files": "1", "engine": "numpy", "script": None, "served_model": None,
    "policy_version": None, "task_models": {"a": "", "b": "1"},
}  # fmt: skip


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_files": "2"}, "model_files"),
        ({"model_dir": "/n"}, "model_dir"),
        ({"script": "1"}, "script"),
        ({"engine": "vllm"}, "engine"),
        ({"served_model": "m", "policy_version": 0}, "policy_version, served_model"),
        ({"task_models": {"a": "1"}}, "models of task a"),
    ],
)
def test_the_results_of_what_answers_otherwise_are_not_mixed_in(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    """Its names may be the same. A directory of an older version does not tell: it is resumed, and tells from then."""
    Book(tmp_path / "known", {**CONFIG, **ANSWERS}).close()
    with pytest.raises(FailedPrecondition, match=f": {named} changed") as caught:
        Book(tmp_path / "known", {**CONFIG, **ANSWERS, **change})
    assert caught.value.reason == "EVAL_CHANGED"
    Book(tmp_path / "known", {**CONFIG, **ANSWERS}).close()
    Book(tmp_path / "older", CONFIG).close()
    Book(tmp_path / "older", {**CONFIG, **ANSWERS, **change}).close()
    with pytest.raises(FailedPrecondition, match=f": {named} changed"):
        Book(tmp_path / "older", {**CONFIG, **ANSWERS})


@pytest.mark.requirement("R63")
def test_further_tasks_come_with_their_models(tmp_path: Path) -> None:
    Book(tmp_path, {**CONFIG, **ANSWERS}).close()
    Book(tmp_path, {**CONFIG, **ANSWERS, "tasks": {"c": "3"}, "task_models": {"c": "9"}}).close()
    assert read_config(tmp_path)["task_models"] == {"a": "", "b": "1", "c": "9"}


def test_a_directory_without_results_and_a_line_that_is_none_are_named(tmp_path: Path) -> None:
    """Issue 6, point 6: typed errors, with the file and the line."""
    with pytest.raises(InvalidArgument, match=r"eval\.json") as caught:
        read_config(tmp_path)
    assert caught.value.reason == "EVAL_UNREADABLE"
    with pytest.raises(InvalidArgument, match=r"no results of an evaluation: there is no such directory$"):
        read_config(tmp_path / "nosuch")
    (tmp_path / CONFIG_FILE).write_text('{"schema": 99, "tasks": {}}')
    with pytest.raises(InvalidArgument, match="schema 99"):
        read_config(tmp_path)
    (tmp_path / ATTEMPTS_FILE).write_bytes(attempt().line() + b"{}\n")
    with pytest.raises(InvalidArgument, match="line 2"):
        read_attempts(tmp_path)


@pytest.mark.requirement("R74")
def test_ungraded_attempts_count_nowhere_and_show_their_cause() -> None:
    """Not graded is not zero; an attempt that was cut short and graded counts."""
    attempts = [
        attempt("a", 0, 1.0),
        attempt("a", 1, None, cause="infrastructure", reason="SANDBOX_LOST"),
        attempt("b", 0, None, cause="infrastructure", reason="SANDBOX_LOST", retriable=True),
        attempt("b", 0, 0.0, again=1, cause="timeout", reason="AGENT_TIMED_OUT"),
        attempt("b", 7, 1.0),
    ]
    found = summarise(attempts, ["a", "b"], 2)
    a, b = found.tasks
    assert (a.attempts, a.passed, a.excluded, a.missing) == (1, 1, 1, 0)
    assert (b.attempts, b.passed, b.excluded, b.missing) == (1, 0, 0, 1)
    assert found.pass_at[1].value == 0.5
    assert 2 not in found.pass_at
    assert found.excluded == {"infrastructure: SANDBOX_LOST": 1}
    assert found.ended == {"timeout: AGENT_TIMED_OUT": 1}
    assert found.repeated == 1
    assert not found.complete


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_attempts_ended_changes_nothing(dice: Any) -> None:
    """Issue 6, point 6: an interrupted run and one that was not come to the same table."""
    attempts = [attempt(task, index, float(index % 2) / 2) for task in "abc" for index in range(4)]
    expected = summarise(attempts, "abc", 4).table()
    dice.shuffle(attempts)
    assert summarise(attempts, "abc", 4).table() == expected


@pytest.mark.requirement("R73")
def test_the_threshold_is_a_share_of_the_range_of_rewards() -> None:
    """A reward of 0.5 in [-1, 1] is three quarters of what there is."""
    attempts = [attempt("a", 0, 0.5, range=(-1.0, 1.0))]
    assert [summarise(attempts, ["a"], 1, share).tasks[0].passed for share in (0.7, 0.75, 0.76)] == [1, 1, 0]


@given(st.floats(-1e12, 1e12), st.floats(1e-12, 1e12), st.floats(0.0, 1.0))
@example(0.0, 1e-10, 1.0)
@example(-1e8 - 0.3, 1e8 + 1.0, 1.0)
def test_passing_depends_on_no_scale_of_rewards(low: float, width: float, threshold: float) -> None:
    """The maximum passes every threshold and the minimum none that is above 0, but for rounding."""
    high = low + width
    assume(high - low > 1e-6 * abs(low))
    assert attempt(reward=high, range=(low, high)).passed(1.0)
    assert attempt(reward=low + threshold * (high - low), range=(low, high)).passed(threshold)
    if threshold > 1e-6:
        assert not attempt(reward=low, range=(low, high)).passed(threshold)


def test_a_comparison_pairs_the_tasks_that_both_have() -> None:
    """Issue 6, point 6: what one of the two lacks is named and not compared."""
    before = summarise([attempt("a", 0, 1.0), attempt("b", 0, 0.0), attempt("x", 0, 1.0)], ["a", "b", "x"], 1)
    after = summarise([attempt("a", 0, 1.0), attempt("b", 0, 1.0), attempt("y", 0, 1.0)], ["a", "b", "y"], 1)
    found = compare(before, after)
    assert [(task.task_id, task.difference) for task in found.tasks] == [("a", 0.0), ("b", 1.0)]
    assert (found.only_before, found.only_after) == (("x",), ("y",))
    assert found.difference == 0.5 and found.half_width == pytest.approx(0.98, abs=0.01)
    assert compare(before, summarise([], [], 1)).difference is None


@pytest.mark.requirement("R74")
def test_a_comparison_leaves_out_tasks_that_changed() -> None:
    """The same id is not the same task; a digest that one of the two does not have says nothing."""
    names = ["a", "b", "c"]
    before = summarise([attempt(name, 0, 0.0) for name in names], names, 1)
    after = summarise([attempt(name, 0, 1.0) for name in names], names, 1)
    found = compare(before, after, {"a": "1", "b": "2"}, {"a": "1", "b": "other", "c": "3"})
    assert [task.task_id for task in found.tasks] == ["a", "c"]
    assert found.changed == ("b",) and found.as_dict()["changed"] == ("b",)
    assert (found.only_before, found.only_after) == ((), ())
    assert compare(before, after, dict.fromkeys(names, "1"), dict.fromkeys(names, "2")).difference is None


def test_tasks_that_differ_alike_give_no_interval() -> None:
    """One attempt at one task is no certainty."""
    for names in (["a"], ["a", "b"]):
        before = summarise([attempt(name, 0, 0.0) for name in names], names, 1)
        after = summarise([attempt(name, 0, 1.0) for name in names], names, 1)
        found = compare(before, after)
        assert (found.difference, found.half_width) == (1.0, None)
