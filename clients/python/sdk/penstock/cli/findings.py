"""What `penstock doctor` says of one thing that it looked at."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.client.errors import PenstockError, PermissionDenied, Unauthenticated


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `required` = without it the local backend cannot work.

    `failing` is what is wrong, in a word: "missing", "refused" (it is there and does not take our token), "silent" (it
    does not answer) or "not ready". `details` are the same facts for programs; what is not known is not there. Nothing
    in a finding is a secret.
    """

    name: str
    ok: bool
    required: bool
    found: str
    advice: str = ""
    details: Mapping[str, str | bool] = field(default_factory=dict)
    failing: str = "missing"


def of_error(name: str, address: str, error: Exception, origin: str, details: Mapping[str, str | bool]) -> Finding:
    """A service that could not be asked: it is not missing because it refuses, or says why it cannot answer."""
    if isinstance(error, Unauthenticated | PermissionDenied):
        return Finding(name, False, False, f"at {address}; {error.message}", "", details, "refused")
    if isinstance(error, PenstockError) and not error.reason.startswith("TRANSPORT_"):
        advice = "`penstock doctor --live` looks at all services that run; their logs say more"
        return Finding(name, False, False, f"at {address}; {error}", advice, details, "not ready")
    told = str(error) if isinstance(error, PenstockError) else "it does not answer"
    return Finding(name, False, False, f"{address}: {told}", f"start it; its address is {origin}'s", details, "silent")
