"""Which requests the proxy sends upstream at all: those that read."""

from __future__ import annotations

import pytest

from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.greeting import Greeting
from penstock_sandbox.egress.requests import Origin, Request, checked

LISTED = Greeting("sb", "r", ("a.test",), (), (80, 443), recorded_only=False)
GIT = "application/x-git-upload-pack-request"


def posted(target: str, *types: str) -> Request:
    headers = [(b"host", b"a.test"), *((b"content-type", written.encode()) for written in types)]
    return checked(b"POST", target.encode(), headers, Origin("https", "a.test", 443), LISTED)


@pytest.mark.requirement("R141")
@pytest.mark.parametrize("target", ["/r/git-upload-pack", "/a/b/r.git/git-upload-pack"])
def test_a_fetch_of_git_is_a_post_that_reads(target: str) -> None:
    assert posted(target, GIT).url == f"https://a.test{target}"


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    ("target", "types"),
    [
        ("/api/delete/git-upload-pack?action=delete", [GIT]),
        ("/api?x=/git-upload-pack", [GIT]),
        ("/r/git-upload-pack?", [GIT]),
        ("/r\\..\\x/git-upload-pack", [GIT]),
        ("//%2e%2e/git-upload-pack", [GIT]),
        ("/a/../git-upload-pack", [GIT]),
        ("/a;b/git-upload-pack", [GIT]),
        ("/r/git-upload-pack", []),
        ("/r/git-upload-pack", ["application/json"]),
        ("/r/git-upload-pack", [GIT, "application/json"]),
        ("/r/git-upload-pack", [f"{GIT}; charset=utf-8"]),
    ],
)
def test_a_post_that_only_ends_like_a_fetch_is_refused(target: str, types: list[str]) -> None:
    with pytest.raises(Refusal) as caught:
        posted(target, *types)
    assert caught.value.reason == "METHOD_NOT_ALLOWED"
