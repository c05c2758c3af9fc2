"""The checks of `make gpu`: what each shows, what it needs, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_S: Final = 2400
"""Of all checks together."""


def _pytest(path: str, *more: str) -> tuple[str, ...]:
    folder = path if not path.endswith(".py") else "tests/gpu"
    return ("-m", "pytest", "-q", path, f"--confcutdir={folder}", "-p", "no:cacheprovider", *more)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    `arguments` are those of the Python that has vLLM; `gpus` is how many it needs, `limit_s` when it is ended.
    """

    name: str
    shows: str
    gpus: int
    limit_s: int
    arguments: tuple[str, ...]


CHECKS: Final = (
    Check(
        "vllm",
        "the engine's tests that also run on a CPU, without adapters",
        1,
        420,
        _pytest("tests/integration/vllm", "--timeout", "400"),
    ),
    Check(
        "graphs", "CUDA graphs: logprobs of one forward pass, new weights too", 1, 240, _pytest("tests/gpu/graphs.py")
    ),
    Check("adapters", "two adapters in bfloat16, sampled and scored", 1, 120, _pytest("tests/gpu/adapters.py")),
    Check("sleep", "sleep frees memory, waking gives the same answers", 1, 150, _pytest("tests/gpu/sleep.py")),
    Check("experts", "routed experts are those of one forward pass", 1, 150, _pytest("tests/gpu/experts.py")),
    Check(
        "ipc", "a trainer on the same GPU moves weights by IPC", 1, 150, _pytest("tests/gpu/transfer.py", "-k", "ipc")
    ),
    Check("nccl", "a trainer moves weights by NCCL", 2, 150, _pytest("tests/gpu/transfer.py", "-k", "nccl")),
    Check("tensor-parallel", "one model on two GPUs", 2, 150, _pytest("tests/gpu/parallel.py", "-k", "tensor")),
    Check("data-parallel", "two copies behind one engine", 2, 150, _pytest("tests/gpu/parallel.py", "-k", "data")),
    Check("replicas", "two engines, each on its own GPU", 2, 150, _pytest("tests/gpu/parallel.py", "-k", "replicas")),
    Check("trl", "the real TRL trains on rollouts", 1, 150, _pytest("tests/integration/trl/test_grpo.py")),
    Check("recipe", "examples/gpu with its tiny model", 1, 420, ("-m", "examples.gpu", "--dry-run", "--out")),
)
"""Cheap ones with one GPU first: what is not reached in time is named."""
