"""Every RPC of every service, from the descriptors, and calls of them by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.values.provisional import is_provisional_method
from penstock_chassis.limits import MAX_MESSAGE_BYTES

PROTOS: Final = Path(__file__).resolve().parents[2] / "protos"
SERVICES: Final = ("sandbox", "driver", "interception", "inference")


def modules() -> Iterator[Any]:
    """The generated module of every proto file."""
    for path in sorted(PROTOS.rglob("*.proto")):
        name = ".".join(path.relative_to(PROTOS).with_suffix("").parts)
        yield importlib.import_module(f"{name}_pb2")


def _methods() -> Iterator[MethodDescriptor]:
    for module in modules():
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


DECLARED: Final = {f"{method.containing_service.full_name}/{method.name}": method for method in _methods()}
"""Every RPC of the protos."""

METHODS: Final = {name: method for name, method in DECLARED.items() if not is_provisional_method(name)}
"""Those that are served."""


def servers(name: str) -> tuple[str, ...]:
    """Who serves it: the service whose package it is in, or each of the four."""
    package = name.split(".")[1]
    return (package,) if package in SERVICES else SERVICES


async def call(address: str, token: str, name: str, request: Message) -> list[Any]:
    """All answers to one request, which is the whole of a request stream. Raises grpc.aio.AioRpcError.

    Messages of any size that a service may send are received.
    """
    method = DECLARED[name]
    metadata = (("authorization", f"Bearer {token}"),)
    sizes = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
    async with grpc.aio.insecure_channel(address, options=sizes) as channel:
        calls: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        invoke = calls[method.client_streaming, method.server_streaming](
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        made = invoke(iter([request]) if method.client_streaming else request, metadata=metadata, timeout=60)
        return [answer async for answer in made] if method.server_streaming else [await made]
