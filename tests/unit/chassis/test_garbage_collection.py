"""The collector of a service, in a process of its own: it changes what belongs to the whole process."""

import asyncio
import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, collections, gc, json, sys
from penstock_chassis.garbage_collection import Collector

YOUNG, LEAST = 500, 20_000
fulls = 0


def count(phase, info):
    global fulls
    fulls += phase == "stop" and info["generation"] == 2


class Node:
    alive = 0

    def __init__(self, cyclic):
        Node.alive += 1
        self.me = self if cyclic else None

    def __del__(self):
        Node.alive -= 1


async def main():
    Collector(asyncio.get_running_loop(), young=YOUNG, least=LEAST).begin()
    gc.callbacks.append(count)
    kept = collections.deque(maxlen=int(sys.argv[2]))
    most = 0
    for _ in range(300):
        for _ in range(1000):
            kept.append(Node(sys.argv[1] == "cycles"))
        most = max(most, Node.alive)
        await asyncio.sleep(0)
    print(json.dumps({"most": most, "fulls": fulls}))


asyncio.run(main())
"""


async def ran(kind: str, kept: int) -> dict[str, int]:
    """What became of 300,000 objects, of which the last `kept` are in use."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, kind, str(kept), stdout=subprocess.PIPE
    )
    told, _ = await process.communicate()
    found: dict[str, int] = json.loads(told.splitlines()[-1])  # the lines before are the log's
    return found


@pytest.mark.requirement("R32")
async def test_garbage_in_use_at_a_collection_is_found_before_it_doubles() -> None:
    """Nobody looks at it again until then, yet a service that makes cycles does not grow for ever."""
    found = await ran("cycles", 5000)
    assert 0 < found["fulls"] < 100
    assert found["most"] < 60_000


@pytest.mark.requirement("R32")
async def test_living_objects_are_collected_only_after_doubling() -> None:
    """A full collection of what a busy service keeps stalls it for a third of a second."""
    found = await ran("none", 1_000_000)
    assert found == {"most": 300_000, "fulls": found["fulls"]}
    assert 1 <= found["fulls"] <= 5


@pytest.mark.requirement("R32")
async def test_garbage_without_cycles_causes_no_further_collection() -> None:
    """However many came and went."""
    assert await ran("none", 5000) == {"most": 5000, "fulls": 0}
