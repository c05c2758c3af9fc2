"""What becomes of vLLM's processes when the service is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

# The service starts an engine core, which starts a worker, which watches the service.
PROCESSES = """
import os, subprocess, sys, time
from penstock_inference.engines.vllm.parent_death import follow
who, service = sys.argv[1], int(sys.argv[2])
if who == "worker":
    print(follow(service), os.getppid(), flush=True)
else:
    here = os.getpid() if who == "service" else service
    below = {"service": "core", "core": "worker"}[who]
    subprocess.Popen([sys.executable, "-c", sys.argv[3], below, str(here), sys.argv[3]])
sys.stdin.read()
"""


@pytest.mark.requirement("R50")
def test_the_engine_dies_with_a_service_that_is_killed() -> None:
    """Nothing is left that holds an accelerator."""
    with subprocess.Popen(
        [sys.executable, "-c", PROCESSES, "service", "0", PROCESSES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdout is not None
        follows, core = service.stdout.readline().split()
        watched = os.pidfd_open(int(core))
        try:
            assert follows == "True"
            os.kill(service.pid, signal.SIGKILL)
            assert select.select([watched], [], [], 60)[0]  # ready when the process has ended
        finally:
            os.close(watched)


@pytest.mark.requirement("R50")
def test_a_core_that_is_no_child_of_the_service_is_left_alone() -> None:
    """Only our own processes."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        worker = [sys.executable, "-c", PROCESSES, "worker", str(stranger.pid), ""]
        answer = subprocess.run(worker, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        stranger.kill()
    assert answer.stdout.split()[0] == "False"
