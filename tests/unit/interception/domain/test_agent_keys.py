"""Tokens: what was made here is read back, everything else is nothing."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.agent_keys import ALL, ID_BYTES, AgentKey, Claims, KeySigner, Scope

KEY = KeySigner(b"k" * 32)
ROLLOUTS = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,20}", fullmatch=True)
GRANTS = st.builds(
    AgentKey,
    id=st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    scopes=st.frozensets(st.sampled_from(Scope), min_size=1),
    created_ms=st.just(0),
    expires_ms=st.none() | st.integers(1, 2**62),
)


@pytest.mark.requirement("R4")
@given(ROLLOUTS, GRANTS)
def test_a_token_says_what_it_was_made_for(rollout_id: str, grant: AgentKey) -> None:
    """Id, scope and expiry come back from the token alone, which is the same whenever it is made."""
    token = KEY.write(rollout_id, grant)
    assert KEY.write(rollout_id, grant) == token
    assert KEY.read(rollout_id, token) == Claims(grant.id, grant.scopes, grant.expires_ms)


@pytest.mark.requirement("R4", "R5")
@given(ROLLOUTS, ROLLOUTS, GRANTS)
def test_a_token_is_nothing_at_another_rollout_or_under_another_key(one: str, other: str, grant: AgentKey) -> None:
    """The rollout is under the MAC, so nothing needs to be looked up to refuse a neighbour's token."""
    token = KEY.write(one, grant)
    assert (KEY.read(other, token) is None) is (one != other)
    assert KeySigner(b"l" * 32).read(one, token) is None


@pytest.mark.requirement("R5")
@given(GRANTS, st.integers(0, 79), st.characters(min_codepoint=33, max_codepoint=0x17F))
def test_a_token_with_another_character_is_nothing(grant: AgentKey, place: int, character: str) -> None:
    """No two texts are the same token; no bit of scope or expiry can be changed."""
    token = KEY.write("r", grant)
    changed = token[: 4 + place] + character + token[5 + place :]
    assert (KEY.read("r", changed) is None) is (changed != token)


@pytest.mark.requirement("R5")
@given(st.text(max_size=120), st.text(max_size=20))
def test_invalid_key_is_refused_without_a_fault(text: str, rollout_id: str) -> None:
    """Whatever a header or a path holds."""
    assert KEY.read(rollout_id, text) is None
    assert KEY.read(rollout_id, "pst_" + text) is None


@pytest.mark.requirement("R4")
@given(GRANTS)
def test_scope_and_expiry_cannot_be_widened(grant: AgentKey) -> None:
    """A head that says more, under the old MAC, is nothing."""
    token = KEY.write("r", grant)
    data = base64.urlsafe_b64decode(token.removeprefix("pst_"))
    wide = KEY.write("r", AgentKey(grant.id, ALL, 0, None))
    head = base64.urlsafe_b64decode(wide.removeprefix("pst_"))[:28]
    forged = "pst_" + base64.urlsafe_b64encode(head + data[28:]).decode()
    assert (KEY.read("r", forged) is None) is (forged != token)


def test_key_expires_at_its_earliest_limit() -> None:
    """A second revocation with a longer grace brings nothing back."""
    grant = AgentKey(b"i" * ID_BYTES, ALL, 0)
    assert grant.retire(0, 500)
    assert not grant.retire(0, 900)
    assert grant.retire(0, 100)
    assert grant.dies_ms == 100


@pytest.mark.requirement("R4")
def test_a_token_that_was_revoked_at_once_is_void_at_any_time() -> None:
    """By a clock that is set back afterwards as well; when it was revoked stays known."""
    grant = AgentKey(b"i" * ID_BYTES, ALL, 0)
    assert grant.retire(1000, 900)
    assert grant.retire(1500, 0)
    assert not grant.retire(1700, 0)
    assert grant.dies_ms is not None and grant.dies_ms <= 0
    assert grant.revoked_ms == 1500
