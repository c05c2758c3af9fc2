"""Frozen dataclasses that are cheap to create.

A frozen dataclass sets each field through `object.__setattr__`, which looks the field up by name: about a third of a
microsecond a field, and a model call makes some hundreds of them. With slots there is a shorter way: the slot's own
descriptor sets the value. The objects are the same, as frozen as before.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")
_UNSET = object()


def quick(cls: type[T]) -> type[T]:
    """Gives a frozen dataclass with slots a quicker `__init__`: `@quick` goes above `@dataclass`.

    Its fields are positional, as they are by default.
    """
    known: dict[str, Any] = {"_unset": _UNSET}
    parameters, steps = [], []
    for item in fields(cls):  # type: ignore[arg-type]  # a dataclass, as the docstring says
        name = item.name
        if not item.init:
            continue  # `__post_init__` sets it
        known[f"_set_{name}"] = getattr(cls, name).__set__
        if item.default_factory is not MISSING:
            known[f"_make_{name}"] = item.default_factory
            parameters.append(f"{name}=_unset")
            steps.append(f"_set_{name}(self, _make_{name}() if {name} is _unset else {name})")
            continue
        steps.append(f"_set_{name}(self, {name})")
        if item.default is MISSING:
            parameters.append(name)
        else:
            known[f"_default_{name}"] = item.default
            parameters.append(f"{name}=_default_{name}")
    if hasattr(cls, "__post_init__"):
        steps.append("self.__post_init__()")
    source = f"def __init__({', '.join(['self', *parameters])}):\n " + "\n ".join(steps or ["pass"])
    exec(source, known)  # noqa: S102 - made of the class's own field names, as dataclasses does it
    made = known["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]
    return cls
