"""What a service's `main` does before it imports the service: most of a start's processor time goes into imports.

This module imports nothing of what makes a start slow; docs/decisions/048 has the figures.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def imports() -> Iterator[None]:
    """Imports inside this block take a quarter less of a processor.

    The garbage collector rests, and does not look at what imports have created, also when the process ends: it is kept.
    Pydantic does not read the entry points of every
    installed distribution in search of plugins, unless PYDANTIC_DISABLE_PLUGINS says otherwise. And structlog does not
    import rich, where that is installed: services write JSON, and their console format prints plain tracebacks.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    resting = gc.isenabled()
    gc.disable()
    try:
        _import_structlog()
        yield
        gc.freeze()
    finally:
        if resting:
            gc.enable()


def _import_structlog() -> None:
    modules = cast("dict[str, Any]", sys.modules)
    absent = "rich" not in modules
    if absent:
        modules["rich"] = None  # an import of it fails as if it were not installed
    try:
        import structlog  # noqa: F401
    finally:
        if absent:
            del modules["rich"]
