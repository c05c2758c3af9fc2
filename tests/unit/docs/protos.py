"""What the protos' comments say about errors, read from the compiler's descriptors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc
from tests.unit.docs.pages import ROOT

_SERVICE, _METHOD = 6, 2
"""Field numbers in FileDescriptorProto and ServiceDescriptorProto, of which source paths are made."""
_CODES = frozenset(code.name for code in grpc.StatusCode)
_GROUP = re.compile(r"\b([A-Z][A-Z_]+)\s+\(([^()]*)\)")
_REASON = re.compile(r"\b[A-Z][A-Z0-9_]{3,}\b")


@dataclass(frozen=True, slots=True)
class Promise:
    """`CODE (REASON)` in the comment of a service or RPC: the area ("sandbox"), "Service" or "Service/Rpc"."""

    area: str
    subject: str
    code: str
    reason: str


@cache
def descriptors() -> FileDescriptorSet:
    """All protos, compiled with their comments."""
    protos = ROOT / "protos"
    files = sorted(path.relative_to(protos).as_posix() for path in protos.rglob("*.proto"))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "protos.bin"
        wellknown = str(resources.files("grpc_tools") / "_proto")
        options = [f"-I{protos}", f"-I{wellknown}", "--include_source_info", f"--descriptor_set_out={out}"]
        assert protoc.main(["protoc", *options, *files]) == 0
        return FileDescriptorSet.FromString(out.read_bytes())


def rpcs() -> Iterator[tuple[str, str, str]]:
    """(area, service, RPC) of everything that is declared."""
    for file in descriptors().file:
        for service in file.service:
            for method in service.method:
                yield file.package.split(".")[1], service.name, method.name


def promises() -> Iterator[Promise]:
    """Every reason that a comment names beside its code."""
    for file in descriptors().file:
        area = file.package.split(".")[1]
        for location in file.source_code_info.location:
            path = list(location.path)
            if path[:1] != [_SERVICE] or len(path) not in (2, 4) or (len(path) == 4 and path[2] != _METHOD):
                continue
            service = file.service[path[1]]
            subject = service.name if len(path) == 2 else f"{service.name}/{service.method[path[3]].name}"
            for code, inside in _GROUP.findall(location.leading_comments):
                if code in _CODES:
                    for reason in _REASON.findall(inside):
                        yield Promise(area, subject, code, reason)
