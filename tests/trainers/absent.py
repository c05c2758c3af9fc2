"""Modules that a trainer imports and a check does not call: they need a GPU, or log elsewhere."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules of these names, and of all beneath them."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See Python."""
        if not any(name == one or name.startswith(f"{one}.") for one in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See Python."""
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See Python."""


def absent(*names: str) -> None:
    """Makes modules empty from now on; call it before the trainer is imported."""
    sys.meta_path.insert(0, Absent(frozenset(names)))
