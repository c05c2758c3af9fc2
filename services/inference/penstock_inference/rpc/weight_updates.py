"""Converts weight and adapter updates: pushed frames, the version in force, and the duration of each step."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.values import writer
from penstock_chassis.validation import foreign_page_token, invalid_field, page_size
from penstock_inference.domain.namespaces import parted
from penstock_inference.domain.weights import PauseMode, UpdateFormat
from penstock_inference.engines.optional_features import AdapterInfo
from penstock_inference.rpc import convert
from penstock_inference.weights.adapters import AdapterBegin, AdapterFrame
from penstock_inference.weights.manager import UpdateBegin, UpdateFrame, UpdateResult
from penstock_inference.weights.uploads import Commit

_FORMATS: dict[int, UpdateFormat] = {
    pb.WEIGHT_FORMAT_SAFETENSORS: UpdateFormat.FULL,
    pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL: UpdateFormat.DELTA,
}


async def update_frames(pushed: AsyncIterator[pb.UpdateWeightsRequest]) -> AsyncIterator[UpdateFrame]:
    """The frames of a push in the domain's form."""
    async for message in pushed:
        kind = message.WhichOneof("frame")
        if kind == "chunk":
            yield message.chunk
        elif kind == "commit":
            yield Commit(message.commit.sha256)
        elif kind == "begin":
            begin = message.begin
            if begin.format not in _FORMATS:
                raise invalid_field(
                    "begin.format", "must be WEIGHT_FORMAT_SAFETENSORS or WEIGHT_FORMAT_SAFETENSORS_PARTIAL"
                )
            yield UpdateBegin(
                policy_version=begin.policy_version,
                update_format=_FORMATS[begin.format],
                mode=convert.pause_mode(begin.mode, PauseMode.KEEP),
                size_bytes=begin.size_bytes if begin.HasField("size_bytes") else None,
                sha256=begin.sha256 if begin.HasField("sha256") else None,
                path=begin.path,
            )
        else:
            raise invalid_field("frame", "is not set")


async def adapter_frames(pushed: AsyncIterator[pb.LoadAdapterRequest]) -> AsyncIterator[AdapterFrame]:
    """The frames of an adapter in the domain's form."""
    async for message in pushed:
        kind = message.WhichOneof("frame")
        if kind == "chunk":
            yield message.chunk
        elif kind == "commit":
            yield Commit(message.commit.sha256)
        elif kind == "begin":
            begin = message.begin
            yield AdapterBegin(
                name=begin.name,
                policy_version=begin.policy_version,
                config_json=begin.adapter_config_json,
                path=begin.path,
                mode=convert.pause_mode(begin.mode, PauseMode.KEEP),
            )
        else:
            raise invalid_field("frame", "is not set")


adapter = writer(
    AdapterInfo,
    pb.Adapter,
    by={"namespace": lambda info: parted(info.name)[0], "name": lambda info: parted(info.name)[1]},
)
"""One adapter in force."""


def adapters_page(
    found: tuple[AdapterInfo, ...],
    unloaded: tuple[AdapterInfo, ...],
    namespace: str | None,
    asked: int,
    page_token: str,
) -> pb.ListAdaptersResponse:
    """A namespace's adapters (None: all) after the token, which names the last one of the previous page."""
    size = page_size(asked)
    try:
        after = bytes.fromhex(page_token).decode()
    except ValueError:
        raise foreign_page_token() from None
    shown = sorted((f"{one.namespace}/{one.name}", one) for one in map(adapter, found))
    left = [(key, one) for key, one in shown if namespace in (None, one.namespace) and (not after or key > after)]
    return pb.ListAdaptersResponse(
        adapters=[one for _, one in left[:size]],
        next_page_token=left[size - 1][0].encode().hex() if len(left) > size else "",
        unloaded=[] if after else [one for one in map(adapter, unloaded) if namespace in (None, one.namespace)],
    )


def update_response(result: UpdateResult) -> pb.UpdateWeightsResponse:
    """The version in force and the duration of each step."""
    return pb.UpdateWeightsResponse(policy_version=result.policy_version, phases=_phases(result))


def transfer_response(result: UpdateResult) -> pb.FinishTransferResponse:
    """The same for a transfer."""
    return pb.FinishTransferResponse(policy_version=result.policy_version, phases=_phases(result))


_phases = writer(UpdateResult, pb.UpdatePhases, left_out=("policy_version",))
