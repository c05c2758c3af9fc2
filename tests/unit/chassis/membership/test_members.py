"""Which services there are: a list, a DNS name, a file that changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.membership import members
from penstock_chassis.membership.members import File, Member


async def test_a_list_has_its_members_in_the_setting() -> None:
    source = members.parse("static:n0=host-a:7701,n1=[::1]:7701")
    assert await anext(aiter(source.read())) == {
        "n0": Member("n0", "host-a:7701"),
        "n1": Member("n1", "[::1]:7701"),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n0=host:1", "static:NAME=HOST:PORT"),
        ("etcd:host:1", "static:NAME=HOST:PORT"),
        ("static:", "is not NAME=HOST:PORT"),
        ("static:n0=host", "HOST:PORT"),
        ("static:n0=host:70000", "HOST:PORT"),
        ("static:n0=user@host:7701", "HOST:PORT"),
        ("static:n0=a:1,n0=b:1", "same name"),
        ("dns:host", "HOST:PORT"),
        ("file:peers.json", "absolute"),
    ],
)
def test_a_setting_that_names_no_source_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", "\\(")):
        members.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_a_value_error(text: str) -> None:
    try:
        members.parse(text)
        members.parse(f"static:{text}")
    except ValueError:
        pass


async def test_a_name_of_dns_has_every_address_and_is_what_certificates_must_say() -> None:
    found = await anext(aiter(members.parse("dns:localhost:7701").read()))
    assert "127.0.0.1:7701" in found
    assert {member.certified for member in found.values()} == {"localhost"}


@pytest.mark.requirement("R119")
@pytest.mark.parametrize("host", ["node7..cluster", "n" * 64, "a\0b"])
async def test_what_is_no_name_of_dns_has_no_members(host: str) -> None:
    """As a name that is unknown; the service that follows it goes on."""
    assert await anext(aiter(members.parse(f"dns:{host}:7701").read())) == {}


async def test_a_file_is_followed_through_every_state_it_can_be_in(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    seen = aiter(File(path, every_s=0.01).read())
    assert await anext(seen) == {}, "an absent file has no members"
    _replace(path, {"n0": "a:1"})
    assert await anext(seen) == {"n0": Member("n0", "a:1")}
    for broken in ("{", '["a:1"]', '{"n0": "nowhere"}', '{"n0": 3}'):
        _write(path, broken)
        following = asyncio.ensure_future(anext(seen))
        await _read_again(path)
        assert not following.done(), "a broken file keeps the members before it"
        _replace(path, {"n0": "a:1", "n1": f"b:{len(broken)}"})
        assert (await following)["n1"] == Member("n1", f"b:{len(broken)}")


async def _read_again(path: Path) -> None:
    """Let a reader that looks every 10 ms look at least once."""
    reader = aiter(File(path, every_s=0.01).read())
    assert await anext(reader) == {}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(text)
    partial.replace(path)


def _replace(path: Path, listed: Mapping[str, str]) -> None:
    _write(path, json.dumps(listed))
