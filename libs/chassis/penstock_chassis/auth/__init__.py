"""Authentication, roles and namespaces of callers."""

from penstock_chassis.auth.callers import (
    DEFAULT_NAMESPACE,
    NAMESPACE_HEADER,
    Caller,
    Quotas,
    acting_in,
    acts_in,
    caller,
    is_namespace,
    serve_for,
)
from penstock_chassis.auth.ownership import Hidden, Owned
from penstock_chassis.auth.roles import Role, RoleTable, authorize
from penstock_chassis.auth.tokens import HEADER, HEALTH, Authenticator, Token

__all__ = [
    "DEFAULT_NAMESPACE",
    "HEADER",
    "HEALTH",
    "NAMESPACE_HEADER",
    "Authenticator",
    "Caller",
    "Hidden",
    "Owned",
    "Quotas",
    "Role",
    "RoleTable",
    "Token",
    "acting_in",
    "acts_in",
    "authorize",
    "caller",
    "is_namespace",
    "serve_for",
]
