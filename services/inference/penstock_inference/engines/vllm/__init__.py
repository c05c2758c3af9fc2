"""vLLM in this process: the engine for models that people train, on whatever accelerator vLLM runs on.

Token ids go in and come out, its HTTP server is not used. Everything that vLLM brings is imported when the engine is
opened, never before: without vLLM the service tells what to install, and nothing here assumes a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from penstock_inference.engines.base import Engine, EngineOptions

_ENVIRONMENT = {
    # The service speaks to nobody by itself: no usage reports, no looking for models on a hub.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # A fork would copy gRPC's threads' locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ONE_MACHINE = {
    # vLLM's processes speak to each other without credentials: on loopback, unless its workers are on other machines.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


async def open_engine(options: EngineOptions) -> Engine:
    """The entry point `vllm` of the group `penstock.inference.engines`. What the environment already says, holds."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    elsewhere = options.extra.get("distributed_executor_backend") == "ray"
    for name, value in (_ENVIRONMENT | ({} if elsewhere else _ONE_MACHINE)).items():
        os.environ.setdefault(name, value)
    from penstock_inference.engines.vllm.engine import VllmEngine

    return await VllmEngine.open(options)
