"""What watch, replay and diff are made of: drawn text, the curve, what stands, what differs."""

from __future__ import annotations

import io
import shlex
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group, RenderableType
from tests.unit.analysis.test_credit import call

from penstock.analysis import readable_calls
from penstock.analysis.differences import compare
from penstock.analysis.recordings import Recording, Turn
from penstock.analysis.token_text import Pieces
from penstock.cli.commands import diff, replay, watch
from penstock.cli.connections.watching import Chosen, whole_groups
from penstock.cli.terminal.console import emit
from penstock.cli.views import events, outcomes, rows, turns
from penstock.cli.views.json_shapes import recording_shape, summary_shape
from penstock.cli.views.live_table import Standing
from penstock.cli.views.replay_steps import steps
from penstock.cli.views.reward_curve import Curve, Point, condensed, strip
from penstock.client.types.results import (
    AgentEvent,
    AgentExited,
    ArtifactCollected,
    CallFinished,
    CommandFinished,
    EventPayload,
    Exit,
    Failure,
    FailureCause,
    Grading,
    Home,
    Outcome,
    Phase,
    Progress,
    Rollout,
    RolloutChanges,
    RolloutEvent,
    RolloutSummary,
    VerifierCommand,
)
from penstock.client.types.trajectories import Branch, Finding, RecordedToolCall, ReplayOrigin, Reward, Trajectory
from penstock.client.wire import results
from penstock.driver.v1 import rollout_pb2

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\r",
    "\x08",
    "\x00",
    "\ud800",
    "[red]",
    "\x7f",
]
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=8), st.just("\n")), max_size=8).map("".join)


def drawn(items: Iterable[RenderableType], width: int = 80) -> str:
    """What reaches a terminal, but for styles: so that every escape sequence is somebody else's."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    console.print(Group(*items))
    return file.getvalue()


def foreign(text: str) -> str:
    """What of it a terminal would obey."""
    return "".join(letter for letter in text if letter not in "\n" and not letter.isprintable())


def summary(number: int, **changes: Any) -> RolloutSummary:
    """A rollout that ended, the number-th that began."""
    given: dict[str, Any] = {
        "rollout_id": f"r-{number}", "group_id": None, "index": number, "run_id": None, "task_id": "t", "agent": "a",
        "labels": {}, "phase": Phase.ENDED, "create_time": NOW + timedelta(seconds=number),
        "end_time": NOW + timedelta(seconds=number + 5), "failure": None, "reward": Reward(0.5), "calls": 2,
        "prompt_tokens": 100, "completion_tokens": 10, "min_version": 1, "max_version": 2, "attempts": 1,
    }  # fmt: skip
    return RolloutSummary(**(given | changes))


def turn(index: int = 0, ids: Sequence[int] = (1, 2, 3), **changes: Any) -> Turn:
    """A model call that was answered."""
    given: dict[str, Any] = {
        "index": index, "call_id": f"c{index}", "parent_call_id": None, "branch_id": "b", "role": "main",
        "state": "delivered", "answerer": "inference", "prompt": np.array([7, 8], np.int32), "shared": 0,
        "sampled": np.array(ids, np.int32), "logprobs": -np.arange(len(ids), dtype=np.float32), "versions": (),
        "finish_reason": "stop", "end_reason": "", "engine": "e", "model": "m", "sampling": {}, "normalisations": (),
        "tools": (), "injected": False, "message": None, "body": None, "receive_time": NOW,
        "end_time": NOW + timedelta(seconds=1),
    }  # fmt: skip
    return Turn(**(given | changes))


def pieces(text: str) -> Pieces:
    """A tokenizer whose every token is this text."""
    usable = text.encode("utf-8", "replace").decode()
    return Pieces(orjson.dumps({"model": {"vocab": {f"{usable}{number}": number for number in range(10)}}}))


def hostile(text: str) -> Recording:
    """A recording in which everything is this text."""
    raw = text.encode("utf-8", "replace")
    end = Exit("failed", None, None, text, 1.0)
    payloads: list[EventPayload] = [
        Progress(text), CommandFinished(Phase.VERIFYING, 0, text, end, raw, raw), AgentExited(end, raw),
        *(AgentEvent(kind, {"text": text, "name": text, "output": text}, raw) for kind in ("assistant", "tool_call")),
        ArtifactCollected(text, raw, False, 3), ArtifactCollected("changes.diff", b"+" + raw, False, 3),
    ]  # fmt: skip
    body = {"messages": [{"role": text, "content": text, "name": text}, {"role": "tool", "content": [{"text": text}]}]}
    failure = Failure(FailureCause.AGENT, text, text, False, None)
    grading = Grading(True, 0, 1, (VerifierCommand(end, raw, raw),), 0, None)
    return Recording(
        origin=text, rollout_id=text, group_id=text, run_id=text, task_id=text, agent=text, labels={text: text},
        failure=(text, text, text), reward=Reward(0.5, components={text: 1.0}), grade=text,
        findings=(Finding(text, text, text, None),),
        turns=(turn(body=body, end_reason=text, model=text, engine=text, normalisations=(text,), untrained=text,
                    role=text, state=text, answerer=text, finish_reason=text, tools=(text,),
                    sampling={text: text, "temperature": text}),
               turn(1, parent_call_id="c0", branch_id=text, sampled=None, message={"parts": [{"text": text}]})),
        branches=(Branch("b", text, "c1", 1, ("c0",), text), Branch(text, text, None, 0, ("c1",), text)),
        tool_calls=(RecordedToolCall(tool_call_id=text, index=0, name=text, state=text, arguments_json=text,
            is_error=False, result_json=text, result_sha256=b"", result_bytes=0, end_reason=text, receive_time=None,
            end_time=None),),
        events=tuple(RolloutEvent(number, text, NOW, item) for number, item in enumerate(payloads, 1)),
        outcome=Outcome(failure, Reward(0.5, components={text: 1.0}), end, raw, grading), pieces=pieces(text),
    )  # fmt: skip


@settings(max_examples=25)  # each draws a lot
@given(TEXTS, st.booleans())
def test_no_text_of_a_recording_drives_the_terminal(text: str, tokens: bool) -> None:
    """What an agent wrote is hostile: every step of a replay, and a diff of it."""
    recording = hostile(text)
    for step in steps(recording):
        assert not foreign(drawn(step.draw(tokens)))
    book = replay.Book(recording, steps(recording), tokens=tokens)
    for _ in steps(recording):
        assert not foreign(drawn([book.frame()]))
        book.press("n")
    other = replace(recording, rollout_id="other", turns=(turn(ids=(4,)),), outcome=None, failure=None, reward=None)
    for item in recording.events:
        assert not foreign(drawn(filter(None, [events.event(item)])))
    assert not foreign(drawn(diff.drawn(compare(recording, other), recording, other)))


@pytest.mark.requirement("R118")
def test_a_rollout_is_shown_with_its_home() -> None:
    """In its replay and as JSON, as far as it is known."""
    home = Home("d1", "", "s1", "sb.s1.x")
    rollout = Rollout("r", None, 0, Phase.RUNNING, None, "a", "", "t", {}, NOW, None, {}, 1, home=home)
    recording = replace(hostile("x"), rollout=rollout)
    assert "driver d1, sandbox service s1, sandbox sb.s1.x" in drawn(steps(recording)[0].draw(False))
    assert recording_shape(recording)["home"] == summary_shape(summary(0, home=home))["home"] == home


def test_a_running_rollout_says_when_its_calls_are_shown() -> None:
    rollout = Rollout("r", None, 0, Phase.RUNNING, None, "a", "", "t", {}, NOW, None, {}, 1)
    recording = replace(hostile("x"), rollout=rollout, outcome=None, failure=None, turns=())
    assert "calls are shown here once it has ended" in drawn(steps(recording)[0].draw(False))


@pytest.mark.requirement("R129")
def test_calls_that_were_not_sampled_name_their_source() -> None:
    """In the table of calls, and as they end: there with how far the replay has come."""
    earlier = replace(call("r", 0, [3]), replayed_from=ReplayOrigin("r", 1, "x"))
    parent = replace(call("r", 1, [3]), replayed_from=ReplayOrigin("parent", 2, "x"))
    given_answer = replace(call("r", 2, [3]), given=True, injected=True)
    calls = (earlier, parent, given_answer, call("r", 3, [3]))
    table = drawn([outcomes.calls(cast(Trajectory, SimpleNamespace(calls=calls)))], width=160)
    lines = [line.split() for line in table.splitlines()[-4:]]
    assert [line[:2] for line in lines] == [["0", "main"], ["1", "0"], ["2", "1"], ["3", "2"]]
    for line, source in zip(
        lines, ("replay of attempt 1", "replay of its parent", "given answer", "trainer"), strict=True
    ):
        assert source in " ".join(line)
    shown = [drawn([events.event(RolloutEvent(1, "r", NOW, CallFinished(one, 3, 2)))]) for one in calls]  # type: ignore[list-item]
    assert [line.strip().rpartition("delivered")[2] for line in shown] == [
        *(", replayed (2 of 3)", ", replayed (2 of 3)", ", given (2 of 3)", "")
    ]


@settings(max_examples=25)  # each draws a lot
@given(TEXTS)
def test_no_name_in_a_table_drives_the_terminal(text: str) -> None:
    """Names are a trainer's, and reasons may be anybody's."""
    failure = Failure(FailureCause.AGENT, text, text, False, None)
    item = summary(0, rollout_id=text, group_id=text, run_id=text, task_id=text, agent=text, failure=failure)
    standing = Standing()
    standing.apply(RolloutChanges((item,), (), True))
    for width in (40, 80, 160):
        table = rows.rollouts(standing.rollouts(), width, NOW)
        assert not foreign(drawn([table, rows.groups(standing.groups(), width, (0.0, 1.0))], width))


@given(TEXTS.filter(lambda text: text.isascii() or text.encode("utf-8", "ignore").decode() == text))
def test_json_line_equals_the_text_without_terminal_codes(text: str) -> None:
    """A person may look at what was made for programs."""
    with pytest.MonkeyPatch.context() as patch:
        caught = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        patch.setattr("sys.stdout", caught)
        emit({text: [text]})
        line = caught.buffer.getvalue()
    assert orjson.loads(line) == {text: [text]}
    assert not foreign(line.decode())


def test_a_flood_is_cut_and_says_so() -> None:
    """A line of ten megabytes is neither drawn nor waited for."""
    flood = turn(
        body={"messages": [{"role": "tool", "content": "x" * 10_000_000}]}, message={"parts": []}, sampled=None
    )
    recording = Recording(origin="o", rollout_id="r", turns=(flood,))
    assert len(drawn(turns.draw(recording, flood, tokens=False))) < 20_000


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["messages", "input", "contents", "system", "role", "content", "parts", "text", "type", "tool_calls",
                 "function", "functionCall", "args", "output", "arguments", "name", "tool_use", "thinking"]
            ),
            inner, max_size=4,
        ),
    ),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.requirement("R33")
@given(JSON, JSON)
def test_any_body_can_be_read(body: Any, former: Any) -> None:
    """R33's spirit for people: an agent's request has any shape, and what is not understood is shown as it is."""
    same, fresh = readable_calls.news(body, former)
    assert same + len(fresh) == len(readable_calls.messages(body))
    assert readable_calls.news(body, body)[1] == ()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
                      {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]},
                      {"role": "tool", "content": "r"}]},
        {"instructions": "s", "input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                                        {"type": "function_call", "name": "f", "arguments": "1"},
                                        {"type": "function_call_output", "output": "r"}]},
        {"system": "s", "messages": [{"role": "user", "content": "u"},
                                     {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 1}]},
                                     {"role": "user", "content": [{"type": "tool_result", "content": "r"}]}]},
        {"systemInstruction": {"parts": [{"text": "s"}]},
         "contents": [{"role": "user", "parts": [{"text": "u"}]},
                      {"role": "assistant", "parts": [{"functionCall": {"name": "f", "args": 1}}]},
                      {"role": "user", "parts": [{"functionResponse": {"response": "r"}}]}]},
    ],
)  # fmt: skip
def test_the_same_conversation_reads_the_same_in_every_dialect(body: Any) -> None:
    """Four dialects, one reader."""
    said = [(item.role, item.kind, item.text, item.name) for item in readable_calls.messages(body)]
    assert said == [
        ("system", "text", "s", ""),
        ("user", "text", "u", ""),
        ("assistant", "tool_call", "1", "f"),
        ("tool", "tool_result", "r", ""),
    ]


@given(
    st.lists(st.tuples(*[st.floats(-2, 2)] * 3).map(sorted).map(lambda found: Point(*found)), max_size=40),
    st.integers(12, 120),
    st.integers(1, 12),
)
def test_a_curve_keeps_to_its_room(points: list[Point], width: int, height: int) -> None:
    """As high and as wide as it was told, whatever the rewards are."""
    file = io.StringIO()
    Console(file=file, width=width).print(Curve(points, -1.0, 1.0, height, "caption"))
    lines = file.getvalue().rstrip("\n").split("\n")
    assert len(lines) == height + 1 and max(map(len, lines)) <= width


def test_a_curve_rises_where_rewards_rise() -> None:
    """The first point stands at the bottom left, the last at the top right."""
    file = io.StringIO()
    Console(file=file, width=40).print(Curve([Point(v, v, v) for v in np.linspace(0, 1, 200)], 0.0, 1.0, 5, ""))
    lines = file.getvalue().split("\n")
    assert (
        lines[4][5] not in " \u2800"
        and lines[0].rstrip()[-1] not in " \u2800"
        and lines[0][5:20].strip(" \u2800") == ""
    )


@given(st.lists(st.floats(0, 1), max_size=30), st.integers(1, 30))
def test_a_strip_counts_every_reward(values: list[float], width: int) -> None:
    """A group of up to nine rewards in one place shows how many lie there."""
    shown = strip(values, 0.0, 1.0, width).plain
    assert len(shown) == width
    if "#" not in shown:
        assert sum(int(letter) for letter in shown if letter.isdigit()) == len(values)


@given(st.integers(1, 400), st.integers(1, 50))
def test_taking_points_together_loses_none(count: int, most: int) -> None:
    """The extremes stay what they are."""
    points = [Point(float(-i), float(i), float(i)) for i in range(count)]
    found = condensed(points, most)
    assert len(found) == min(count, most)
    assert min(p.low for p in found) == -(count - 1) and max(p.high for p in found) == count - 1


def test_error_stays_shown_until_the_state_is_known_anew() -> None:
    """After a break rollouts that are gone go when the whole is told, not before, and only changes are news."""
    standing = Standing()
    standing.begin()
    standing.apply(RolloutChanges((summary(1), summary(2)), (), True))
    standing.begin()
    new, gone = standing.apply(RolloutChanges((summary(1),)))
    assert (new, gone, len(standing)) == ([], [], 2)
    new, gone = standing.apply(RolloutChanges((summary(3),), (), True))
    assert ([item.rollout_id for item in new], gone) == (["r-3"], ["r-2"])
    assert standing.apply(RolloutChanges((), ("r-3", "r-9")))[1] == ["r-3"]


async def test_a_watch_names_the_drivers_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, or as long as it runs: what is listed is a part of the run."""
    part = RolloutChanges((summary(1),), (), True, ("d1", "d2"))

    async def once(_: Chosen) -> RolloutChanges:
        return part

    async def follow(_: Chosen, *, waits: bool) -> AsyncGenerator[RolloutChanges, None]:
        for change in (part, part, RolloutChanges((), (), True), replace(part, away=("d1",))):
            yield change

    monkeypatch.setattr(watch, "once", once)
    monkeypatch.setattr(watch, "follow", follow)
    assert await watch._once(Chosen(), None, False) == 0
    assert capsys.readouterr().err == "d1, d2 do not answer: the rollouts there are missing here, or as they were\n"
    await watch._lines(Chosen(), False)
    assert capsys.readouterr().err.splitlines() == [
        "d1, d2 do not answer: the rollouts there are missing here, or as they were",
        "d1 does not answer: the rollouts there are missing here, or as they were",
    ]


def test_groups_have_their_mean_and_spread_and_the_curve_runs_through_them() -> None:
    """What a trainer looks for: the newest group first in the table, the oldest first on the curve."""
    items = [summary(n, group_id=f"g{n // 2}", reward=Reward(float(n % 2) if n < 2 else 1.0)) for n in range(4)]
    standing = Standing()
    standing.apply(RolloutChanges(tuple(items), (), True))
    assert [group.group_id for group in standing.groups()] == ["g1", "g0"]
    assert (standing.groups()[1].mean, standing.groups()[1].deviation) == (0.5, 0.5)
    points, caption = standing.curve()
    assert points == [Point(0.0, 0.5, 1.0), Point(1.0, 1.0, 1.0)] and "2 groups" in caption


def standing_of(items: Sequence[RolloutSummary], ended_limit: int = 10_000, most: int = 10_000) -> Standing:
    """All of them told at once."""
    standing = Standing(ended_limit, most)
    standing.apply(RolloutChanges(tuple(items), (), True))
    return standing


def test_group_is_shown_whole_and_omissions_are_counted() -> None:
    """a group's mean is of all of it; three of eight with the mean of three look like a group of three."""
    items = [summary(n, group_id=f"g{n // 8}", index=n % 8, reward=Reward(float(n % 8 < 5))) for n in range(24)]
    standing = standing_of(items, ended_limit=3)
    [group] = standing.groups()
    assert (group.group_id, group.ended, len(group.rollouts), group.mean) == ("g2", 8, 8, 0.625)
    assert (len(standing.rollouts()), standing.hidden) == (8, 16)
    assert "8 rollouts (16 older rollouts not shown)" in watch._summary(standing).plain
    running = replace(items[0], phase=Phase.RUNNING, end_time=None, reward=None)
    alone = standing_of([running, *items[1:]], ended_limit=0)
    assert [len(group.rollouts) for group in alone.groups()] == [8], "the ended siblings of one that runs"


@pytest.mark.requirement("R74")
@pytest.mark.parametrize(("failed", "code"), [(True, 1), (False, 0)])
async def test_a_failure_counts_though_ended_rollouts_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, failed: bool, code: int
) -> None:
    """`--ended 0` limits what is printed; the exit code is of the whole group."""
    failure = Failure(FailureCause.AGENT, "AGENT_CRASHED", "", False, Phase.RUNNING) if failed else None
    items = tuple(summary(n, group_id="g", failure=failure if n == 1 else None) for n in range(3))

    async def told(chosen: Chosen, *, waits: bool) -> AsyncGenerator[RolloutChanges, None]:
        yield RolloutChanges(items, (), True)

    monkeypatch.setattr(watch, "follow", told)
    assert await watch._lines(Chosen(group_id="g", ended_limit=0), as_json=False) == code


def test_all_reported_rollouts_are_shown_by_default() -> None:
    """the curve of a run of 184 groups begins with the first of them."""
    standing = standing_of([summary(n, group_id=f"g{n // 8}") for n in range(1472)], Chosen().ended_limit)
    assert (len(standing.rollouts()), len(standing.groups()), standing.hidden) == (1472, 184, 0)
    assert "not" not in watch._summary(standing).plain


def test_watch_stays_bounded_and_keeps_groups_whole() -> None:
    """Rollouts that end for weeks do not fill the memory of who watches them, and it is said."""
    standing = standing_of([], ended_limit=20, most=20)
    for n in range(0, 4000, 8):
        items = [summary(n + i, group_id=f"g{n // 8}", index=i) for i in range(8)]
        standing.apply(RolloutChanges(tuple(items)))
        assert len(standing) <= 20 + 8 + 500 + 8
    assert standing.older and "rollouts that ended before" in watch._summary(standing).plain
    assert {len(group.rollouts) for group in standing.groups()} == {8}


async def test_a_group_that_the_drivers_bound_cuts_is_asked_for_by_itself() -> None:
    """Of the oldest group only a part is among the newest; the rest comes before the whole has been told."""
    items = [summary(n, group_id=f"g{n // 4}", index=n % 4, create_time=NOW + timedelta(n // 4)) for n in range(12)]
    asked: list[str | None] = []

    async def told(group_id: str | None) -> AsyncGenerator[RolloutChanges, None]:
        asked.append(group_id)
        yield RolloutChanges(tuple(item for item in items if item.group_id == group_id) if group_id else (*items[6:],))
        yield RolloutChanges((), (), True)

    standing = Standing(6, 6)
    async for change in whole_groups(told, most=6):
        standing.apply(change)
    assert asked == [None, "g1"]
    assert [len(group.rollouts) for group in standing.groups()] == [4, 4]


def test_cancelled_rollouts_are_counted_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has its results cancels its spares: nothing of it failed. One of something is said so."""

    def failure(cause: FailureCause, reason: str) -> Failure:
        return Failure(cause, reason, "", False, Phase.RUNNING)

    ends = [None, failure(FailureCause.CANCELLED, "GROUP_COMPLETE"), failure(FailureCause.AGENT, "AGENT_CRASHED")]
    standing = Standing()
    items = tuple(summary(n, group_id="g", failure=end) for n, end in enumerate(ends))
    standing.apply(RolloutChanges(items, (), True))
    [group] = standing.groups()
    assert (group.failed, group.cancelled) == (1, 1)
    assert "mean and range of 1 group in" in standing.curve()[1]
    view = watch.View(Chosen())
    view.standing = standing
    monkeypatch.setattr(watch, "out", Console(file=io.StringIO(), width=120, height=24, force_terminal=True))
    told = drawn([view.frame()], 120)
    assert "3 rollouts" in told and "(1 failed) (1 cancelled)" in told and "group complete" in told


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 5)])
def test_the_screen_of_watch_fits_and_scrolls(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any terminal, a thousand rollouts, any key."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    monkeypatch.setattr(watch, "out", console)
    view = watch.View(Chosen())
    changes = RolloutChanges(tuple(summary(n, group_id=f"g{n // 8}") for n in range(1000)), (), True)
    view.standing.apply(changes)
    for key in ("x", "tab", "G", "up", "pageup", "tab", "G", "space", "tab", "home", "down"):
        view.press(key)
        file.seek(0)
        file.truncate()
        console.print(view.frame())
        lines = file.getvalue().rstrip("\n").split("\n")
        assert len(lines) <= height + (4 if height < 10 else 0), (key, lines)
    view.press("q")
    assert not view.open


@settings(max_examples=25)  # each draws a lot
@given(st.lists(st.sampled_from(["n", "p", "g", "G", "down", "up", "space", "b", "t", "wake", "z"]), max_size=30))
def test_any_keys_leave_a_replay_at_one_of_its_steps(keys: list[str]) -> None:
    """Before the first and after the last there is nothing to fall into."""
    recording = hostile("x")
    book = replay.Book(recording, steps(recording), tokens=False)
    for key in keys:
        book.press(key)
        assert not foreign(drawn([book.frame()]))
    assert book.open
    book.press("q")
    assert not book.open


def test_a_recording_is_the_same_as_itself() -> None:
    """diff of a rollout with itself finds nothing."""
    recording = hostile("text")
    assert compare(recording, recording).same


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_the_first_token_that_differs_is_found(ids: list[int], data: st.DataObject) -> None:
    """Where two answers part: the position, and what each says from there."""
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[at] = (changed[at] + 1) % 10
    one, other = (Recording(origin="o", rollout_id="r", turns=(turn(ids=item),)) for item in (ids, changed))
    found = compare(one, other).divergence
    assert found is not None and (found.where, found.position) == ("answer", at)
    assert (found.left.token_ids[0], found.right.token_ids[0]) == (ids[at], changed[at])
    assert found.left.logprobs is not None and found.left.logprobs[0] == float(-at)
    longer = Recording(origin="o", rollout_id="r", turns=(turn(ids=[*ids, 0]),))
    ending = compare(one, longer).divergence
    assert ending is not None and ending.position == len(ids) and ending.left.token_ids == ()


def test_a_character_of_several_tokens_is_read_whole() -> None:
    """Byte-level vocabularies cut characters; an answer is read as one text."""
    vocabulary = {"model": {"vocab": {"\u00c3": 0, "\u00a9": 1}}, "decoder": {"type": "ByteLevel"}}
    found = Pieces(orjson.dumps(vocabulary))
    assert found.whole([0, 1]) == "\u00e9" and found.text(0) == "\ufffd"


def test_a_diff_of_two_mappings_shows_the_keys_that_differ() -> None:
    """Ten fields of sampling of which one differs are a line of one field each."""
    left, right = ({"top_p": 1.0, "temperature": value, "stop": []} for value in (0.0, 1.0))
    one, other = (replace(hostile("x"), turns=(turn(sampling=sampling),)) for sampling in (left, right))
    told = drawn(diff.drawn(compare(one, other), one, other), 200)
    assert '{"temperature":0.0}' in told and '{"temperature":1.0}' in told and "top_p" not in told
    assert diff._without_what_is_alike({"a": 1}, {"a": 1, "b": None}) == (None, {"b": None})
    assert diff._without_what_is_alike("a", {"b": 1}) == ("a", {"b": 1})


def test_a_command_is_one_line_quoted_as_a_shell_reads_it() -> None:
    """A verifier of seven lines is not an answer to what happens now; its words are told apart."""
    sent = rollout_pb2.CommandFinished(phase=rollout_pb2.PHASE_VERIFYING)
    sent.command.argv.args.extend(["bash", "-c", "set -e\ntest 'a b'\ntrue"])
    command = results.command_finished(sent).command
    assert shlex.split(command) == ["bash", "-c", "set -e\ntest 'a b'\ntrue"]
    done = CommandFinished(Phase.VERIFYING, 0, command, Exit("exited", 0, None, "", 1.0), b"", b"")
    shown = drawn(filter(None, [events.event(RolloutEvent(1, "r", NOW, done))]), 120)
    assert shown.count("\n") == 1 and shown.startswith("$ bash -c 'set -e ... and 2 lines  [")
