"""The unmodified SDKs and the stand-ins of their service understand each other: what all other tests of hf stand on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest
from tests.support.hf_jobs.client import hf_jobs

pytestmark = pytest.mark.asyncio


async def _tour(what: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with hf_jobs() as jobs:
        environment = {**os.environ, **jobs.environment, "HF_HUB_DISABLE_TELEMETRY": "1"}
        tour = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.hf_jobs.tour", what, stdout=asyncio.subprocess.PIPE, env=environment
        )
        out, _ = await tour.communicate()
        assert tour.returncode == 0
        return json.loads(out), await jobs.jobs()


@pytest.mark.requirement("R48")
async def test_the_hub_sdk_finds_what_it_expects() -> None:
    """Lifecycle, streams, input, timeouts, files, background commands and reconnecting, against real processes."""
    told, jobs = await _tour("hub")
    assert (told["hello"]["exit_code"], told["hello"]["stdout"], told["hello"]["stderr"]) == (3, "out\n", "err\n")
    assert told["stdin"] == "HéLLO"
    assert told["streamed"] == "1\n2\n3\n"
    assert told["timed_out"] is True
    assert told["missing"] == 400
    assert "SBX_TOKEN" not in told["token"]
    assert told["file"] is True and told["listed"] == ["down"]
    assert told["background"] == [True] and told["killed"] is True
    assert told["again"] == "0\n"
    assert "CANCELED" in told["after"]
    (job,) = jobs
    assert job["stage"] == "CANCELED" and job["labels"]["tour"] == "1"
    assert job["secrets"] == ["SBX_TOKEN"] and "HF_TOKEN" not in job["environment"]


@pytest.mark.requirement("R48")
async def test_the_hf_sandbox_sdk_finds_its_own_server() -> None:
    """The server of its wheel runs in the job, and answers by name over TLS."""
    told, jobs = await _tour("classic")
    assert told["hello"] == [3, "hello", "err\n"]
    assert told["file"] == [0, 255]
    (job,) = jobs
    assert job["stage"] == "CANCELED" and job["timeout_s"] == 300
