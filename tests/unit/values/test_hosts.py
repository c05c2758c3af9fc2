"""Patterns of hosts: what matches them, and what is within another one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.values import hosts


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("host", "pattern", "matches"),
    [
        ("pypi.org", "pypi.org", True),
        ("a.pypi.org", "pypi.org", False),
        ("a.pypi.org", "*.pypi.org", True),
        ("a.b.pypi.org", "*.pypi.org", True),
        ("pypi.org", "*.pypi.org", False),
        ("evilpypi.org", "*.pypi.org", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("::1", "10.0.0.0/8", False),
        ("a.example", "10.0.0.0/8", False),
        ("a.example", "*", True),
        ("10.1.2.3", "*", False),
        ("0x7f000001", "*", False),
        ("127.0.0.0x1", "*", False),
        ("0177.0x1", "*", False),
        ("0x.a.example", "*", True),
    ],
)
def test_a_host_matches_names_and_blocks(host: str, pattern: str, matches: bool) -> None:
    assert hosts.matches(host, [pattern]) is matches


@pytest.mark.requirement("R141", "R54")
@pytest.mark.parametrize(
    ("wide", "narrow", "covers"),
    [
        ("*", "*.a.test", True),
        ("*", "*", True),
        ("*.a.test", "*", False),
        ("*", "10.0.0.0/8", False),
        ("*.a.test", "b.a.test", True),
        ("*.a.test", "*.b.a.test", True),
        ("*.a.test", "a.test", False),
        ("b.a.test", "*.a.test", False),
        ("*.a.test", "xa.test", False),
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.1.0.0/16", "10.0.0.0/8", False),
        ("::/0", "10.0.0.0/8", False),
        ("*.a.test", "10.0.0.0/8", False),
    ],
)
def test_a_pattern_covers_only_what_it_matches(wide: str, narrow: str, covers: bool) -> None:
    assert hosts.covers(wide, narrow) is covers


@pytest.mark.parametrize(
    "pattern", ["", "*", "A.test", "a..test", "a.test.", "a_b/c", "10.0.0.1/8", "1.2", "*.*.test", "é.test"]
)
def test_what_is_no_pattern_is_known(pattern: str) -> None:
    assert not hosts.is_pattern(pattern)


NAMES = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(".".join)
ADDRESSES = st.integers(0, 7).map("10.0.0.{}".format)
BLOCKS = st.integers(30, 32).flatmap(
    lambda bits: st.integers(0, 7).map(lambda number: f"10.0.0.{number >> (32 - bits) << (32 - bits)}/{bits}")
)
PATTERNS = st.one_of(NAMES, NAMES.map("*.{}".format), ADDRESSES, BLOCKS)
DENIED = st.lists(PATTERNS, max_size=3)
LISTS = st.tuples(st.lists(st.one_of(PATTERNS, st.just("*")), min_size=1, max_size=3), DENIED)
EVERY_HOST = [
    *(".".join(labels) for size in (1, 2, 3) for labels in itertools.product("ab", repeat=size)),
    *map("10.0.0.{}".format, range(8)),
]


def reached(allowed: list[str], denied: list[str]) -> set[str]:
    return {host for host in EVERY_HOST if hosts.matches(host, allowed) and not hosts.matches(host, denied)}


@pytest.mark.requirement("R141")
@settings(max_examples=150)
@given(LISTS, LISTS)
def test_a_narrower_list_reaches_no_host_that_the_wider_does_not(
    one: tuple[list[str], list[str]], other: tuple[list[str], list[str]]
) -> None:
    if hosts.is_narrower(*one, *other):
        assert reached(*one) <= reached(*other)


@pytest.mark.requirement("R141")
@settings(max_examples=60)
@given(LISTS, DENIED, st.data())
def test_less_of_what_is_allowed_and_more_that_is_denied_is_always_narrower(
    listed: tuple[list[str], list[str]], more: list[str], data: st.DataObject
) -> None:
    allowed, denied = listed
    fewer = data.draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=3))
    assert hosts.is_narrower(fewer, [*denied, *more], allowed, denied)
    assert not reached(fewer, [*denied, *more]) & {host for host in EVERY_HOST if hosts.matches(host, denied)}


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("allowed", "denied", "narrower"),
    [
        (["pypi.org"], [], True),  # what was denied is not in it
        (["a.test"], [], False),
        (["*.test"], ["a.test"], True),
        (["*.test"], ["b.test"], False),
        (["*"], ["*.test"], True),
        (["*"], ["b.test"], False),
        (["10.0.0.0/8"], ["a.test"], False),
    ],
)
def test_what_is_denied_stays_denied_as_long_as_it_is_listed(
    allowed: list[str], denied: list[str], narrower: bool
) -> None:
    assert hosts.is_narrower(allowed, denied, ["*"], ["a.test"]) is narrower


@pytest.mark.requirement("R141", "R64")
@pytest.mark.parametrize(
    ("allowed", "denied", "found"),
    [
        (["a.test"], [], []),
        ([], ["*.a.test", "10.0.0.0/8"], []),
        (["*"], ["a.test"], []),
        ([], [], [("hosts", None)]),
        (["a.test", "A.test"], [], [("hosts", 1)]),
        (["*"], ["*"], [("denied_hosts", 0)]),
        ([], ["a.test"] * (hosts.MOST + 1), [("denied_hosts", None)]),
    ],
)
def test_what_is_wrong_with_a_list_is_found_by_its_field(
    allowed: list[str], denied: list[str], found: list[tuple[str, int | None]]
) -> None:
    assert [(field, index) for field, index, _ in hosts.problems(allowed, denied)] == found


@pytest.mark.requirement("R141", "R54")
def test_an_operators_star_permits_lists_to_name_any() -> None:
    assert hosts.not_permitted(["*", "a.test", "10.0.0.0/8"], ["*"]) == []
    assert hosts.not_permitted(["*", "a.test", "b.a.test"], ["*.a.test", "10.0.0.0/8"]) == ["*", "a.test"]
