"""Files over a stream, and paths in their place."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import PenstockError
from penstock_inference.weights.uploads import CHUNK_BYTES, Commit, Uploads, under


async def frames(items: Iterable[bytes | Commit]) -> AsyncIterator[bytes | Commit]:
    for item in items:
        yield item


@pytest.mark.requirement("R44")
@given(st.lists(st.binary(max_size=64), max_size=8))
async def test_a_file_is_what_was_sent_in_memory_and_on_disk(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    """Bytes, not more and not fewer."""
    path = tmp_path_factory.mktemp("upload") / "file"
    whole = b"".join(chunks)
    commit = Commit(hashlib.sha256(whole).digest())
    uploads = Uploads(1 << 20)
    assert await uploads.read(frames([*chunks, commit])) == (whole, commit.sha256)
    assert await uploads.write(frames([*chunks, commit]), path) == commit.sha256
    assert path.read_bytes() == whole


@pytest.mark.requirement("R23", "R44")
@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([b"abc", Commit(b"other")], "DIGEST_MISMATCH"),
        ([b"abc"], "UPDATE_FRAME_INVALID"),
        ([b"a" * 600, b"a" * 600], "UPDATE_TOO_LARGE"),
        ([b"a" * (CHUNK_BYTES + 1)], "UPDATE_FRAME_INVALID"),
    ],
)
async def test_incomplete_upload_leaves_no_file(tmp_path: Path, items: list[bytes | Commit], reason: str) -> None:
    """Refused by its reason, and nothing stays on the disk."""
    with pytest.raises(PenstockError) as caught:
        await Uploads(1000).write(frames(items), tmp_path / "file")
    assert caught.value.reason == reason
    assert not [*tmp_path.iterdir()]


@pytest.mark.requirement("R14", "R75")
def test_a_path_leads_to_what_the_operator_allows_and_nowhere_else(tmp_path: Path) -> None:
    """No way out by dots, absolutely, or through a link; what is there and what is not look alike."""
    root = tmp_path / "weights"
    (root / "step").mkdir(parents=True)
    (tmp_path / "secret").write_text("")
    (root / "link").symlink_to(tmp_path / "secret")
    assert under(root, "step", "weights_dir", "path") == root / "step"
    told = set()
    for path in ("../secret", str(tmp_path / "secret"), "link", "absent", "step/../../secret"):
        with pytest.raises(PenstockError) as caught:
            under(root, path, "weights_dir", "path")
        assert caught.value.reason == "PATH_REFUSED"
        told.add(caught.value.message)
    assert len(told) == 1
    with pytest.raises(PenstockError) as caught:
        under(None, "step", "weights_dir", "path")
    assert caught.value.reason == "PATHS_OFF"
