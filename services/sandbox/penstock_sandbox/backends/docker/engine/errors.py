"""What goes wrong with a Docker daemon, as the backend's other modules see it."""

from __future__ import annotations

from typing import Any

from penstock_chassis.errors import Unavailable

Json = dict[str, Any]


class Refused(Exception):
    """The daemon refused; ``status`` is the HTTP status, ``what`` its explanation."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what


class Missing(Refused):
    """There is no such container, image or volume."""


def unreachable(error: object) -> Unavailable:
    """Returns the error for a daemon that does not answer, or not to the end."""
    return Unavailable(f"the Docker daemon does not answer: {error}", reason="DOCKER_UNREACHABLE", retry_after_s=1.0)
