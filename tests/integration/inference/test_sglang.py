"""The service with the engine `sglang` over gRPC, against the stand-in of SGLang's server."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from tests.support.endpoints.sglang_server import STOP, VOCAB, sglang_server
from tests.support.waiting import eventually

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb

Update = pb.UpdateWeightsRequest


def tensors(number: int) -> dict[str, Any]:
    """The weights `number`."""
    return {"embed.weight": np.ones(3, np.float32), "head.weight": np.full(2, number, np.float32)}


@pytest.mark.requirement("R82", "R87")
async def test_a_push_in_flight_over_the_service_has_exact_spans(served: Callable[..., Any], tmp_path: Path) -> None:
    """Ids, logprobs and versions on the wire are those of the server; the session is in the router's header."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    save_file(tensors(0), model / "model.safetensors")
    async with (
        sglang_server(held=True) as server,
        served(model, engine="sglang", engine_options={"base_url": server.base_url}) as stub,
    ):
        info = await stub.GetInfo(pb.GetInfoRequest())
        assert (info.engine, info.vocabulary_size, info.policy_version) == ("sglang", VOCAB, 0)
        assert info.logprobs_mode == completion_pb2.LOGPROBS_MODE_PROCESSED and info.capabilities.version_spans
        asked = pb.GenerateRequest(
            request_id="r",
            token_ids=np.array([5, 6, 7], "<i4").tobytes(),
            sampling=chat_pb2.Sampling(max_tokens=6, response_format_json='{"type": "regex", "regex": "a+"}'),
            stream=True,
        )

        async def events() -> list[Any]:
            return [event async for event in stub.Generate(asked)]

        running = asyncio.create_task(events())
        server.permit(2)
        await eventually(lambda: [len(each.ids) for each in server.sequences.values()] == [2], "two tokens")
        sequence = next(iter(server.sequences.values()))
        data = save(tensors(1))
        frames = [
            Update(begin=Update.UpdateBegin(policy_version=1, format=pb.WEIGHT_FORMAT_SAFETENSORS)),
            Update(chunk=data),
            Update(commit=Update.UpdateCommit(sha256=hashlib.sha256(data).digest())),
        ]
        assert (await stub.UpdateWeights(iter(frames))).policy_version == 1
        server.permit(4)
        span = (await running)[-1].done.completion.span
        assert np.frombuffer(span.token_ids, "<i4").tolist() == sequence.ids
        assert np.frombuffer(span.logprobs, "<f4").tolist() == np.array(sequence.logprobs, np.float32).tolist()
        assert [(each.policy_version, each.start, each.end) for each in span.versions] == [(0, 0, 2), (1, 2, 6)]
        assert sequence.weights == [0, 0, 1, 1, 1, 1] and server.bodies[-1]["sampling_params"]["regex"] == "a+"
