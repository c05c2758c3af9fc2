"""Patterns of hosts: what matches them, and what is within another one."""

from __future__ import annotations

import pytest

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
        ("10.1.2.3", "*", True),
    ],
)
def test_a_host_matches_names_and_blocks(host: str, pattern: str, matches: bool) -> None:
    assert hosts.matches(host, [pattern]) is matches


@pytest.mark.requirement("R141", "R54")
@pytest.mark.parametrize(
    ("wide", "narrow", "covers"),
    [
        ("*", "*.a.test", True),
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
