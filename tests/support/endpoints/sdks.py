"""SDKs that a test imports by its first use: each process of the suite collects all tests and runs few of them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def imported_when_used(name: str) -> ModuleType:
    """The top-level module `name`, which its first attribute imports.

    Raises:
        ModuleNotFoundError: There is none.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
