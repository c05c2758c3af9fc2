"""What the demo says of errors that end it."""

from __future__ import annotations

import pytest

from penstock.client import PenstockError
from penstock_demo.display import reasons


def test_errors_of_services_are_named_and_others_are_raised() -> None:
    """However deep the groups of tasks are."""
    inner = ExceptionGroup("tasks", [PenstockError("the gate is away"), PenstockError("no room")])
    assert reasons(PenstockError("no model")) == "no model"
    assert reasons(ExceptionGroup("all", [inner, PenstockError("late")])) == "the gate is away; no room; late"
    with pytest.raises(ExceptionGroup):
        reasons(ExceptionGroup("all", [inner, ValueError("a fault of the demo")]))
