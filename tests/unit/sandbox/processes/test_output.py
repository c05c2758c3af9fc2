"""Outputs are kept, counted and read again, whatever the sizes."""

from __future__ import annotations

import itertools
import random
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.services.processes import descriptors

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


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """The kernel writes no file beyond ``size`` bytes, as on a full disk: a write may be cut before one fails.

    Logs go nowhere meanwhile: pytest keeps them in a file too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with capture_logs():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.requirement("R26", "R23")
@given(
    sizes=st.lists(st.integers(1, 70_000), max_size=12),
    full=st.integers(0, 12),
    limit=st.sampled_from([0, 1000, 65_537, 200_000, 10**9]),
    tail=st.sampled_from([0, 500, 70_000]),
    room=st.integers(0, 250_000),
)
def test_a_full_disk_cuts_an_output_which_says_so(
    sizes: list[int], full: int, limit: int, tail: int, room: int
) -> None:
    """Also when there is space again, as after the first ``full`` pieces: what is readable has no hole."""
    whole = random.Random(0).randbytes(sum(sizes))
    ends = [0, *itertools.accumulate(sizes)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(ends)]
    with TemporaryDirectory() as folder:
        output = Output(Path(folder), limit, tail)
        with full_beyond(room):
            for piece in pieces[:full]:
                output.append(piece)
        for piece in pieces[full:]:
            output.append(piece)
        assert output.total == len(whole)
        assert output.kept <= min(len(whole), limit)
        assert output.read(0, output.kept) == whole[: output.kept]
        last = output.tail()
        assert last == whole[len(whole) - len(last) :]
        assert output.ends() == whole[: output.kept] + last
        assert output.truncated == (output.kept + len(last) < len(whole))
        assert list(Path(folder).iterdir()) == []
        output.close()


@pytest.mark.requirement("R26", "R23")
def test_an_output_that_cannot_spill_keeps_what_it_has(tmp_path: Path) -> None:
    output = Output(tmp_path / "absent", 10**9, 1000)
    for _ in range(100):
        output.append(b"x" * 40_000)
    assert (output.kept, output.total, output.truncated) == (40_000, 4_000_000, True)
    assert output.ends() == b"x" * 40_000
    output.close()


@pytest.mark.requirement("R23")
def test_an_output_that_cannot_spill_leaves_no_descriptor_open(tmp_path: Path) -> None:
    output = Output(tmp_path, 10**9)
    with full_beyond(10):
        output.append(b"x" * 1000)
        output.append(b"y" * 70_000)
    assert output.ends() == b"x" * 1000 and output.truncated
    assert [path for path in descriptors() if path.is_relative_to(tmp_path)] == []


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
