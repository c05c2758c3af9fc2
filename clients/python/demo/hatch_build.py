"""Puts the small model into the distribution. `make dist` trains it: no repository has it, a source archive does.

An editable install has none, and needs none.
"""

import sys
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE: Final = Path(__file__).resolve().parent
PACKED: Final = HERE / "penstock_demo" / "model"
# Relative: a source archive may be unpacked anywhere.
BUILT: Final = HERE / ".." / ".." / ".." / "build" / "tiny-model"


class ModelHook(BuildHookInterface[Any]):
    """Called by hatchling for each target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the model; raises SystemExit with advice where there is none."""
        if version == "editable" or PACKED.is_dir():
            return
        if not (BUILT / "model.safetensors").is_file():
            sys.exit("The demo's small model is not trained: run `make dist` in a checkout, which builds this package.")
        build_data["force_include"][str(BUILT.resolve())] = "penstock_demo/model"
