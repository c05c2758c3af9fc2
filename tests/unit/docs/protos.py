"""What the protos' comments say about errors, read from the compiler's descriptors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from docs.site import descriptors as site

from penstock.values.provisional import is_provisional_method

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


def rpcs() -> Iterator[tuple[str, str, str]]:
    """(area, service, RPC) of everything that is served."""
    for package, service, method in site.rpcs():
        if not is_provisional_method(f"{package}.{service}/{method}"):
            yield package.split(".")[1], service, method


def promises() -> Iterator[Promise]:
    """Every reason that a comment of what is served names beside its code."""
    for file in site.descriptors().file:
        area = file.package.split(".")[1]
        for location in file.source_code_info.location:
            path = list(location.path)
            if path[:1] != [site.SERVICE] or len(path) not in (2, 4) or (len(path) == 4 and path[2] != site.METHOD):
                continue
            service = file.service[path[1]]
            subject = service.name if len(path) == 2 else f"{service.name}/{service.method[path[3]].name}"
            if len(path) == 4 and is_provisional_method(f"{file.package}.{subject}"):
                continue
            for code, inside in _GROUP.findall(location.leading_comments):
                if code in _CODES:
                    for reason in _REASON.findall(inside):
                        yield Promise(area, subject, code, reason)
