"""Puts the stand-ins into PATH."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.release_commands import commands

ROOT = Path(__file__).parents[3]


def put(folder: Path, patch: pytest.MonkeyPatch, programs: Sequence[str] = ("kubectl", "helm")) -> Path:
    """Makes a cluster's directory and these programs, first in PATH; returns the directory."""
    cluster, place = folder / "cluster", folder / "bin"
    cluster.mkdir()
    place.mkdir()
    for name in programs:
        script = place / name
        run = [sys.executable, "-m", commands.__name__, name]
        script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(run)} "$@"\n', "utf-8")
        script.chmod(0o755)
    patch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}" if len(programs) == 2 else str(place))
    patch.setenv(commands.HOME, str(cluster))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        patch.delenv(name, raising=False)
    return cluster


def objects(cluster: Path) -> list[dict[str, Any]]:
    """What is in the cluster."""
    found: list[dict[str, Any]] = json.loads((cluster / "objects.json").read_text("utf-8"))
    return found
