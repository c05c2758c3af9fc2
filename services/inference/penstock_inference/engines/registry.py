"""Engines by name: entry points in the group `penstock.inference.engines`, which others can extend."""

from __future__ import annotations

from importlib.metadata import entry_points

from penstock.values.similar_names import did_you_mean
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_inference.engines.base import Engine, EngineFactory, EngineOptions

GROUP = "penstock.inference.engines"


def names() -> list[str]:
    """The registered engines, whether or not their dependencies are installed."""
    return sorted(entry_points(group=GROUP).names)


async def open_engine(name: str, options: EngineOptions) -> Engine:
    """Open the engine of that name.

    Raises InvalidArgument (ENGINE_UNKNOWN), FailedPrecondition (ENGINE_NOT_INSTALLED), and the engine's errors.
    """
    found = [*entry_points(group=GROUP, name=name)]
    if not found:
        raise InvalidArgument(
            f"there is no engine {name!r}{did_you_mean(name, names()) or ';'} known engines: {', '.join(names())}",
            reason="ENGINE_UNKNOWN",
            violations=[Violation("engine", f"one of {', '.join(names())}")],
        )
    try:
        factory: EngineFactory = found[0].load()
        return await factory(options)
    except ImportError as error:
        raise FailedPrecondition(
            f"engine {name!r} needs {error.name}, which is not installed: pip install 'penstock-inference[{name}]'",
            reason="ENGINE_NOT_INSTALLED",
            metadata={"engine": name, "module": error.name or ""},
        ) from error
