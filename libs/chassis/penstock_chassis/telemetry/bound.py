"""Facts that are bound to a task: they are on each of its log lines, and on those of the tasks that it starts.

One context variable holds all of them. structlog's `contextvars` has one for each, and looks through all variables of
the context at each line and each call: that was half of what a line cost.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from structlog.typing import EventDict, WrappedLogger

_FACTS: Final[ContextVar[Mapping[str, Any]]] = ContextVar("penstock_bound_facts", default=MappingProxyType({}))


def facts() -> Mapping[str, Any]:
    """What is bound; not to be changed."""
    return _FACTS.get()


def bind(**more: Any) -> None:
    """Binds these facts too; None unbinds."""
    _FACTS.set({name: value for name, value in {**_FACTS.get(), **more}.items() if value is not None})


def bind_only(**those: Any) -> None:
    """Binds these facts, and unbinds all others."""
    _FACTS.set(those)


def merge(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The processor that puts them on a line; what the line says itself takes precedence."""
    for name, value in _FACTS.get().items():
        event.setdefault(name, value)
    return event
