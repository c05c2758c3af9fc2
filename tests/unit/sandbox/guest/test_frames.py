"""The conversation between the service and an attendant, whatever happens to the bytes between them."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock_sandbox.backends.guest_client import program
from penstock_sandbox.guest import frames
from penstock_sandbox.guest.frames import ACK, DATA, HELLO, Decoder, Ledger, Malformed, Unarmour

payloads = st.binary(max_size=40)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.requirement("R26")
@given(st.lists(st.tuples(st.integers(4, 11), payloads)), st.lists(st.integers(0, 10_000)))
def test_frames_come_out_as_they_went_in_however_the_bytes_are_split(
    said: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(frames.encode(kind, 7, index + 1, payload) for index, (kind, payload) in enumerate(said))
    decoder = Decoder()
    heard = [frame for piece in split(data, cuts) for frame in decoder.feed(piece)]
    assert [(frame.kind, frame.payload) for frame in heard] == said
    assert decoder.between


@pytest.mark.requirement("R26")
@given(st.lists(payloads, max_size=5), st.lists(st.integers(0, 10_000)), st.sampled_from([b"", b"motd\n", b"$ \n\n"]))
def test_armour_is_reversible_and_skips_a_shells_output(said: list[bytes], cuts: list[int], noise: bytes) -> None:
    data = noise + noise.join(frames.armour(part) for part in said) + noise
    assert data.isascii()
    clear = Unarmour()
    assert b"".join(clear.feed(piece) for piece in split(data, cuts)) == b"".join(said)


@pytest.mark.requirement("R80")
@given(st.binary(max_size=200))
def test_invalid_bytes_are_malformed_or_nothing(noise: bytes) -> None:
    """What comes out of a sandbox is not trusted."""
    try:
        for frame in Decoder().feed(noise):
            frames.parse_message(frame.payload)
            frames.parse_number(frame.payload)
    except Malformed:
        return


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(
    "header", [(frames.MAX_PAYLOAD + 1, DATA, 1, 1), (0, 0, 1, 1), (0, 99, 1, 1), (0, DATA, 1, 0), (0, HELLO, 0, 3)]
)
def test_a_frame_that_no_peer_sends_is_malformed(header: tuple[int, int, int, int]) -> None:
    with pytest.raises(Malformed):
        list(Decoder().feed(frames.HEADER.pack(*header)))


@pytest.mark.requirement("R80")
def test_a_missing_frame_and_an_impossible_acknowledgement_are_malformed() -> None:
    ledger = Ledger()
    with pytest.raises(Malformed):
        ledger.receive(frames.Frame(DATA, 1, 2, b""))
    with pytest.raises(Malformed):
        ledger.acknowledged(1)
    ledger.number_frame(DATA, 1, b"x")
    ledger.acknowledged(1)
    with pytest.raises(Malformed):
        ledger.after(0)


@pytest.mark.requirement("R26")
def test_unacknowledged_sender_is_full_and_has_room_after() -> None:
    """Back-pressure, not loss."""
    ledger = Ledger()
    said = 0
    while not ledger.full:
        ledger.number_frame(DATA, 1, bytes(frames.PIECE))
        said += 1
    assert said * (frames.PIECE + frames.HEADER.size) - frames.KEPT <= frames.PIECE + frames.HEADER.size
    ledger.acknowledged(said)
    assert not ledger.full


class End:
    """One end of the conversation, as both of them use the ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.said: list[bytes] = []
        self.heard: list[bytes] = []
        self.attach()

    def attach(self) -> None:
        self.decoder = Decoder()
        self.outgoing = bytearray()
        """On its way; lost with the pipe."""

    def say(self, payload: bytes) -> None:
        self.said.append(payload)
        self.outgoing += self.ledger.number_frame(DATA, 1, payload)

    def hear(self, data: bytes) -> None:
        for frame in self.decoder.feed(data):
            if frame.kind == ACK:
                self.ledger.acknowledged(frames.parse_number(frame.payload))
            elif self.ledger.receive(frame):
                self.heard.append(frame.payload)
                self.outgoing += self.ledger.acknowledgement()


class Conversation(RuleBasedStateMachine):
    """Two ends, and a pipe that delivers what it likes and breaks at any byte."""

    @initialize()
    def begin(self) -> None:
        self.ends = (End(), End())

    @rule(who=st.integers(0, 1), payload=payloads, times=st.sampled_from([1, 1, 2, 300]))
    def say(self, who: int, payload: bytes, times: int) -> None:
        for _ in range(times):
            self.ends[who].say(payload)

    @rule(who=st.integers(0, 1), amount=st.integers(1, 20_000))
    def deliver(self, who: int, amount: int) -> None:
        speaker, hearer = self.ends[who], self.ends[1 - who]
        data = bytes(speaker.outgoing[:amount])
        del speaker.outgoing[:amount]
        hearer.hear(data)

    @rule(amounts=st.tuples(st.integers(0, 500), st.integers(0, 500)))
    def cut(self, amounts: tuple[int, int]) -> None:
        for who, amount in enumerate(amounts):
            self.ends[1 - who].hear(bytes(self.ends[who].outgoing[:amount]))
        self.attach_again()

    def attach_again(self) -> None:
        heard = [end.ledger.received for end in self.ends]
        for end in self.ends:
            end.attach()
        for who, end in enumerate(self.ends):
            for frame in end.ledger.after(heard[1 - who]):
                end.outgoing += frame

    @invariant()
    def nothing_is_lost_doubled_or_reordered(self) -> None:
        if hasattr(self, "ends"):
            for who, end in enumerate(self.ends):
                other = self.ends[1 - who]
                assert other.heard == end.said[: len(other.heard)]

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        self.attach_again()
        while any(end.outgoing for end in self.ends):
            for who in (0, 1):
                if self.ends[who].outgoing:
                    self.deliver(who, len(self.ends[who].outgoing))
        for who, end in enumerate(self.ends):
            assert self.ends[1 - who].heard == end.said


@pytest.mark.requirement("R26")
def test_pipe_cut_at_any_byte_loses_and_doubles_nothing() -> None:
    run_state_machine_as_test(Conversation, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@pytest.mark.parametrize("part", program.PARTS)
def test_each_part_of_the_program_is_python_3_8(part: str) -> None:
    """The attendant runs on whatever interpreter a sandbox has, from 3.8 on."""
    tree = ast.parse(program.source(part), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names | {"penstock_sandbox"}
    # In Python 3.8 it imports subprocess when it is first asked, and by then the guest can import nothing more.
    assert "platform" not in imported


@pytest.mark.requirement("R53")
def test_the_program_is_one_text_that_needs_nothing_else(tmp_path: Path) -> None:
    """An interpreter alone, without our packages, runs it."""
    ast.parse(program.text(), feature_version=(3, 8))
    path = tmp_path / "attendant.py"
    path.write_text(program.text(), encoding="utf-8")
    answer = subprocess.run(
        [sys.executable, "-I", "-S", path, "attach", "--socket", tmp_path / "absent"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 69 and "No such file" in answer.stderr
