"""Names of egress recordings (`Allowlist.recording`) that the driver gives: no client gives one of its own such."""

from typing import Final

OF_GROUP: Final = "group/"
OF_ROLLOUT: Final = "rollout/"


def problem(name: str) -> str:
    """Returns why a client may not name a recording so; empty if it may: the driver's are of one group or rollout."""
    if not name.startswith((OF_GROUP, OF_ROLLOUT)):
        return ""
    return f'must not begin with "{OF_GROUP}" or "{OF_ROLLOUT}": the driver names recordings so'
