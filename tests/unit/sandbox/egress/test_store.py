"""The store of recorded responses: bounded, by content, and whole after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.store import IN_USE_S, ROW_BYTES, Response, Store


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def keep(store: Store, recording: str, body: bytes, key: str = "k") -> Response:
    part = store.part(recording)
    try:
        part.write(body)
        return store.keep(recording, key, Response(200, "OK", (("A", "b"),), 0), part)
    finally:
        part.discard()


@pytest.mark.requirement("R141")
def test_a_recording_outlives_its_process_and_equal_bodies_are_one(tmp_path: Path) -> None:
    store = Store(tmp_path, 100_000)
    keep(store, "one", b"x" * 100)
    keep(store, "two", b"x" * 100)
    held = store.bytes
    assert 100 + 2 * ROW_BYTES < held < 200 + 2 * ROW_BYTES
    store.close()
    (tmp_path / "objects" / "part-of-a-crash").write_bytes(b"half")
    again = Store(tmp_path, 100_000)
    found = again.find("two", "k")
    assert found is not None and found.path is not None
    assert (found.path.read_bytes(), found.headers, found.status) == (b"x" * 100, (("A", "b"),), 200)
    assert again.bytes == held and again.find("two", "other") is None
    again.close()


@pytest.mark.requirement("R141")
def test_idle_recordings_make_room_and_used_ones_do_not(tmp_path: Path) -> None:
    clock = Clock()
    store = Store(tmp_path, 100_000, clock)
    size = 100_000 // 4 - 2 * ROW_BYTES
    for number in range(4):
        clock.now += 1
        keep(store, f"r{number}", bytes([number]) * size)
    with pytest.raises(Refusal) as caught:
        keep(store, "more", b"c" * size)
    assert caught.value.reason == "RECORDING_FULL"
    clock.now += IN_USE_S - 1
    assert store.find("r0", "k") is not None  # in use again
    keep(store, "more", b"c" * size)
    assert [name for name in ("r0", "r1", "r2", "r3", "more") if store.find(name, "k")] == ["r0", "r2", "r3", "more"]
    assert len(list((tmp_path / "objects").iterdir())) == 4
    store.close()


@pytest.mark.requirement("R141")
def test_one_recording_never_holds_more_than_its_share(tmp_path: Path) -> None:
    store = Store(tmp_path, 100_000)
    with pytest.raises(Refusal) as caught:
        for number in range(100):
            keep(store, "r", b"", key=str(number))
    assert caught.value.reason == "RECORDING_FULL" and store.find("r", "0") is not None
    assert 20_000 < store.bytes <= 25_000
    store.close()


@pytest.mark.requirement("R141")
def test_what_a_recording_is_receiving_counts_in_its_share(tmp_path: Path) -> None:
    """Many bodies at once, none of a length that was known before."""
    store = Store(tmp_path, 100_000)
    first, second = store.part("r"), store.part("r")
    first.write(b"x" * 12_000)
    second.write(b"y" * 11_000)
    with pytest.raises(Refusal) as caught:
        second.write(b"y" * 3_000)
    assert caught.value.reason == "RECORDING_FULL" and second.size == 11_000
    kept = store.keep("r", "k", Response(200, "OK", (), 0), first)
    first.discard()
    assert kept.size == 12_000
    with pytest.raises(Refusal) as caught:
        store.keep("r", "other", Response(200, "OK", (), 0), second)  # its row has no room
    second.discard()
    assert caught.value.reason == "RECORDING_FULL"
    assert keep(store, "r", b"z" * 8_000, key="third").size == 8_000  # what was discarded counts no more
    assert keep(store, "another", b"x" * 20_000).size == 20_000
    store.close()
