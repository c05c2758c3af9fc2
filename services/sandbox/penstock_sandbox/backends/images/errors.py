"""What can be wrong with an image, for callers: each has a reason of its own, and nothing was started."""

from __future__ import annotations

from penstock_chassis.errors import (
    FailedPrecondition,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)

_RETRY_S = 5.0


def unknown(image: str, what: str) -> PenstockError:
    """The registry has no such image."""
    return NotFound(f"there is no image {image}: {what}", reason="IMAGE_UNKNOWN", metadata={"image": image})


def unauthorized(image: str, registry: str, what: str) -> PenstockError:
    """The registry refuses the credentials, or asks for some. Registries answer so for unknown names, too."""
    return PermissionDenied(
        f"the registry {registry} does not give {image} to this service ({what}): correct the name, or set the "
        f"registry's user and password in image_credentials",
        reason="IMAGE_UNAUTHORIZED",
        metadata={"image": image},
    )


def registry_not_listed(image: str, registry: str) -> PenstockError:
    """The operator does not let the service ask its registry."""
    return FailedPrecondition(
        f"this machine has no image {image}, and the operator's local_registries does not name {registry}, from which "
        "it would be pulled",
        reason="IMAGE_NOT_ALLOWED",
        metadata={"image": image},
    )


def rate_limited(image: str, registry: str, retry_after_s: float) -> PenstockError:
    """The registry limits how often it is asked."""
    return ResourceExhausted(
        f"the registry {registry} limits pulls; it may be asked for {image} again in {retry_after_s:g} s: set "
        "image_credentials or a mirror (image_mirrors), or pull beforehand (image_prefetch)",
        reason="IMAGE_RATE_LIMITED",
        metadata={"image": image},
        retry_after_s=retry_after_s,
    )


def pull_failed(image: str, what: str) -> PenstockError:
    """The registry, or the way to it, failed; the same pull may succeed later."""
    return Unavailable(
        f"the image {image} could not be pulled: {what}",
        reason="IMAGE_PULL_FAILED",
        metadata={"image": image},
        retry_after_s=_RETRY_S,
    )


def too_large(image: str, what: str) -> PenstockError:
    """The error for an image that exceeds the operator's limits."""
    return FailedPrecondition(
        f"the image {image} is too large: {what}", reason="IMAGE_TOO_LARGE", metadata={"image": image}
    )


def wrong_platform(image: str, wanted: str, offered: str) -> PenstockError:
    """The error for an image that has no variant for this machine."""
    return FailedPrecondition(
        f"the image {image} is for {offered or 'no platform'}; this machine needs {wanted}",
        reason="IMAGE_WRONG_PLATFORM",
        metadata={"image": image, "platform": wanted},
    )


def unusable(image: str, what: str) -> PenstockError:
    """The error for an image whose manifest or layer cannot be used for sandboxes."""
    return FailedPrecondition(
        f"the image {image} cannot be used: {what}", reason="IMAGE_UNUSABLE", metadata={"image": image}
    )
