"""What a service's `main` does before it imports the service: most of a start's processor time goes into imports.

This module imports nothing of what makes a start slow; docs/decisions/048 has the figures.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final, cast

_TRIED_GRPC: Final = "1.85."
_EXPERIMENTS: Final = "-event_engine_client,-event_engine_listener"
"""With its event engine gRPC passes each message through threads of its own; without it, the thread that waits for
calls reads and writes the sockets, and a call takes 0.6 to 0.8 of the CPU (docs/decisions/098)."""


@contextmanager
def imports() -> Iterator[None]:
    """Imports inside this block take a quarter less of a processor.

    The garbage collector rests, and does not look at what imports have created, also when the process ends: it is kept.
    Pydantic does not read the entry points of every
    installed distribution in search of plugins, unless PYDANTIC_DISABLE_PLUGINS says otherwise. And structlog does not
    import rich, where that is installed: services write JSON, and their console format prints plain tracebacks.

    gRPC reads GRPC_EXPERIMENTS when it is imported: here it is set, unless the environment has it. Other versions than
    the tried one may not know what it names, and would complain.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if version("grpcio").startswith(_TRIED_GRPC):
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)
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
