"""What `penstock doctor` says of one thing that it looked at."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `required` = without it the local backend cannot work.

    `details` are the same facts for programs; what is not known is not there. Nothing in a finding is a secret.
    """

    name: str
    ok: bool
    required: bool
    found: str
    advice: str = ""
    details: Mapping[str, str | bool] = field(default_factory=dict)
