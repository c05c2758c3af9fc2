"""What scenarios on a fleet judge by the logs of services, by a name server, and by turns."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime

import pytest
from tests.hosts import dns
from tests.hosts.draining import First, drained, firsts
from tests.hosts.throughput import Turns, call_faults
from tests.hosts.unevenness import peak


def _line(at: float, event: str, **facts: object) -> str:
    return json.dumps({"event": event, "timestamp": datetime.fromtimestamp(at, UTC).isoformat(), **facts})


def _call(began: float, ended: float, method: str, **facts: object) -> str:
    name = f"/penstock.sandbox.v1.SandboxService/{method}"
    return _line(ended, "rpc", method=name, ms=1e3 * (ended - began), **facts)


def test_a_first_sandbox_has_the_time_of_the_call_that_made_it() -> None:
    log = [
        _call(8.0, 9.0, "ForkSandboxes", rollout_id="b"),  # which made none
        _line(10.5, "sandbox ready", rollout_id="a"),
        _call(10.0, 11.0, "ForkSandboxes", rollout_id="a"),
        _call(10.25, 10.75, "Drain"),
        _line(12.0, "sandbox ready", rollout_id="b"),
        _call(11.5, 12.5, "CreateSandbox", rollout_id="b"),
        _call(12.25, 60.0, "Drain"),
        _line(13.0, "sandbox ready", rollout_id="a"),
        _call(12.75, 13.5, "ForkSandboxes", rollout_id="a"),
        '{"event": "rpc", "timest',
    ]
    assert drained("\n".join(log)) == (10.25, 10.75)
    assert firsts("\n".join(log)) == [First("a", 10.0, 10.5), First("b", 11.5, 12.0)]


def test_a_peak_counts_what_lies_within_one_second() -> None:
    assert peak([0.0, 0.5, 1.0, 1.25, 1.375, 3.0]) == 4
    assert peak([]) == 0


@pytest.mark.parametrize(("together", "is_fault"), [([2.0, 2.125, 9.0], False), ([2.0, 2.5, 2.5], True)])
def test_a_gate_is_judged_by_the_median_of_its_turns(together: list[float], is_fault: bool) -> None:
    turns = Turns(64, {"g0": [2.0, 2.0, 2.0], "g1": [1.0]}, {"g0": together, "g1": [1.0]})
    assert [fault.split()[0] for fault in call_faults(turns)] == ["g0"] * is_fault


def _query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 77, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


@pytest.mark.parametrize(
    ("name", "kind", "code", "count"),
    [(dns.NAME, 1, 0, 2), (dns.NAME.upper(), 1, 0, 2), (dns.NAME, 28, 0, 0), ("other.test", 1, 3, 0)],
)
def test_the_name_server_knows_the_addresses_of_one_name(name: str, kind: int, code: int, count: int) -> None:
    query = _query(name, kind)
    answer = dns.answer(query, ["10.77.0.11", "10.77.0.12"])
    number, flags, questions, records = struct.unpack_from("!4H", answer)
    assert (number, flags & 0xF, questions, records) == (77, code, 1, count)
    assert answer[12 : len(query)] == query[12:]
    found = [answer[end - 4 : end] for end in range(len(query) + 16, len(answer) + 1, 16)]
    assert found == [bytes([10, 77, 0, 11]), bytes([10, 77, 0, 12])][:count]
