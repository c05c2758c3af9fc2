"""Findings of `penstock doctor`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.client.errors import PenstockError, PermissionDenied, Unauthenticated


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `required` = without it the local backend cannot work.

    `failing` is the problem in a word: "missing", "refused" (it is there but refuses our token), "silent" (it does not
    answer) or "not ready". `details` are the same facts for programs; unknown facts are absent. A finding contains no
    secret.
    """

    name: str
    ok: bool
    required: bool
    found: str
    advice: str = ""
    details: Mapping[str, str | bool] = field(default_factory=dict)
    failing: str = "missing"


def of_error(name: str, address: str, error: Exception, origin: str, details: Mapping[str, str | bool]) -> Finding:
    """Returns the finding for a failed request: a service that refuses, or explains its failure, is not missing."""
    if isinstance(error, Unauthenticated | PermissionDenied):
        return Finding(name, False, False, f"at {address}; {error.message}", "", details, "refused")
    if isinstance(error, PenstockError) and not error.reason.startswith("TRANSPORT_"):
        advice = "run `penstock doctor --live` to check all running services; their logs have details"
        return Finding(name, False, False, f"at {address}; {error}", advice, details, "not ready")
    reason = str(error) if isinstance(error, PenstockError) else "it does not answer"
    return Finding(
        name,
        False,
        False,
        f"{address}: {reason}",
        f"start it, or correct its address (from {origin})",
        details,
        "silent",
    )
