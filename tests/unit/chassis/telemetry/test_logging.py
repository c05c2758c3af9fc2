"""What a line of the log looks like, and what never stands in one."""

import errno
import io
from collections.abc import Iterator
from typing import Literal

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.telemetry import bound
from penstock_chassis.telemetry.logging import MASK, Meter, configure, redact


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    before = structlog.get_config()
    out = io.StringIO()
    configure("info", "json", stream=out)
    yield out
    structlog.configure(**before)


def test_a_line_is_one_object_of_json_with_the_bound_ids(stream: io.StringIO) -> None:
    bound.bind(rollout_id="r1")
    structlog.get_logger().info("phase", phase="RUNNING", data=b"\xff", number=2)
    bound.bind(rollout_id=None)
    line = orjson.loads(stream.getvalue())
    assert line["event"] == "phase"
    assert line["rollout_id"] == "r1"
    assert line["level"] == "info"
    assert stream.getvalue().count("\n") == 1


def test_a_newline_in_a_value_cannot_forge_a_line(stream: io.StringIO) -> None:
    structlog.get_logger().info("x", path='a\n{"event":"forged"}')
    assert stream.getvalue().count("\n") == 1


def test_an_exception_is_logged_with_its_trace(stream: io.StringIO) -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        structlog.get_logger().error("failed", exc_info=error)
    assert "KeyError" in orjson.loads(stream.getvalue())["exception"]


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    structlog.get_logger().debug("body", body="secret")
    assert stream.getvalue() == ""


@pytest.mark.requirement("R8")
@pytest.mark.parametrize(
    "key",
    [
        "authorization",
        "Authorization",
        "token",
        "operator_token",
        "OPENAI_API_KEY",
        "api-key",
        "apikey",
        "password",
        "client_secret",
        "secret_env",
        "credentials",
        "capability_token",
        "set-cookie",
    ],
)
@given(value=st.text(min_size=4) | st.dictionaries(st.text(), st.text()))
def test_a_value_under_a_secret_looking_key_is_masked(key: str, value: object) -> None:
    event = {"event": "x", key: value, "nested": {"deeper": {key: value}}}
    masked = redact(None, "info", event)
    assert masked[key] == MASK
    assert masked["nested"]["deeper"][key] == MASK


@pytest.mark.parametrize("key", ["token_ids", "prompt_tokens", "tokens", "key", "secretary", "max_tokens", "monkey"])
def test_ordinary_keys_are_left_alone(key: str) -> None:
    assert redact(None, "info", {"event": "x", key: 7}) == {"event": "x", key: 7}


def test_the_console_style_is_for_people() -> None:
    before = structlog.get_config()
    out = io.StringIO()
    try:
        configure("info", "console", stream=out)
        structlog.get_logger().info("ready", address="127.0.0.1:1", token="abc")
    finally:
        structlog.configure(**before)
    assert "127.0.0.1:1" in out.getvalue()
    assert "abc" not in out.getvalue()


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("style", ["json", "console"])
def test_the_trace_of_an_exception_shows_no_variable(style: Literal["json", "console"]) -> None:
    """A function's variables are keys, prompts and whole bodies."""
    before = structlog.get_config()
    out = io.StringIO()

    def fails(given: str) -> None:
        raise RuntimeError

    try:
        configure("info", style, stream=out)
        try:
            fails("sk-" + "of-a-caller")
        except RuntimeError:
            structlog.get_logger().exception("failed")
    finally:
        structlog.configure(**before)
    assert "in fails" in out.getvalue() and "RuntimeError" in out.getvalue()
    assert "sk-of-a-caller" not in out.getvalue()


@pytest.mark.requirement("R148")
def test_meter_passes_a_burst_then_one_per_interval_and_counts_the_rest() -> None:
    """What is left out is told once, by the next line."""
    meter = Meter(burst=3, interval_s=10.0)
    assert [meter.allows(1000.0) for _ in range(8)] == [True] * 3 + [False] * 5
    assert not meter.allows(1009.9)
    assert meter.allows(1010.0)
    assert (meter.left_out(), meter.left_out()) == (6, 0)
    assert [meter.allows(9000.0) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.requirement("R50", "R146")
def test_a_line_that_the_disk_refuses_ends_no_work_and_is_counted() -> None:
    """A full disk is where logs are, too; who writes a line has something else to do."""

    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    before, out = structlog.get_config(), Full()
    try:
        configure(stream=out)
        log = structlog.get_logger()
        log.info("lost")
        log.info("lost, too")
        out.full = False
        log.info("kept")
    finally:
        structlog.configure(**before)
    first, second = (orjson.loads(line) for line in out.getvalue().splitlines())
    assert (first["lost"], second["event"]) == (2, "kept")
