"""A trainer in another process moves weights itself, by vLLM's own backends for GPUs."""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import serving
from tests.support.endpoints.loopback import unused_port


def on_gpu(seed: int, device: int) -> dict[str, torch.Tensor]:
    """A policy's tensors on a GPU."""
    return {name: torch.from_numpy(array).to(f"cuda:{device}") for name, array in serving.policy(seed).items()}


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Names, types and shapes, in the order in which they are sent."""
    return {
        "names": [*tensors],
        "dtype_names": ["float32" for _ in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


@pytest.mark.requirement("R63", "R87")
@pytest.mark.parametrize("packed", [False, True])
async def test_weights_come_by_nccl(tmp_path: Path, packed: bool) -> None:
    """The trainer is rank 0 on another GPU; a transfer that is not committed leaves the old weights."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    options = {"transfer_backend": "nccl", "enforce_eager": "true"}
    async with serving.engine(tmp_path, options=options) as ps:
        where = {"master_address": "127.0.0.1", "master_port": unused_port(), "world_size": 2}

        def join() -> Any:
            torch.cuda.set_device(1)  # it is the thread's
            return trainer_init(where)

        joined, _ = await asyncio.gather(
            asyncio.to_thread(join),
            ps.inference.init_transfer("nccl", where | {"rank_offset": 1, "packed": packed}),
        )

        def send(tensors: dict[str, torch.Tensor]) -> None:
            torch.cuda.set_device(1)
            if packed:
                packed_nccl_broadcast_producer(
                    iterator=iter(tensors.items()), group=joined, src=0, post_iter_func=lambda item: item[1]
                )
            else:
                for tensor in tensors.values():
                    joined.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            torch.cuda.current_stream().synchronize()

        for seed, commits in ((1, False), (2, True)):
            tensors = on_gpu(seed, 1)
            async with await ps.inference.start_transfer(seed) as transfer:
                await asyncio.gather(transfer.tensors(described(tensors)), asyncio.to_thread(send, tensors))
                if commits:
                    await transfer.commit()
            await serving.assert_sampled_by(ps, seed if commits else 0, seed if commits else 0)


@pytest.mark.requirement("R63", "R87")
async def test_weights_come_by_ipc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer shares the GPU, and its handles are pickled: vLLM takes them only where the operator allows it."""
    from torch.multiprocessing.reductions import reduce_tensor

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    async with serving.engine(tmp_path, options={"transfer_backend": "ipc", "enforce_eager": "true"}) as ps:
        await ps.inference.init_transfer("ipc", {"packed": False})
        tensors = on_gpu(1, 0)
        gpu = str(torch.cuda.get_device_properties(0).uuid)
        handles = base64.b64encode(pickle.dumps([{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]))
        async with await ps.inference.start_transfer(1) as transfer:
            await transfer.tensors(described(tensors) | {"ipc_handles_pickled": handles.decode()})
            await transfer.commit()
        await serving.assert_sampled_by(ps, 1, 1)
