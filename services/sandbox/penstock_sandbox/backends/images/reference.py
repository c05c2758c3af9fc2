"""Names of images: `python:3.12`, `ghcr.io/owner/name@sha256:...`, read as other programs read them.

Invariants: a reference has a registry, a repository and a tag or a digest; nothing in it needs quoting in a URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock_chassis.errors import PenstockError
from penstock_chassis.validation import invalid_field

HUB: Final = "docker.io"
HUB_NAMES: Final = (HUB, "index.docker.io")
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class Reference:
    """An image of a registry. ``digest`` is empty, or that of its manifest, and then the tag does not count."""

    registry: str
    repository: str
    tag: str
    digest: str = ""

    @property
    def version(self) -> str:
        """What its registry is asked for."""
        return self.digest or self.tag

    def __str__(self) -> str:
        place = f"{self.registry}/{self.repository}"
        return f"{place}@{self.digest}" if self.digest else f"{place}:{self.tag}"


def parse(text: str, field: str = "spec.image") -> Reference:
    """Returns the reference that ``text``, the value of ``field``, names. Raises InvalidArgument (FIELD_INVALID)."""
    rest, _, digest = text.partition("@")
    registry, slash, repository = rest.partition("/")
    if not slash or not (registry == "localhost" or any(sign in registry for sign in ".:[")):
        registry, repository = HUB, rest
    if registry in HUB_NAMES:
        registry = HUB
    tag = "latest"
    if ":" in repository:
        repository, _, tag = repository.partition(":")
    if registry == HUB and "/" not in repository:
        repository = f"library/{repository}"
    if (
        len(text) > _LONGEST
        or not _REGISTRY.fullmatch(registry)
        or not _REPOSITORY.fullmatch(repository)
        or not _TAG.fullmatch(tag)
        or ("@" in text and not DIGEST.fullmatch(digest))
    ):
        raise _malformed(text, field)
    return Reference(registry, repository, tag, digest)


def _malformed(text: str, field: str) -> PenstockError:
    problem = f"{text[:_LONGEST]!r} names no image: write [registry/]name[:tag] or [registry/]name@sha256:digest"
    return invalid_field(field, problem)
