"""What a backend says is the same in each of its sandboxes is the same, and variables come in one order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from tests.conformance.sandbox.conftest import Box, MakeBox

from penstock.sandbox.v1 import sandbox_pb2 as sb

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOOKS: Final[Mapping[int, str]] = {
    sb.REPEATABLE_PART_HOSTNAME: "cat /proc/sys/kernel/hostname",
    sb.REPEATABLE_PART_MACHINE_ID: "cat /etc/machine-id; echo $?",
    sb.REPEATABLE_PART_PROCESS_IDS: "echo $$",
}
"""A command for each part whose output is then equal."""


@pytest.mark.requirement("R128")
async def test_what_a_backend_calls_repeatable_is_equal_in_two_sandboxes(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """The clocks as far as they can be: a command runs within a minute of the sandbox's making."""
    boxes = [await make_box(repeatable=True) for _ in range(2)]
    for part in capabilities.repeatable:
        if part == sb.REPEATABLE_PART_CLOCKS:
            for box in boxes:
                assert 1000 <= await uptime(box) < 1060, "begins at a thousand seconds"
            continue
        first, second = [await box.run(shell=LOOKS[part]) for box in boxes]
        assert first.stdout == second.stdout, sb.RepeatablePart.Name(part)


async def uptime(box: Box) -> float:
    """Seconds of the boot clock."""
    return float((await box.out("cat /proc/uptime")).split()[0])


@pytest.mark.requirement("R128")
async def test_a_repeatable_sandbox_has_the_wall_clock_of_its_machine(make_box: MakeBox) -> None:
    plain, repeatable = await make_box(), await make_box(repeatable=True)
    before = int(await plain.out("date +%s"))
    seen = int(await repeatable.out("date +%s"))
    assert before <= seen <= int(await plain.out("date +%s"))


@pytest.mark.requirement("R128")
async def test_variables_come_in_one_order(make_box: MakeBox) -> None:
    """However they are given: a message's map has none."""
    box = await make_box(env=dict.fromkeys(("ZULU", "ALFA", "MIKE"), "1"))
    names = ["KILO", "YANKEE", "BRAVO"]
    seen = [await box.run("cat", "/proc/self/environ", env=dict.fromkeys(order, "1")) for order in (names, names[::-1])]
    assert seen[0].stdout == seen[1].stdout
    given = [entry.partition("=")[0] for entry in seen[0].stdout.decode().split("\0")]
    ours = [name for name in given if name in {*names, "ZULU", "ALFA", "MIKE"}]
    assert ours == sorted(ours) and len(ours) == 6
