"""What becomes of each kind of field, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2
from penstock.sandbox.v1 import process_service_pb2, sandbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import ValueMismatch, from_proto, numbers, reader, to_proto, writer

pytestmark = pytest.mark.requirement("R63", "R64")

STATUS = ("code", "signal", "stdout_truncated", "stderr_truncated", "pipes_open", "stdout_bytes", "stderr_bytes")
REST = (*STATUS, "message", "max_rss_bytes", "ended_inside", "all_killed")


class Ended(Enum):
    """Some of the reasons of an exit."""

    EXITED = 1
    KILLED = 2


class Party(StrEnum):
    """Every party of the proto."""

    AGENT = "a"
    TASK = "t"
    VERIFIER = "v"
    SANDBOX = "s"
    GATE = "g"
    ENGINE = "e"
    OPERATOR = "o"
    BUDGET = "b"
    DRIVER = "d"


@dataclass(frozen=True, slots=True)
class Times:
    """Times of an exit, each of a kind."""

    duration_s: float
    cpu_time: float | None
    end_time: datetime | None
    reason: str


@dataclass(frozen=True, slots=True)
class Instant:
    """The end of an exit, since the epoch, and its duration with a default."""

    end_time: float
    duration: float = 7.0


read_times = reader(Times, process_service_pb2.Exit, left_out=REST)
write_times = writer(Times, process_service_pb2.Exit, left_out=REST)


@given(
    st.floats(-1e6, 1e6),
    st.none() | st.floats(0, 1e6),
    st.none() | st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_times_come_back_as_they_went(duration: float, cpu: float | None, end: datetime | None) -> None:
    """Durations to the nanosecond, times to the microsecond; None is unset."""
    message = write_times(Times(duration, cpu, end, "oom"))
    assert message.HasField("cpu_time") == (cpu is not None)
    back = read_times(message)
    assert (back.end_time, back.reason) == (end, "oom")
    assert back.duration_s == pytest.approx(duration, abs=0.6e-9)
    assert back.cpu_time == (None if cpu is None else pytest.approx(cpu, abs=0.6e-9))


def test_an_unset_field_is_none_or_the_default_or_empty() -> None:
    """In this order."""
    assert read_times(process_service_pb2.Exit()) == Times(0.0, None, None, "unspecified")
    read = reader(Instant, process_service_pb2.Exit, left_out=(*REST, "cpu_time", "reason"))
    assert read(process_service_pb2.Exit()) == Instant(0.0, 7.0)


def test_unknown_enum_number_is_digits_or_an_error() -> None:
    """Plain words show it, classes of enums refuse it and name the field."""
    assert read_times(process_service_pb2.Exit(reason=99)).reason == "99"  # type: ignore[arg-type]
    with pytest.raises(ValueMismatch, match=r"Blame\.caused_by.*99 is not one of"):
        from_proto(Blame, Failed(caused_by=99))  # type: ignore[arg-type]
    with pytest.raises(ValueMismatch, match=r"Times\.reason.*'gone' is not one of unspecified, exited"):
        write_times(Times(0.0, None, None, "gone"))


Failed = rollout_pb2.Failure


@dataclass(frozen=True, slots=True)
class Blame:
    """Who is at fault, None where nobody is."""

    caused_by: Party | None


reader(Blame, Failed, left_out=("cause", "reason", "message", "retriable", "phase"))
writer(Blame, Failed, left_out=("cause", "reason", "message", "retriable", "phase"))


def test_members_of_an_enum_are_matched_by_name() -> None:
    """Whatever their values are; none is the zero."""
    for party in (*Party, None):
        assert from_proto(Blame, to_proto(Blame(party), Failed)) == Blame(party)
    assert to_proto(Blame(Party.GATE), Failed).caused_by == rollout_pb2.PARTY_GATE
    assert not to_proto(Blame(None), Failed).ListFields()


@dataclass(frozen=True, slots=True)
class Line:
    """A command in parts of a message inside."""

    argv: tuple[str, ...]
    shell: str = ""


LINE = ("env", "secret_env", "cwd", "timeout", "user")


def test_a_field_of_a_message_inside_is_named_with_a_dot() -> None:
    """That message is set only if one of its fields is; of a oneof, the first member that is not empty stays."""
    write = writer(Line, process_service_pb2.Command, renamed={"argv": "argv.args"}, left_out=LINE)
    read = reader(Line, process_service_pb2.Command, renamed={"argv": "argv.args"}, left_out=LINE)
    assert write(Line(())).WhichOneof("command") is None
    assert write(Line((), "ls")).WhichOneof("command") == "shell"
    assert write(Line(("a",), "ls")).WhichOneof("command") == "argv"
    assert read(write(Line(("a",)))) == Line(("a",))


def test_what_a_function_makes_is_made_by_it() -> None:
    """In both directions; messages inside are found by their classes."""
    write = writer(Scored, trajectory_pb2.Reward, left_out=("share", "turns"), by={"value": lambda it: it.share * 2})
    read = reader(Scored, trajectory_pb2.Reward, left_out=("value", "turns"), by={"share": lambda it: it.value / 2})
    assert write(Scored(0.5)).value == 1.0
    assert read(write(Scored(0.5, components={"a": 1.0}))) == Scored(0.5, components={"a": 1.0})
    outcome = to_proto(Graded(Scored(0.25)), rollout_pb2.Outcome)
    assert outcome.reward.value == 0.5
    assert from_proto(Graded, outcome) == Graded(Scored(0.25))


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward."""

    share: float
    range_min: float = 0.0
    range_max: float = 1.0
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graded:
    """An outcome."""

    reward: Scored | None


reader(Graded, rollout_pb2.Outcome, left_out=("failure", "agent_exit", "grading"))
writer(Graded, rollout_pb2.Outcome, left_out=("failure", "agent_exit", "grading"))


@dataclass(frozen=True, slots=True)
class Holding:
    """A message that is only kept, and two counts."""

    call: trajectory_pb2.Call
    recorded_count: int = 0
    replayed_count: int = 0


def test_a_message_that_a_class_holds_is_kept_and_required() -> None:
    """None is not written as unset where the class does not allow it."""
    call = trajectory_pb2.Call(call_id="c")
    assert to_proto(Holding(call), rollout_pb2.CallFinished).call == call
    with pytest.raises(ValueMismatch, match=r"Holding\.call .* is None"):
        to_proto(Holding(None), rollout_pb2.CallFinished)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Short:
    """A version span without its end."""

    policy_version: int
    start: int


@dataclass(frozen=True, slots=True)
class Long:
    """A version span with more."""

    policy_version: int
    start: int
    end: int
    more: int = 0


@dataclass(frozen=True, slots=True)
class Wrong:
    """A version span with another type."""

    policy_version: int
    start: int
    end: float


@dataclass(frozen=True, slots=True)
class Never:
    """A version span that may be None where the message is never unset."""

    policy_version: int
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Single:
    """A command with one argument."""

    args: str


@dataclass(frozen=True, slots=True)
class Reason:
    """An exit whose class lacks reasons."""

    reason: Ended


@dataclass(frozen=True, slots=True)
class Texts:
    """Labels in no map."""

    path: str
    content: tuple[bytes, ...]
    mode: int | None


SPAN = completion_pb2.PolicyVersionSpan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_proto(Short, SPAN()), r"Short has no field for penstock\.chat\.v1\.PolicyVersionSpan\.end"),
        (lambda: to_proto(Short(1, 2), SPAN), r"Short has no field for .*end"),
        (lambda: from_proto(Long, SPAN()), r"Long\.more: .*PolicyVersionSpan has no field more"),
        (lambda: to_proto(Long(1, 2, 3), SPAN), r"Long\.more"),
        (lambda: from_proto(Wrong, SPAN()), r"Wrong\.end and .*\.end: float is not int"),
        (lambda: to_proto(Wrong(1, 2, 3.0), SPAN), r"Wrong\.end"),
        (lambda: from_proto(Never, SPAN()), r"Never\.end .* never unset"),
        (lambda: from_proto(Single, process_service_pb2.Argv()), r"Single\.args .* is no tuple"),
        (lambda: from_proto(Texts, sandbox_service_pb2.SeedFile()), r"Texts\.content"),
        (lambda: to_proto(Texts("", (), None), sandbox_service_pb2.SeedFile), r"Texts\.content"),
        (lambda: from_proto(Graded, chat_pb2.Usage()), r"Graded\.reward: .*Usage has no field reward"),
        (
            lambda: reader(Reason, process_service_pb2.Exit, left_out=(*REST, "duration", "cpu_time", "end_time"))(
                process_service_pb2.Exit()
            ),
            r"Reason\.reason .*Ended has no SIGNALED, TIMED_OUT",
        ),
        (
            lambda: reader(Short, trajectory_pb2.TurnSpan, left_out=("end", "ends"))(trajectory_pb2.TurnSpan()),
            r"Short and .* have no field ends",
        ),
        (lambda: reader(Times, process_service_pb2.Exit), "declared twice"),
        (
            lambda: writer(Short, chat_pb2.Usage, by={"start": lambda it: it.start})(Short(1, 2)),
            r"Usage has no field",
        ),
        (lambda: writer(Long, trajectory_pb2.TurnSpan)(Long(1, 2, 3)), r"Long\.policy_version"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_field(make: Callable[[], Any], message: str) -> None:
    """Fields that one side alone has, types that differ, exceptions that name nothing."""
    with pytest.raises(ValueMismatch, match=message):
        make()


def test_an_error_of_a_function_shows_its_line() -> None:
    """The source of a made function is there for tracebacks."""
    with pytest.raises(TypeError) as caught:
        write_times(Times("soon", None, None, "oom"))  # type: ignore[arg-type]
    assert "duration=c_duration_s(it.duration_s)" in "".join(str(entry) for entry in caught.traceback)


def test_numbers_of_an_enum_are_found_by_the_names_of_its_members() -> None:
    """The class's enum may lack some of the proto's, and may have a name of its own for what is unspecified."""

    class Finish(Enum):
        STOP = "s"
        NONE = "n"

    finish = numbers(Finish, chat_pb2.FinishReason, unspecified=Finish.NONE)
    assert finish == {Finish.STOP: chat_pb2.FINISH_REASON_STOP, Finish.NONE: 0}
    with pytest.raises(ValueMismatch, match=r"FinishReason has no NONE, which Finish has"):
        numbers(Finish, chat_pb2.FinishReason)
