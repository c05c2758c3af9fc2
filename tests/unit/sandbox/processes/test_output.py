"""Outputs are kept, counted and read again, whatever the sizes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_sandbox.processes.output import Output


@pytest.mark.requirement("R26")
@given(
    pieces=st.lists(st.binary(max_size=70_000), max_size=12),
    limit=st.sampled_from([0, 1, 1000, 65_536, 65_537, 200_000, 10**9]),
    tail=st.sampled_from([0, 1, 500, 70_000]),
    reads=st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 100_000)), max_size=5),
)
def test_head_is_kept_and_both_ends_are_shown(
    pieces: list[bytes], limit: int, tail: int, reads: list[tuple[int, int]]
) -> None:
    """Nothing is dropped silently."""
    whole = b"".join(pieces)
    with TemporaryDirectory() as folder:
        output = Output(Path(folder), limit, tail)
        for piece in pieces:
            output.append(piece)
        assert output.total == len(whole)
        assert output.kept == min(len(whole), limit)
        for offset, length in reads:
            assert output.read(offset, length) == whole[:limit][offset : offset + length]
        rest = whole[limit:]
        assert output.tail() == (rest[-tail:] if tail else b"")
        assert output.ends() == whole[:limit] + (rest[-tail:] if tail else b"")
        assert output.truncated == (len(rest) > tail)
        # The spool is reached by its descriptor alone.
        assert list(Path(folder).iterdir()) == []
        output.close()


@pytest.mark.requirement("R23")
def test_small_outputs_never_touch_the_disk(tmp_path: Path) -> None:
    output = Output(tmp_path / "absent", 10**9)
    output.append(b"x" * 65_536)
    assert output.read(0, 10) == b"x" * 10
    output.close()


@pytest.mark.requirement("R26")
def test_ends_of_large_outputs_stay_out_of_memory(tmp_path: Path) -> None:
    """Ended processes are remembered by the hundred, each with the tail that its caller asked for."""
    size, count = 512 * 1024, 32
    tracemalloc.start()
    try:
        outputs = [Output(tmp_path, size, size) for _ in range(count)]
        for output in outputs:
            for _ in range(5):
                output.append(b"x" * size)
            output.append(b"end")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * size
    for output in outputs:
        assert output.tail() == b"x" * (size - 3) + b"end"
        output.close()
