"""vLLM in this process: the engine for real training, on any accelerator that vLLM supports.

Token ids go in and out; its HTTP server is not used. vLLM's modules are imported only when the engine is opened:
without vLLM the service reports what to install, and nothing here assumes a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from penstock_inference.engines.base import Engine, EngineOptions

_ENVIRONMENT = {
    # The service makes no connections of its own: no usage reports, no model lookups on a hub.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # A fork would copy locks held by gRPC's threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ONE_MACHINE = {
    # vLLM's processes connect without credentials: use loopback, unless its workers are on other machines.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


async def open_engine(options: EngineOptions) -> Engine:
    """The entry point `vllm` of the group `penstock.inference.engines`. Existing environment variables win."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    elsewhere = options.extra.get("distributed_executor_backend") == "ray"
    for name, value in (_ENVIRONMENT | ({} if elsewhere else _ONE_MACHINE)).items():
        os.environ.setdefault(name, value)
    from penstock_inference.engines.vllm.engine import VllmEngine

    return await VllmEngine.open(options)
