"""The attendant as one text: a Python program (3.8 or newer, standard library only) to be put into a sandbox.

Purpose: the program is written as modules, one reason to change each, and shipped as one file: a small loader, and the
modules' sources in it. ``python3 FILE serve|attach|put ...`` runs it; its options are in ``attendant.main``, and in
``attendant.put``.

Invariants: the text depends on these sources alone; a module in it is compiled when it is first imported, so that
``attach`` and ``put``, which run for every connection, do not pay for what only ``serve`` needs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import penstock_sandbox

PARTS = (
    "penstock_sandbox.attendant.words",
    "penstock_sandbox.attendant.put",
    "penstock_sandbox.attendant.frames",
    "penstock_sandbox.attendant.families",
    "penstock_sandbox.attendant.system",
    "penstock_sandbox.attendant.keeper",
    "penstock_sandbox.attendant.loop",
    "penstock_sandbox.attendant.connections",
    "penstock_sandbox.attendant.replies",
    "penstock_sandbox.attendant.processes",
    "penstock_sandbox.attendant.transfers",
    "penstock_sandbox.attendant.endpoint",
    "penstock_sandbox.attendant.server",
    "penstock_sandbox.attendant.nursery",
    "penstock_sandbox.attendant.main",
    "penstock_sandbox.spawner.dying",
    "penstock_sandbox.spawner.files",
    "penstock_sandbox.spawner.descents",
    "penstock_sandbox.spawner.trees",
)
"""The modules of the program."""

_PACKAGES = ("penstock_sandbox", "penstock_sandbox.attendant", "penstock_sandbox.spawner")

_LOADER = '''\
"""Serves one sandbox for Penstock's sandbox service; made from penstock_sandbox.attendant."""
import importlib.machinery
import sys

SOURCES = {sources}


class Loader:
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.machinery.ModuleSpec(name, self, is_package=SOURCES[name] is None)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        source = SOURCES[module.__name__]
        if source is not None:
            exec(compile(source, module.__name__, "exec", dont_inherit=True), module.__dict__)


sys.meta_path.insert(0, Loader())
if sys.argv[1:2] == ["put"]:
    from penstock_sandbox.attendant.put import main
else:
    from penstock_sandbox.attendant.main import main

sys.exit(main())
'''


def source(name: str) -> str:
    """The source of one part."""
    root = Path(penstock_sandbox.__file__).parent.parent
    return root.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")


@functools.cache
def text() -> str:
    """The whole program."""
    sources: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    sources.update((name, source(name)) for name in PARTS)
    listed = "".join(f"    {name!r}: {content!r},\n" for name, content in sources.items())
    return _LOADER.replace("{sources}", "{\n" + listed + "}")
