"""`penstock regrade` and `penstock rewards diff`, and the same by the client, on rollouts of a scripted engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from tests.integration.client.conftest import TASK
from tests.integration.client.test_watch import connection
from tests.support.terminal.commands import invoke

from penstock.client import (
    AlreadyExists,
    Command,
    CopiedPath,
    FailedPrecondition,
    GroupHandle,
    InvalidArgument,
    Mode,
    NotFound,
    Penstock,
    RewardFrom,
    RolloutHandle,
    Verifier,
    connect,
)
from penstock.client.rollouts.client import RolloutOptions
from penstock.local.stack import LocalStack

__all__ = ["connection"]  # a fixture
in_session = pytest.mark.asyncio(loop_scope="session")
RUN = "regraded-run"
AGENT = "shell"
STRICT = """task_id: copy-note
instruction: The same.
verifier:
  commands:
    - shell: '[ "$(cat out.txt)" = other ] && echo 1 > "$PENSTOCK_REWARD_FILE" || echo 0.25 > "$PENSTOCK_REWARD_FILE"'
  reward: file
"""


def strict() -> Verifier:
    """Gives 0.25 for the work that gets 0.75 of the task's own verifier."""
    return Verifier(
        commands=[Command(shell='cat out.txt && echo 0.25 > "$PENSTOCK_REWARD_FILE"')], reward=RewardFrom.FILE
    )


async def made(ps: Penstock, run_id: str, n: int, **options: object) -> GroupHandle:
    """Ended rollouts with reward 0.75."""
    group = await ps.groups.create(TASK, AGENT, n, run_id=run_id, mode=Mode.TRANSPARENT_PROXY, **options)  # type: ignore[arg-type]
    for result in await group.results(samples_only=True):
        assert result.reward is not None and result.reward.value == 0.75, result.outcome
    return group


def rows_of(printed: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The rollouts by their ids, and the last line."""
    *rows, last = map(orjson.loads, printed.splitlines())
    return {row["rollout_id"]: row for row in rows}, last


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run_id(stack: LocalStack) -> str:
    """A run of four rollouts."""
    async with connect(stack.endpoints) as ps:
        await made(ps, RUN, 4)
    return RUN


@in_session
@pytest.mark.requirement("R140")
async def test_the_same_verifier_gives_each_rollout_the_same_reward(ps: Penstock) -> None:
    """The first grade stays, and both name their verifier by the same digest."""
    await made(ps, "same", 3)
    found = [one async for one in ps.rollouts.regrade_all(run_id="same", name="again", concurrency=2)]
    assert len(found) == 3
    for one in found:
        outcome = one.rollout.outcome
        assert one.error is None and one.grade is not None and outcome is not None
        assert one.grade.reward == outcome.reward
        assert one.grade.grading is not None and outcome.grading is not None
        assert one.grade.grading.verifier_sha256 == outcome.grading.verifier_sha256 != ""
        assert one.grade.grading.changes == outcome.grading.changes
        now = (await ps.rollouts.attach(one.rollout.rollout_id)).info
        assert now.outcome == outcome and now.grades == (one.grade,)


@in_session
@pytest.mark.requirement("R140")
async def test_a_name_has_one_grade_of_one_verifier(ps: Penstock) -> None:
    group = await made(ps, "named", 1)
    handle = await ps.rollouts.attach(f"{group.group_id}-0")
    grade = await handle.regrade(strict(), name="v2")
    assert grade.reward is not None and grade.reward.value == 0.25
    assert await handle.regrade(strict(), name="v2") == grade
    with pytest.raises(AlreadyExists, match="choose another name") as caught:
        await handle.regrade(name="v2")
    assert caught.value.reason == "GRADE_EXISTS"
    default = await handle.regrade(strict())
    assert grade.grading is not None and default.name == grade.grading.verifier_sha256[:12]


@in_session
@pytest.mark.requirement("R140")
async def test_a_trajectory_has_the_reward_of_the_chosen_grade(ps: Penstock) -> None:
    group = await made(ps, "chosen", 1)
    handle = await ps.rollouts.attach(f"{group.group_id}-0")
    await handle.regrade(strict(), name="v2")
    rewards = []
    for grade in ("", "first", "v2"):
        one = await handle.trajectory(samples_only=True, grade=grade)
        (exported,) = [item async for item, _ in ps.rollouts.export(run_id="chosen", grade=grade)]
        assert one.reward is not None and exported.reward == one.reward
        rewards.append(one.reward.value)
    assert rewards == [0.75, 0.75, 0.25]
    with pytest.raises(NotFound, match="no grade v3; it has: first, v2") as caught:
        await handle.trajectory(grade="v3")
    assert caught.value.reason == "GRADE_UNKNOWN"
    (absent,) = [item async for item, _ in ps.rollouts.export(run_id="chosen", grade="v3")]
    assert absent.reward is None


@in_session
@pytest.mark.requirement("R140")
async def test_a_verifier_that_gives_no_reward_is_recorded_with_its_reason(ps: Penstock) -> None:
    group = await made(ps, "silent", 1)
    silent = Verifier(commands=[Command(["true"])], reward=RewardFrom.FILE)
    grade = await ps.rollouts.regrade(f"{group.group_id}-0", silent)
    assert grade.reward is None and grade.failure is not None and grade.failure.reason == "REWARD_ABSENT"
    assert grade.failure.cause == "verifier"


@in_session
@pytest.mark.requirement("R140")
async def test_work_graded_in_its_own_sandbox_is_kept_on_request(ps: Penstock) -> None:
    """What that verifier writes is no part of it."""
    own = Verifier(
        commands=[Command(shell='grep -q word out.txt && touch left && echo 0.75 > "$PENSTOCK_REWARD_FILE"')],
        reward=RewardFrom.FILE,
        fresh_fork=False,
    )
    looks = Verifier(
        commands=[Command(shell='[ ! -e left ] && grep -q word out.txt && echo 1 > "$PENSTOCK_REWARD_FILE"')],
        reward=RewardFrom.FILE,
    )
    kept = await _ended(ps, own, RolloutOptions(keep_end_state=True))
    grade = await kept.regrade(looks)
    assert grade.reward is not None and grade.reward.value == 1.0
    with pytest.raises(FailedPrecondition) as gone:
        await (await _ended(ps, own, RolloutOptions())).regrade(looks)
    assert gone.value.reason == "END_STATE_GONE"


@in_session
@pytest.mark.requirement("R76", "R140")
async def test_whole_copies_and_what_was_collected_are_graded_now_and_later(ps: Penstock) -> None:
    """Of the working directory it has nothing else; the end state has them for another verifier."""
    looks = "[ ! -e out.txt ] && grep -q word /tmp/made/word.txt && [ ! -e /tmp/made/x.log ]"
    own = Verifier(
        commands=[Command(shell=f'{looks} && echo 0.5 > "$PENSTOCK_REWARD_FILE"')],
        reward=RewardFrom.FILE,
        copies=[CopiedPath("/tmp/made", ["*.log"])],
        collect=[Command(shell="mkdir /tmp/made && cp out.txt /tmp/made/word.txt && touch /tmp/made/x.log")],
    )
    ended = await _ended(ps, own, RolloutOptions())
    outcome = ended.info.outcome
    assert outcome is not None and outcome.reward is not None and outcome.grading is not None
    assert outcome.reward.value == 0.5 and outcome.grading.changes is not None
    assert (outcome.grading.changes.entries, outcome.grading.changes.removed) == (2, 0)
    assert (await ended.regrade(name="again")).reward == outcome.reward
    whole = Verifier(commands=[Command(shell="[ ! -e out.txt ] && grep -q word /tmp/made/word.txt")])
    later = await ended.regrade(whole, name="later")
    assert later.reward is not None and later.reward.value == 1.0
    for verifier, field in (
        (replace(whole, copies=[CopiedPath("/srv")]), "verifier.copies"),
        (replace(whole, collect=[Command(["true"])]), "verifier.collect"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await ended.regrade(verifier)
        assert [one.field for one in refused.value.violations] == [field]


async def _ended(ps: Penstock, verifier: Verifier, options: RolloutOptions) -> RolloutHandle:
    """An ended rollout with a reward."""
    given = replace(TASK, verifier=verifier)
    handle = await ps.rollouts.create(given, AGENT, **options | {"mode": Mode.TRANSPARENT_PROXY})
    assert (await handle.result()).reward is not None
    return handle


@in_session
@pytest.mark.requirement("R140")
async def test_requests_that_cannot_be_met_say_why(ps: Penstock) -> None:
    group = await made(ps, "refused", 1, keep_end_state=False)
    rollout_id = f"{group.group_id}-0"
    with pytest.raises(FailedPrecondition, match="kept_end_state_bytes") as caught:
        await ps.rollouts.regrade(rollout_id)
    assert caught.value.reason == "END_STATE_GONE"
    elsewhere = Verifier(commands=[Command(["true"])], changes_below=["/srv"])
    for verifier, name, field in (
        (None, "no such/name", "name"),
        (None, "first", "name"),
        (elsewhere, "", "verifier.changes_below"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await ps.rollouts.regrade(rollout_id, verifier, name=name)
        assert [one.field for one in refused.value.violations] == [field]
    with pytest.raises(NotFound) as unknown:
        await ps.rollouts.regrade("no-such-rollout")
    assert unknown.value.reason == "ROLLOUT_UNKNOWN"


@pytest.mark.requirement("R140")
def test_a_run_is_regraded_and_compared_by_commands(connection: dict[str, str], run_id: str, tmp_path: Path) -> None:
    """The second time nothing is graded again."""
    (tmp_path / "strict.yaml").write_text(STRICT)
    given = ("regrade", run_id, "--verifier", str(tmp_path / "strict.yaml"), "--name", "v2", "--json")
    code, printed, err = invoke(*given, environment=connection)
    assert code == 0, err
    first, summary = rows_of(printed)
    assert [row["reward"] for row in first.values()] == [0.25] * 4
    assert (summary["graded"], summary["errors"]) == (4, {})
    code, printed, _ = invoke(*given, environment=connection)
    assert code == 0 and rows_of(printed)[0] == first

    code, printed, _ = invoke("rewards", "diff", run_id, "--json", environment=connection)
    found = orjson.loads(printed)
    assert code == 1
    assert (found["before"], found["after"], found["mean_before"], found["mean_after"]) == ("first", "v2", 0.75, 0.25)
    expected = dict.fromkeys(("compared", "same", "raised", "lowered", "gained", "lost", "missing"), 0)
    assert found["counts"] == expected | {"compared": 4, "lowered": 4}
    assert len(found["changed"]) == 4
    code, printed, _ = invoke("rewards", "diff", run_id, environment=connection)
    assert code == 1 and "4 lowered" in printed and "mean 0.7500 -> 0.2500" in printed
    code, printed, _ = invoke("rewards", "diff", run_id, "--against", "v2", environment=connection)
    assert code == 0 and "4 same" in printed

    rows = tmp_path / "rows.jsonl"
    code, _, err = invoke("export", str(rows), "--run-id", run_id, "--grade", "v2", environment=connection)
    assert code == 0, err
    assert {orjson.loads(line)["reward"] for line in rows.read_bytes().splitlines()} == {0.25}


@pytest.mark.parametrize("command", [("regrade",), ("rewards", "diff")])
def test_a_run_without_rollouts_is_reported(connection: dict[str, str], command: tuple[str, ...]) -> None:
    code, _, err = invoke(*command, "no-such-run", environment=connection)
    assert code == 1 and "no ended rollout of run or group no-such-run" in err


@pytest.mark.requirement("R140")
def test_a_verifier_needs_no_task_around_it(connection: dict[str, str], run_id: str, tmp_path: Path) -> None:
    """A file of its own; a directory of tasks of which no rollout is one; a task without a verifier."""
    (tmp_path / "v3.yaml").write_text("reward: file\ncommands: ['echo 0.5 > \"$PENSTOCK_REWARD_FILE\"']\n")
    code, printed, err = invoke("regrade", run_id, "--verifier", str(tmp_path / "v3.yaml"), environment=connection)
    assert code == 0, err
    assert "4 rollouts graded as " in printed and "mean reward 0.500 of 4" in printed
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in ("ant", "bee"):
        (tasks / f"{name}.yaml").write_text("instruction: x\nverifier: {commands: ['true']}\n")
    code, _, err = invoke("regrade", run_id, "--verifier", str(tasks), environment=connection)
    assert code == 1 and f"no rollout of {run_id} is of a task of" in err and "ant, bee" in err
    (tasks / "bee.yaml").write_text("instruction: x\n")
    code, _, err = invoke("regrade", run_id, "--verifier", str(tasks), environment=connection)
    assert code == 2 and "bee: verifier: is missing" in err


@pytest.mark.requirement("R140")
def test_a_mistyped_grade_writes_no_file(connection: dict[str, str], run_id: str, tmp_path: Path) -> None:
    """Rows without any reward would be trained on."""
    rows = tmp_path / "rows.jsonl"
    code, _, err = invoke("export", str(rows), "--run-id", run_id, "--grade", "v9", environment=connection)
    assert code == 2 and "no rollout has a grade v9; there are first" in err
    assert not rows.exists()


@in_session
@pytest.mark.requirement("R140")
async def test_a_task_says_whether_its_end_states_are_kept(ps: Penstock) -> None:
    """A rollout's own option takes precedence."""
    task = replace(TASK, keep_end_state=False)
    kept: list[bool] = []
    for options in (RolloutOptions(), RolloutOptions(keep_end_state=True)):
        handle = await ps.rollouts.create(task, AGENT, **options | {"mode": Mode.TRANSPARENT_PROXY})
        await handle.result()
        try:
            kept.append((await handle.regrade()).reward is not None)
        except FailedPrecondition as error:
            assert error.reason == "END_STATE_GONE"
            kept.append(False)
    assert kept == [False, True]
