"""Tokens and the table of roles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.auth import Authenticator, Caller, Role, RoleTable, authorize
from penstock_chassis.errors import PermissionDenied, Unauthenticated

TOKEN = "sk-test '$(leak)"
names = st.sampled_from(["a.v1.S/M", "a.v1.S/N", "a.v1.S", "a.v1.T", "b.v1.S/M"])
tables = st.dictionaries(names, st.frozensets(st.sampled_from(Role)))


@pytest.mark.requirement("R3", "R5")
@given(st.text() | st.binary())
def test_no_other_header_than_the_exact_one_authenticates(header: str | bytes) -> None:
    """Whatever a caller sends, the answer is a typed refusal."""
    if header == f"Bearer {TOKEN}":
        return
    with pytest.raises(Unauthenticated):
        Authenticator({Role.OPERATOR: TOKEN}).authenticate([("authorization", header)])


@pytest.mark.requirement("R2")
@given(st.text(min_size=1).filter(lambda text: bool(text.strip())), st.sampled_from(Role))
def test_each_token_gives_its_own_role(token: str, role: Role) -> None:
    """Any characters at all."""
    found = Authenticator({role: token}).authenticate([("other", "x"), ("authorization", f"Bearer {token}")])
    assert found.role is role


@pytest.mark.requirement("R3")
@pytest.mark.parametrize("token", ["", " ", "\t\n"])
def test_a_blank_token_cannot_be_configured(token: str) -> None:
    with pytest.raises(ValueError, match="blank"):
        Authenticator({Role.TRAINER: token})


@pytest.mark.requirement("R3")
def test_service_without_configured_tokens_lets_nobody_in() -> None:
    """Open access is asked for by name."""
    with pytest.raises(ValueError, match="no caller"):
        Authenticator({})


def test_anonymous_access_does_not_let_a_wrong_token_pass() -> None:
    """A caller that meant to prove something is told that it did not."""
    open_door = Authenticator({}, anonymous=True)
    assert open_door.authenticate([]) == Caller(Role.OPERATOR, None)
    with pytest.raises(Unauthenticated):
        open_door.authenticate([("authorization", "Bearer stale")])


@given(tables, st.sampled_from(["a.v1.S/M", "a.v1.S/N", "a.v1.S/O", "a.v1.T/M", "c.v1.S/M"]), st.sampled_from(Role))
def test_the_operator_may_all_and_the_others_what_the_nearest_line_says(
    table: dict[str, frozenset[Role]], method: str, role: Role
) -> None:
    line = table.get(method, table.get(method.partition("/")[0], frozenset()))
    allowed = role is Role.OPERATOR or role in line
    for spelling in (method, f"/{method}"):
        if allowed:
            authorize(role, spelling, RoleTable(table))
        else:
            with pytest.raises(PermissionDenied):
                authorize(role, spelling, RoleTable(table))
