"""URLs of directories: what is refused before a service starts."""

from __future__ import annotations

import pytest

from penstock.values.directory_urls import checked


@pytest.mark.parametrize(
    "url",
    ["", "runs", "s3://", "file://relative", "s3://key:secret@bucket/x", "s3://b/x?y=1", "simplecache::s3://b/x", "/x"],
)
def test_a_wrong_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError) as error:
        checked(url, "driver")
    assert "secret" not in str(error.value)


def test_a_place_that_cannot_do_what_is_needed_is_refused_by_its_scheme() -> None:
    assert checked("s3://bucket/runs/", "sandbox service", ("file", "s3")) == "s3://bucket/runs"
    with pytest.raises(ValueError, match="begins with file:// or s3://"):
        checked("sftp://host/runs", "sandbox service", ("file", "s3"))
