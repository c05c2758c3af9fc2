"""What a sandbox's helper keeps of processes and jobs, whose ids the kernel gives again."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_sandbox.backends.local.spawner import killing, wire
from penstock_sandbox.backends.local.spawner.helper import SandboxHelper

PID = 7


class Kernel:
    """Gives every process the same id, and an end when the test says so."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []
        """Ids and statuses of children that are to be reaped."""
        self.killed: list[str] = []

    def posix_spawn(self, *_: object, **__: object) -> int:
        return PID

    def wait4(self, pid: int, _: int) -> tuple[int, int, resource.struct_rusage]:
        # Programs run on when their start is answered.
        found, status = self.ended.pop(0) if pid == -1 and self.ended else (0, 0)
        return found, status, resource.getrusage(resource.RUSAGE_SELF)

    def kill_tree(self, _: int, tag: str, *__: object) -> None:
        self.killed.append(tag)


class Served:
    """A helper, and the service's end of its channel."""

    def __init__(self, helper: SandboxHelper, end: socket.socket) -> None:
        self.helper = helper
        self.end = end

    def asked(self, **request: object) -> wire.Message:
        """The reply to a request."""
        self.helper._answer(dict(request), [])
        (reply,) = self.sent()
        return reply

    def starts(self, number: int, forget: tuple[int, ...] = ()) -> None:
        window = {"cwd": "/", "env": {}, "argv": ["/bin/true"], "pty": (24, 80)}
        assert self.asked(op="start", seq=number, forget=list(forget), **window) == {"pid": PID, "seq": number}

    def sent(self) -> list[wire.Message]:
        """What it sent since the last call."""
        found: list[wire.Message] = []
        while True:
            try:
                received = wire.receive(self.end)
            except BlockingIOError:
                return found
            assert received is not None
            for descriptor in received[1]:
                os.close(descriptor)
            found.append(received[0])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(os, "posix_spawn", made.posix_spawn)
    monkeypatch.setattr(os, "wait4", made.wait4)
    monkeypatch.setattr(killing, "kill_tree", made.kill_tree)
    return made


@pytest.fixture
def served(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    def new_tag(self: SandboxHelper) -> int:
        """A file of its own, since a namespace of its own takes rights that a test may not have."""
        return os.memfd_create("tag")

    monkeypatch.setattr(SandboxHelper, "_new_tag", new_tag)
    score = tmp_path / "oom_score_adj"
    score.write_text("0")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    before = Path.cwd()
    host_proc, oom_score = os.open("/proc", os.O_RDONLY), os.open(score, os.O_RDWR)
    with ours, theirs:
        helper = SandboxHelper(theirs, host_proc, oom_score, os.getpid())
        yield Served(helper, ours)
    left = [helper._proc, helper._null, host_proc, oom_score, *helper._tags.values()]
    for descriptor in [*left, *([helper._next_tag] if helper._next_tag is not None else [])]:
        os.close(descriptor)
    os.chdir(before)


def _tag(descriptor: int) -> str:
    return f"uts:[{os.fstat(descriptor).st_ino}]"


@pytest.mark.requirement("R39")
def test_the_end_of_a_file_job_is_no_processs_exit(served: Served, kernel: Kernel) -> None:
    served.helper._jobs.add(PID + 1)
    served.starts(1)
    kernel.ended = [(PID + 1, 0), (PID, 3 << 8)]
    served.helper._reap()
    (exited,) = served.sent()
    assert (exited["event"], exited["process"], exited["status"]) == ("exit", 1, 3 << 8)
    assert not served.helper._jobs


@pytest.mark.requirement("R40", "R23")
def test_two_processes_of_one_id_are_killed_and_forgotten_apart(served: Served, kernel: Kernel) -> None:
    served.starts(1)
    kernel.ended = [(PID, 0)]
    served.helper._reap()
    assert [message["process"] for message in served.sent()] == [1]
    served.starts(2)
    first, second = (served.helper._tags[number] for number in (1, 2))
    tags = [_tag(first), _tag(second)]
    for number in (1, 2):
        assert served.asked(op="kill", process=number, within=1.0, seq=10 + number) == {"seq": 10 + number}
    assert kernel.killed == tags and tags[0] != tags[1]
    served.starts(3, forget=(1,))
    assert _tag(second) == tags[1]
    assert set(served.helper._tags) == {2, 3}
    refused = served.asked(op="kill", process=1, within=1.0, seq=20)
    assert refused["what"] == "no such process"


@pytest.mark.requirement("R39")
def test_a_signal_to_an_ended_process_is_not_sent_to_another_of_its_id(
    served: Served, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append((pid, number)))
    served.starts(1)
    kernel.ended = [(PID, 0)]
    served.helper._reap()
    served.sent()
    served.starts(2)
    assert served.asked(op="signal", process=1, pid=PID, signal=15, seq=3)["what"] == "the process has ended"
    assert signalled == []
    assert served.asked(op="signal", process=2, pid=PID, signal=15, seq=4) == {"seq": 4}
    assert signalled == [(PID, 15)]
