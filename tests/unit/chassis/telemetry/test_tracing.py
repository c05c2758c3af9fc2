"""Ids and trace context from service to service, and what it takes to send traces somewhere."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_chassis.telemetry import bound, tracing


@pytest.mark.requirement("R8")
def test_bound_ids_are_sent_on_and_bound_again_on_arrival() -> None:
    """Only ids of the right form do; a caller cannot write what he likes into our log."""
    sent = tracing.handed_on({"rollout_id": "r-1", "call_id": "c/2", "sandbox_id": "bad id\n", "other": "x"})
    assert sent == [("x-penstock-rollout-id", "r-1"), ("x-penstock-call-id", "c/2")]
    bound.bind_only()
    tracing.taken_up([*sent, ("x-penstock-group-id", "a\nb"), ("x-penstock-sandbox-id", "s" * 200)])
    assert bound.facts() == {"rollout_id": "r-1", "call_id": "c/2"}
    bound.bind_only()


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True))
def test_a_trace_context_is_taken_up_whole_or_not_at_all(value: str) -> None:
    """A header of any content never fails a request."""
    bound.bind_only()
    parent = tracing.taken_up([(tracing.TRACE_PARENT, value)])
    assert parent in ("", value)
    assert bound.facts() == ({"trace_id": value[3:35]} if parent else {})
    bound.bind_only()


@pytest.mark.requirement("R48")
async def test_traces_without_their_packages_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing optional SDK is a named error."""
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(FailedPrecondition, match=r"penstock-chassis\[otel\]") as refused:
        async with tracing.exporting("driver", "http://127.0.0.1:4317"):
            pass
    assert refused.value.reason == "OTEL_MISSING"


@pytest.mark.requirement("R11")
async def test_a_collector_s_token_goes_in_clear_nowhere_beyond_this_machine() -> None:
    """Nor to another address than the one that it was configured for."""
    with pytest.raises(InvalidArgument) as refused:
        async with tracing.exporting("driver", "http://collector.example:4317", token="secret"):
            pass
    assert refused.value.reason == "TOKEN_IN_CLEAR" and "secret" not in refused.value.message


@pytest.mark.requirement("R48")
async def test_unreadable_collector_authority_is_refused_by_its_setting(
    tmp_path: Path,
) -> None:
    """In words, as with every other certificate."""
    with pytest.raises(InvalidArgument, match=r"otlp_ca: .*absent\.pem: No such file") as refused:
        async with tracing.exporting("driver", "https://collector.example:4317", ca=tmp_path / "absent.pem"):
            pass
    assert refused.value.reason == "TLS_FILE"


async def test_untraced_calls_have_no_spans_and_no_context() -> None:
    """And asking for them costs nothing."""
    async with tracing.exporting("driver", ""):
        assert tracing.start("anything", f"00-{'a' * 32}-{'b' * 16}-01") is None
        assert tracing.parent_of(None) == "" and tracing.trace_id_of(None) is None
        assert tracing.using(None) is tracing.served("m", "")
