"""The error table: domain errors to statuses and back."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis import errors, rpc_status
from penstock_chassis.errors import PenstockError, Violation

KINDS = list(rpc_status.CODES)
reasons = st.from_regex(r"[A-Z][A-Z0-9_]{0,62}", fullmatch=True)
words = st.text(st.characters(codec="utf-8"), max_size=60)


def over_the_wire(error: PenstockError) -> PenstockError:
    status = rpc_status.to_status(error)
    return rpc_status.from_rpc_error(
        AioRpcError(status.code, Metadata(), Metadata(*status.trailing_metadata), details=status.message)
    )


@given(
    kind=st.sampled_from(KINDS),
    message=words,
    reason=reasons,
    metadata=st.dictionaries(words.filter(lambda key: len(key.encode()) <= 64), words, max_size=8),
    violations=st.lists(st.builds(Violation, field=words, description=words), max_size=5),
    retry=st.none() | st.floats(min_value=0, max_value=86_400),
)
def test_an_error_comes_out_of_the_wire_as_itself(
    kind: type[PenstockError],
    message: str,
    reason: str,
    metadata: dict[str, str],
    violations: list[Violation],
    retry: float | None,
) -> None:
    """Typed errors cross the wire with class, reason, metadata, violations and delay."""
    error = kind(message, reason=reason, metadata=metadata, violations=violations, retry_after_s=retry)
    back = over_the_wire(error)
    assert type(back) is kind
    assert back.reason == reason
    assert dict(back.metadata) == metadata
    assert back.violations == tuple(violations)
    if message:
        assert back.message == message
    if retry is None:
        assert back.retry_after_s is None
    else:
        assert back.retry_after_s == pytest.approx(retry, abs=1e-6)


@given(
    message=st.text(max_size=20_000),
    metadata=st.dictionaries(st.text(max_size=2000), st.text(max_size=20_000), max_size=40),
    violations=st.lists(
        st.builds(Violation, field=st.text(max_size=2000), description=st.text(max_size=5000)), max_size=200
    ),
)
def test_details_stay_under_the_limit_of_trailing_metadata_whatever_the_error_holds(
    message: str, metadata: dict[str, str], violations: list[Violation]
) -> None:
    """An oversize detail would turn the typed error into a transport failure; lone surrogates would raise."""
    status = rpc_status.to_status(
        errors.InvalidArgument(message, reason="TOO_MUCH", metadata=metadata, violations=violations)
    )
    assert len(status.details) <= 5 * 1024
    assert len(status.message.encode()) <= 1024


@pytest.mark.requirement("R26")
def test_violations_that_do_not_fit_are_counted() -> None:
    """Nothing is dropped silently."""
    many = [Violation(f"field[{n}]", "x" * 200) for n in range(100)]
    back = over_the_wire(errors.InvalidArgument("no", reason="MANY", violations=many))
    assert 5 < len(back.violations) < 100
    assert back.violations[-1] == Violation("...", f"and {100 - len(back.violations) + 1} more")


def test_every_error_class_has_its_own_code() -> None:
    classes = [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, PenstockError) and item is not PenstockError
    ]
    assert set(classes) == set(rpc_status.CODES)
    assert len(set(rpc_status.CODES.values())) == len(classes)


def test_a_subclass_takes_the_code_of_its_base() -> None:
    class SandboxGone(errors.NotFound):
        pass

    assert rpc_status.to_status(SandboxGone("gone", reason="GONE")).code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("details", [None, "connection refused"])
def test_transport_status_is_recognised_by_its_reason(details: str | None) -> None:
    error = rpc_status.from_rpc_error(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=details))
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "TRANSPORT_UNAVAILABLE"


@given(st.binary(max_size=200))
def test_foreign_bytes_in_the_details_never_raise(garbage: bytes) -> None:
    trailing = Metadata((rpc_status.DETAILS_KEY, garbage))
    error = rpc_status.from_rpc_error(AioRpcError(grpc.StatusCode.NOT_FOUND, Metadata(), trailing, details="x"))
    assert isinstance(error, errors.NotFound)


def test_a_group_of_expected_errors_counts_as_its_first() -> None:
    first = errors.NotFound("a", reason="A")
    group = ExceptionGroup("g", [ExceptionGroup("h", [first]), errors.Aborted("b", reason="B")])
    assert rpc_status.expected(group) is first


@pytest.mark.requirement("R8")
def test_a_group_with_one_unexpected_error_is_unexpected() -> None:
    """An internal exception does not hide behind an expected one."""
    assert rpc_status.expected(ExceptionGroup("g", [errors.NotFound("a", reason="A"), KeyError("b")])) is None


@pytest.mark.parametrize("reason", ["", "lower", "WITH SPACE", "1X", "X" * 64, "NOT-KEBAB"])
def test_a_reason_of_another_shape_is_refused_where_it_is_written(reason: str) -> None:
    with pytest.raises(ValueError, match="UPPER_SNAKE"):
        errors.NotFound("x", reason=reason)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_that_is_no_delay_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match="retry_after_s"):
        errors.Unavailable("x", reason="X", retry_after_s=delay)


@pytest.mark.requirement("R3")
def test_stream_that_ended_during_a_write_may_be_retried() -> None:
    """Grpc.aio forgot the peer's status; that is no fault of the peer's."""
    error = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details="Internal error from Core")
    told = rpc_status.from_rpc_error(error)
    assert isinstance(told, errors.Unavailable)
    assert told.reason == "STREAM_BROKEN"
