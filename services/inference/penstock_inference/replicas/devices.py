"""Opens a pool: assigns devices to replicas and makes their specs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from penstock_chassis.errors import InvalidArgument, Violation
from penstock_chassis.membership.routing import Router
from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.checkpoint import Checkpoint, Spool
from penstock_inference.replicas import wire
from penstock_inference.replicas.pool import ReplicaPool
from penstock_inference.replicas.supervisor import Policy, ReplicaSupervisor
from penstock_inference.replicas.weight_updates import Updates

VISIBLE = "CUDA_VISIBLE_DEVICES"


async def open_replicas(
    engine: str,
    options: EngineOptions,
    count: int,
    devices: Sequence[str],
    level: Literal["debug", "info", "warning", "error"],
    style: Literal["json", "console"],
    silence_s: float,
) -> ReplicaPool:
    """Start `count` replicas of an engine.

    Args:
        engine: its registered name.
        options: of each replica; `work_dir` must be set.
        count: number of replicas.
        devices: `CUDA_VISIBLE_DEVICES` of each; empty divides this machine's devices evenly.
        level: of the replicas' logs.
        style: of the replicas' logs.
        silence_s: see `ReplicaProcess.start`.

    Raises InvalidArgument (ENGINE_OPTIONS_INVALID), FailedPrecondition (MODEL_UNREADABLE), and the engine's errors.
    """
    assert options.work_dir is not None
    checkpoint = await asyncio.to_thread(Checkpoint.read, options.model_dir)
    spool = options.work_dir / "weights"
    await asyncio.to_thread(spool.mkdir, exist_ok=True)
    router = Router()
    order = wire.Open(engine, replace(options, extra=dict(options.extra), waits_for_itself=False), level, style)
    supervisor = ReplicaSupervisor(
        shares(count, devices, visible_devices()), order, Policy(checkpoint), router, silence_s
    )
    await supervisor.open()
    return ReplicaPool(supervisor, Updates(supervisor, router, Spool(spool)), router)


def shares(count: int, chosen: Sequence[str], visible: Sequence[str]) -> list[Mapping[str, str]]:
    """Each replica's environment.

    Without an explicit choice, each gets the same number of consecutive devices and any remainder is unused. With fewer
    devices than replicas nothing is set, so all see all devices. Raises InvalidArgument (ENGINE_OPTIONS_INVALID).
    """
    if chosen:
        if len(chosen) != count:
            text = f"has devices for {len(chosen)} replicas, but there are {count}"
            raise InvalidArgument(
                f"replica_devices {text}",
                reason="ENGINE_OPTIONS_INVALID",
                violations=[Violation("replica_devices", text)],
            )
        return [{VISIBLE: devices} for devices in chosen]
    each = len(visible) // count
    if not each:
        return [{} for _ in range(count)]
    return [{VISIBLE: ",".join(visible[n * each : (n + 1) * each])} for n in range(count)]


def visible_devices() -> list[str]:
    """The devices of this process: those in its environment, otherwise the machine's NVIDIA devices."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [device for device in visible.split(",") if device]
    return [str(n) for n in range(len([*Path("/proc/driver/nvidia/gpus").glob("*")]))]
