"""A means of transfer for vLLM that needs no GPU: tensors come from files that the trainer wrote.

vLLM loads it as a plugin, in every process, as it would load anybody's; so the four calls run through its own protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTRY_POINT = f"[vllm.general_plugins]\npenstock_test = {__name__}:register\n"


def install(directory: Path) -> None:
    """A distribution that names this module; put the directory on the path."""
    info = directory / "penstock_test_transfer-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-test-transfer\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)


def register() -> None:
    """What vLLM calls; more than once in a process."""
    from safetensors import safe_open
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    if "files" in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class Init(base.WeightTransferInitInfo):  # type: ignore[misc]
        directory: str

    @dataclass
    class Update(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        file: str

    class FilesEngine(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Any) -> None:
            self.directory = Path(init_info.directory)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            with safe_open(self.directory / update_info.file, framework="pt") as file:
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("files", FilesEngine)
