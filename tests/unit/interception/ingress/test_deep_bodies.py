"""Bodies that nest deeply: no dialect works more on one than on a flat body of its size, or writes to the log."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Any

import pytest

from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses

DIALECTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "chat": (
        ChatCompletions(),
        (
            '{"model":"m","messages":[{"role":"user","content":[%s]}]}',
            '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[%s]}',
        ),
    ),
    "responses": (
        Responses(),
        ('{"model":"m","input":[%s]}', '{"model":"m","input":"x","tools":[%s]}'),
    ),
    "messages": (
        Messages(),
        (
            '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[%s]}]}',
            '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[%s]}',
        ),
    ),
    "generate_content": (
        GenerateContent(),
        ('{"contents":[{"parts":[%s]}]}', '{"contents":[{"parts":[{"text":"x"}]}],"tools":[%s]}'),
    ),
}
CASES = [(dialect, body) for dialect, bodies in DIALECTS.values() for body in bodies]


def typed(depth: int, opened: str = '{"type":', closed: str = "}") -> str:
    return '{"type":' + opened * depth + "1" + closed * depth + "}"


def steps(dialect: Any, body: str) -> int:
    """Function calls, of Python and of extensions, that parsing a body takes, refused or not."""
    taken = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal taken
        taken += event in ("call", "c_call")

    gc.disable()  # what listens to collections is called too, more often the more there is to collect
    sys.setprofile(count)
    try:
        dialect.parse(body.encode(), Route(Ask.COMPLETION, "m"))
    except BadRequest:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return taken


@pytest.mark.requirement("R80", "R33")
@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_deep_type_writes_nothing_to_the_log(dialect: Any, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic prints a value that it refuses; Python logs it if a value nests too deeply to be printed."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for depth in (200, 254, 500, 960, 990, 1000, 1005, 1010, 1015, 1020, 3000):
        for brackets in (('{"type":', "}"), ("[", "]")):
            with suppress(BadRequest):
                dialect.parse((body % typed(depth, *brackets)).encode(), Route(Ask.COMPLETION, "m"))
    assert not ignored


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_too_deep_body_is_refused_before_its_fields_are_validated(dialect: Any, body: str) -> None:
    """The same few steps, whatever its size and depth."""
    with pytest.raises(BadRequest, match="nested too deeply"):
        dialect.parse((body % typed(300)).encode(), Route(Ask.COMPLETION, "m"))
    taken = [steps(dialect, body % ",".join([typed(depth)] * count)) for depth in (300, 1000) for count in (1, 100)]
    assert len(set(taken)) == 1 and taken[0] < 40


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_steps_of_an_invalid_body_grow_with_its_size_alone(dialect: Any, body: str) -> None:
    """As many at the deepest nesting that is read as in a flat body with as many values, and linear in their count."""
    few, many = (steps(dialect, body % ",".join([typed(240)] * count)) for count in (20, 80))
    flat = steps(dialect, body % ",".join([typed(1)] * 80))
    assert many <= 4 * few + 40
    assert many <= flat + 40
