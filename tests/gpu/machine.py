"""What this machine lacks for the checks, found without importing anything that may be missing."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROBE = """
import json, torch, vllm
from vllm.platforms import current_platform
count = torch.cuda.device_count()
names = [torch.cuda.get_device_name(number) for number in range(count)]
print(json.dumps([vllm.__version__, torch.__version__, current_platform.device_type, names]))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks run on."""

    vllm: str
    torch: str
    gpus: tuple[str, ...]
    """Their names."""


DRIVER: Final = Path("/proc/driver/nvidia/gpus")
DEVICES: Final = Path("/dev")


def gpu_count(proc: Path = DRIVER, devices: Path = DEVICES) -> int:
    """How many NVIDIA GPUs a process may use: those of the driver, or fewer by CUDA_VISIBLE_DEVICES.

    Inside gVisor and some containers the driver's folder is absent, but the devices `nvidia0` and so on are there.
    """
    there = len([*proc.glob("*")]) or len([*devices.glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([device for device in visible.split(",") if device]))


def no_gpu(proc: Path = DRIVER, devices: Path = DEVICES) -> str:
    """Returns a sentence that names what is missing; empty = there is a GPU."""
    if gpu_count(proc, devices):
        return ""
    if not proc.is_dir() and not [*devices.glob("nvidia[0-9]*")]:
        return (
            f"make gpu needs an NVIDIA GPU and its driver: neither {proc} nor {devices}/nvidia0 exists, "
            "so nothing was run on a GPU."
        )
    return (
        "make gpu needs an NVIDIA GPU: CUDA_VISIBLE_DEVICES leaves none of this machine's, so nothing was run on a GPU."
    )


def probe(python: str) -> Machine | str:
    """Returns what a Python has, or a sentence that names what it lacks."""
    ran = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or ["it failed"])[-1]
        return f"make gpu needs vLLM and torch for CUDA in the environment of {python}: {why}"
    vllm, torch, platform, names = json.loads(ran.stdout.splitlines()[-1])
    if platform != "cuda" or not names:
        return f"make gpu needs vLLM for CUDA: vLLM {vllm} in the environment of {python} is built for {platform}."
    return Machine(vllm, torch, tuple(names))
