"""Names of images that callers give, as the daemon is asked for them.

Purpose: a daemon takes an image's id, and any part that it begins with, for its name; and among its images are our own,
such as the snapshots of every namespace. By a name, a caller is to reach neither.

Invariants
- The daemon is asked for a registry's repository with a tag or a digest, which no id looks like.
- What it answers counts only if it lists that name among the image's own, and if the image is none of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_sandbox.backends.docker.cleanup.reaper import INSTANCE, KIND
from penstock_sandbox.backends.docker.engine.errors import Json
from penstock_sandbox.backends.images import reference
from penstock_sandbox.backends.images.reference import HUB, HUB_NAMES, Reference

OURS: Final = "penstock-"
"""How the names of repositories begin in which this backend keeps its images."""
_LABELS: Final = (INSTANCE, KIND)
_LOCAL: Final = "localhost"
_WITHOUT_REGISTRY: Final = (HUB, _LOCAL)
"""The registries that engines give to images made by their own."""


def asked(name: str, field: str) -> Reference:
    """Returns what a caller's name, the value of ``field``, stands for.

    Raises InvalidArgument (FIELD_INVALID) and, for a repository of ours, FailedPrecondition (IMAGE_NOT_ALLOWED).
    """
    wanted = reference.parse(name, field)
    repository = wanted.repository.removeprefix("library/")
    if wanted.registry in _WITHOUT_REGISTRY and repository.startswith(OURS) and "/" not in repository:
        raise not_allowed(name)
    return wanted


def forms(name: str, wanted: Reference) -> tuple[Reference, ...]:
    """Returns what a daemon may call the image ``wanted``, which a caller called ``name``.

    Podman gives a registry of its own to images that it builds with a name that has none.
    """
    if wanted.registry != HUB or name.split("/")[0] in HUB_NAMES:
        return (wanted,)
    return wanted, replace(wanted, registry=_LOCAL, repository=wanted.repository.removeprefix("library/"))


def not_allowed(name: str) -> FailedPrecondition:
    """The image is one that this service made, which no caller names."""
    return FailedPrecondition(
        f"{name!r} is an image of the sandbox service's own: name a snapshot by its id, as base.snapshot_id",
        reason="IMAGE_NOT_ALLOWED",
        metadata={"image": name},
    )


def is_ours(image: Json) -> bool:
    """Whether this service made an image, by its description."""
    labels = (image.get("Config") or {}).get("Labels") or {}
    return any(labels.get(label) for label in _LABELS)


def is_named(image: Json, wanted: Reference) -> bool:
    """Whether the daemon lists a name among those of an image, by its description."""
    return any(
        (known.registry, known.repository, known.version) == (wanted.registry, wanted.repository, wanted.version)
        for known in _names(image)
    )


def _names(image: Json) -> Iterator[Reference]:
    for name in (*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())):
        try:
            yield reference.parse(str(name))
        except InvalidArgument:
            continue  # such as <none>:<none>
