"""The oldest versions that our packages say they work with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.sandbox.v1 import file_service_pb2_grpc

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("libs/*", "services/*", "clients/python/*")
FILES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/pyproject.toml"))
PACKAGES = [path for path in FILES if '"grpcio>=' in path.read_text()]
SPREADS_CALLS = (1, 84)
"""Of grpcio: the first that opens further connections where a service bounds the calls of one (R148)."""


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_the_oldest_grpcio_loads_what_was_generated_and_spreads_calls_over_connections(package: Path) -> None:
    (least,) = re.findall(r'"grpcio>=([\d.]+)"', package.read_text())
    assert version(least) >= version(file_service_pb2_grpc.GRPC_GENERATED_VERSION)
    assert version(least) >= SPREADS_CALLS
