"""Names of images are read as Docker reads them."""

from __future__ import annotations

import pytest

from penstock_chassis.errors import InvalidArgument
from penstock_sandbox.backends.images.reference import parse

_DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12", "docker.io/library/python:3.12"),
        ("owner/name", "docker.io/owner/name:latest"),
        ("docker.io/python:3.12", "docker.io/library/python:3.12"),
        ("index.docker.io/python:3.12", "docker.io/library/python:3.12"),
        ("ghcr.io/owner/name:1", "ghcr.io/owner/name:1"),
        ("localhost/name", "localhost/name:latest"),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000/a/b:c"),
        (f"python@{_DIGEST}", f"docker.io/library/python@{_DIGEST}"),
        (f"python:3.12@{_DIGEST}", f"docker.io/library/python@{_DIGEST}"),
    ],
)
def test_a_short_name_stands_for_registry_repository_and_tag(text: str, whole: str) -> None:
    assert str(parse(text)) == whole


@pytest.mark.parametrize(
    "text",
    ["", "/", "a b", "Python", "../x", "a/../b", "host.io/", "a:b:c", "a@sha256:1", "a@", "x?y", "x#y", "ä", "a" * 600],
)
def test_a_malformed_name_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(text)
    assert refused.value.reason == "FIELD_INVALID"
    assert refused.value.violations[0].field == "spec.image"
