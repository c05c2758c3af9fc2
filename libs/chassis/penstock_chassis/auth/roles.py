"""The roles of callers, and which role may call which method.

An operator may call everything. A method that is missing from a service's table is for operators only, so a forgotten
line denies access.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from penstock_chassis.errors import PermissionDenied


class Role(StrEnum):
    """What a caller may do; each service's role table has the details."""

    OPERATOR = "operator"
    TRAINER = "trainer"
    OBSERVER = "observer"


_OPERATOR_ONLY: Final = frozenset({Role.OPERATOR})


class RoleTable:
    """Which roles may call which method.

    Keys are `package.Service` for all methods of a service or `package.Service/Method` for one, which then wins.
    """

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[str, Iterable[Role]]) -> None:
        self._table = {key.removeprefix("/"): frozenset({*roles, Role.OPERATOR}) for key, roles in table.items()}

    def allowed(self, method: str) -> frozenset[Role]:
        """The roles that may call `method`, given as `/package.Service/Method` or without the first slash."""
        name = method.removeprefix("/")
        roles = self._table.get(name)
        if roles is None:
            roles = self._table.get(name.partition("/")[0], _OPERATOR_ONLY)
        return roles

    def unknown(self, methods: Iterable[str]) -> list[str]:
        """The keys that match no method of the server: misspellings, to be refused at start."""
        known = {method.removeprefix("/") for method in methods}
        known |= {method.partition("/")[0] for method in known}
        return sorted(self._table.keys() - known)


def authorize(role: Role, method: str, table: RoleTable) -> None:
    """Raises PermissionDenied `ROLE_NOT_ALLOWED` if `role` may not call `method`."""
    if role not in table.allowed(method):
        raise PermissionDenied(f"The role {role} may not call this method.", reason="ROLE_NOT_ALLOWED")
