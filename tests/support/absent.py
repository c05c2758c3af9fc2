"""The one way in which tests say that this machine lacks something which continuous integration has."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(message: str) -> NoReturn:
    """Skip a test whose needs are not met here; fail it where CI is set, so that nothing there goes untested."""
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
