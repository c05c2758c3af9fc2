"""Tokens: what was made here is read back, everything else is nothing."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.tokens import ALL, ID_BYTES, Claims, Grant, Scope, TokenKey

KEY = TokenKey(b"k" * 32)
ROLLOUTS = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,20}", fullmatch=True)
GRANTS = st.builds(
    Grant,
    id=st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    scopes=st.frozensets(st.sampled_from(Scope), min_size=1),
    created_ms=st.just(0),
    expires_ms=st.none() | st.integers(1, 2**62),
)


@given(ROLLOUTS, GRANTS)
def test_a_token_says_what_it_was_made_for(rollout_id: str, grant: Grant) -> None:
    """R4: id, scope and expiry come back from the token alone, which is the same whenever it is made."""
    token = KEY.write(rollout_id, grant)
    assert KEY.write(rollout_id, grant) == token
    assert KEY.read(rollout_id, token) == Claims(grant.id, grant.scopes, grant.expires_ms)


@given(ROLLOUTS, ROLLOUTS, GRANTS)
def test_a_token_is_nothing_at_another_rollout_or_under_another_key(one: str, other: str, grant: Grant) -> None:
    """R4, R5: the rollout is under the MAC, so nothing needs to be looked up to refuse a neighbour's token."""
    token = KEY.write(one, grant)
    assert (KEY.read(other, token) is None) is (one != other)
    assert TokenKey(b"l" * 32).read(one, token) is None


@given(GRANTS, st.integers(0, 79), st.characters(min_codepoint=33, max_codepoint=0x17F))
def test_a_token_with_another_character_is_nothing(grant: Grant, place: int, character: str) -> None:
    """R5: no two texts are the same token; no bit of scope or expiry can be changed."""
    token = KEY.write("r", grant)
    changed = token[: 4 + place] + character + token[5 + place :]
    assert (KEY.read("r", changed) is None) is (changed != token)


@given(st.text(max_size=120), st.text(max_size=20))
def test_what_is_no_token_is_refused_without_a_fault(text: str, rollout_id: str) -> None:
    """R5: whatever a header or a path holds."""
    assert KEY.read(rollout_id, text) is None
    assert KEY.read(rollout_id, "pst_" + text) is None


@given(GRANTS)
def test_scope_and_expiry_cannot_be_widened(grant: Grant) -> None:
    """R4: a head that says more, under the old MAC, is nothing."""
    token = KEY.write("r", grant)
    data = base64.urlsafe_b64decode(token.removeprefix("pst_"))
    wide = KEY.write("r", Grant(grant.id, ALL, 0, None))
    head = base64.urlsafe_b64decode(wide.removeprefix("pst_"))[:28]
    forged = "pst_" + base64.urlsafe_b64encode(head + data[28:]).decode()
    assert (KEY.read("r", forged) is None) is (forged != token)


def test_a_grant_dies_at_the_earliest_time_that_it_was_told() -> None:
    """A second revocation with a longer grace brings nothing back."""
    grant = Grant(b"i" * ID_BYTES, ALL, 0)
    assert grant.retire(500)
    assert not grant.retire(900)
    assert grant.retire(100)
    assert grant.dies_ms == 100
