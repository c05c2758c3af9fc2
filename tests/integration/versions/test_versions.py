"""The baseline's services with today's client, and the reverse, each installed from wheels into its own environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from protos.breaking import BASELINE
from tests.support import policy, wheels
from tests.support.services.stack import disjoint_uids

from penstock_inference.testing import random_config, random_tensors, write_model

pytestmark = pytest.mark.timeout(600)  # a guard: wheels are built and eight services started

CLIENT: Final = Path(__file__).with_name("client.py")
REPLIES: Final = (policy.bash("cp note.txt out.txt"), "The word is copied.")


def environment(folder: Path) -> dict[str, str]:
    """What whoever runs the tests has set for Python and Penstock means nothing here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "OPENBLAS_NUM_THREADS": "1"}


def model(folder: Path) -> Path:
    """A small model with random weights and the tokenizer of the tests' policy; beside it the weights to push."""
    policy.FILES.write(folder)
    config = random_config(vocab_size=384, max_position_embeddings=8192, eos_token_id=policy.CODEC.end_of_turn_id)
    weights: dict[str, Any] = random_tensors(config, seed=1)
    np.savez(folder.with_suffix(".npz"), **weights)
    return write_model(folder, config, random_tensors(config))


async def used(services: Path, client: Path, folder: Path) -> dict[str, Any]:
    """What the program saw with the client of one environment and the services of another."""
    served = model(folder / "model")
    up = [str(services), "-m", "penstock.cli.main", "up", "--free-ports", "--no-dashboard", "--json"]
    up += ["--model-dir", str(served), "--set", f"sandbox.first_uid={disjoint_uids()}"]
    log = folder / "up.log"
    with log.open("wb") as errors:
        running = await asyncio.create_subprocess_exec(
            *up, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL
        )
    try:
        assert running.stdout is not None
        line = await running.stdout.readline()
        assert line, log.read_text()
        answers = [dict(zip(("token_ids", "logprobs"), policy.sampled(text), strict=True)) for text in REPLIES]
        given = folder / "input.json"
        given.write_text(json.dumps({"answers": answers, "weights": str(served.with_suffix(".npz"))}))
        program = [str(client), str(CLIENT), json.loads(line)["connection"], str(given)]
        done = await asyncio.to_thread(
            subprocess.run, program, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
        )
    finally:
        running.terminate()
        await running.wait()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{log.read_text()}"
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def is_whole(seen: Mapping[str, Any]) -> None:
    """Nothing is missing, and what was delivered comes back bit for bit."""
    assert seen["sandboxes"] == {
        "listed": True,
        "others": True,
        "read": "one\n",
        "files": ["a.txt", "seed.txt"],
        "ran": ["exited", 0, "one\nseedthree"],
        "process": {"stdout": "a line\n", "stderr": "ended\n", "code": 3, "waited": 3, "listed": True},
    }
    rollouts = seen["rollouts"]
    delivered = [policy.sampled(text) for text in REPLIES]
    for sample in (*rollouts.pop("samples"), *rollouts.pop("same")):
        assert sample["trained"] == [token for ids, _ in delivered for token in ids]
        assert sample["logprobs"] == [value for _, logprobs in delivered for value in logprobs]
        assert "Copy the word in note.txt" in policy.CODEC.decode(sample["prompt"])
        assert sample["versions"] == [7]
    assert rollouts == {
        "asked": [0, 0, 1, 1],
        "outcomes": [["None", 0.75], ["None", 0.75]],
        "grades": ["exact", "exact"],
        "listed": True,
        "watched": True,
        "phases": ["ended", "ended"],
        "events": True,
    }
    assert seen["engine"] == {"counts": [True, True], "version": [0, 1, 1, 1]}


@pytest.mark.requirement("R111")
async def test_baseline_and_todays_version_serve_each_others_clients(tmp_path: Path) -> None:
    """A trainer's loop, sandboxes and the engine, both ways."""
    commit = BASELINE.read_text(encoding="utf-8").strip()
    before = wheels.install(await asyncio.to_thread(wheels.of_commit, commit), tmp_path / "baseline")
    now = wheels.install(await asyncio.to_thread(wheels.of_checkout, tmp_path / "wheels"), tmp_path / "today")
    for name, services, client in (("older-services", before, now), ("older-client", now, before)):
        (tmp_path / name).mkdir()
        is_whole(await used(services, client, tmp_path / name))


def test_a_clone_without_the_baseline_says_what_to_run() -> None:
    """As continuous integration's may be, where it fetches one commit only."""
    with pytest.raises(AssertionError, match="git fetch --unshallow"):
        wheels.of_commit("0" * 40)
