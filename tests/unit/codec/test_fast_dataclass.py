"""Values made the quick way are those that a dataclass makes."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from penstock_codec.fast_dataclass import quick


@quick
@dataclass(frozen=True, slots=True)
class Point:
    """A value with every kind of field."""

    x: int
    y: int = 2
    tags: dict[str, int] = field(default_factory=dict)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x + self.y)


def test_a_quick_value_is_made_as_its_dataclass_says() -> None:
    """Defaults, factories, fields that are set afterwards, names and places."""
    assert (Point(1).x, Point(1).y, Point(1).tags, Point(1).total) == (1, 2, {}, 3)
    assert Point(1).tags is not Point(1).tags, "a factory makes one for each"
    assert Point(1, 5, {"a": 1}) == Point(y=5, tags={"a": 1}, x=1)
    assert replace(Point(1), x=7).total == 9
    assert repr(Point(1)) == "Point(x=1, y=2, tags={}, total=3)"
    assert list(inspect.signature(Point).parameters) == ["x", "y", "tags"]
    assert copy.deepcopy(Point(1)) == pickle.loads(pickle.dumps(Point(1))) == Point(1)


def test_a_quick_value_is_frozen_and_takes_its_fields_only() -> None:
    """Nothing that a frozen dataclass refuses is let through."""
    with pytest.raises(FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        Point(1, z=1)  # type: ignore[call-arg]
