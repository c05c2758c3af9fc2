"""Checks that the protos still serve every client of the baseline, the commit that protos/BASELINE names.

    python -m protos.breaking            exit 1 and print what `buf breaking` finds by its FILE rules

Fields and RPCs that are provisional on one side are compared as if that side lacked them, and so are messages and enums
that only they reach: they may change or go, and become served, but nothing that is served becomes provisional.
docs/compatibility.md says what may change and when BASELINE moves.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from penstock.options.v1 import options_pb2

ROOT: Final = Path(__file__).resolve().parent.parent
BASELINE: Final = ROOT / "protos" / "BASELINE"
FOUND: Final = 100
"""The exit code of `buf breaking` where it found something."""
BUF: Final = Path(sys.executable).with_name("buf")
_Type = DescriptorProto | EnumDescriptorProto


def breaking(tree: Path, commit: str) -> str:
    """Returns what breaks clients of a commit, a line each; "" if nothing does.

    Args:
        tree: a directory with buf.yaml and protos/.
        commit: the baseline's hash.

    Raises:
        SystemExit: this is no git checkout, it lacks the commit, or buf cannot read one of the two.
    """
    baseline = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "buf.yaml", "protos"], capture_output=True, check=False
    )
    if baseline.returncode:
        reason = baseline.stderr.decode().strip()
        sys.exit(f"the baseline of the protos cannot be read: {reason}\nIn a shallow clone, run: git fetch --unshallow")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(baseline.stdout)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            archive.extractall(scratch)
        return compared(tree, Path(scratch))


def compared(new: Path, old: Path) -> str:
    """Returns what breaks clients of `old`, a line each; "" if nothing does.

    Args:
        new: a directory with buf.yaml and protos/.
        old: another.

    Raises:
        SystemExit: buf cannot read one of the two.
    """
    with tempfile.TemporaryDirectory() as scratch:
        images = [Path(scratch) / name for name in ("new.binpb", "old.binpb")]
        for source, image in zip((new, old), images, strict=True):
            _buf("build", str(source), "--output", str(image))
            image.write_bytes(_served(image.read_bytes()))
        return _buf("breaking", str(images[0]), "--against", str(images[1]), "--config", str(new / "buf.yaml"))


def _buf(*arguments: str) -> str:
    """Returns what buf found, "" if nothing. Raises SystemExit: it cannot do what is asked."""
    ran = subprocess.run([str(BUF), *arguments], capture_output=True, text=True, check=False)
    if ran.returncode and not (arguments[0] == "breaking" and ran.returncode == FOUND):
        sys.exit(f"buf cannot compare the protos:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def _served(image: bytes) -> bytes:
    """Returns an image without what is provisional, and without positions in files, which would be others."""
    files = FileDescriptorSet.FromString(image)
    dropped = _only_provisional(files)
    for file in files.file:
        file.ClearField("source_code_info")
        for service in file.service:
            _keep(service.method, [not _is_provisional(method) for method in service.method])
        scope = f".{file.package}"
        _keep(file.enum_type, [f"{scope}.{enum.name}" not in dropped for enum in file.enum_type])
        _keep(file.message_type, [f"{scope}.{message.name}" not in dropped for message in file.message_type])
        for message in file.message_type:
            _prune(message, f"{scope}.{message.name}", dropped)
    return files.SerializeToString()


def _prune(message: DescriptorProto, name: str, dropped: set[str]) -> None:
    """Removes provisional fields, dropped types and oneofs that are left empty, in messages inside too."""
    _keep(message.field, [not _is_provisional(field) for field in message.field])
    _keep(message.enum_type, [f"{name}.{enum.name}" not in dropped for enum in message.enum_type])
    _keep(message.nested_type, [f"{name}.{nested.name}" not in dropped for nested in message.nested_type])
    used = sorted({field.oneof_index for field in message.field if field.HasField("oneof_index")})
    for field in message.field:
        if field.HasField("oneof_index"):
            field.oneof_index = used.index(field.oneof_index)
    _keep(message.oneof_decl, [index in used for index in range(len(message.oneof_decl))])
    for nested in message.nested_type:
        _prune(nested, f"{name}.{nested.name}", dropped)


def _only_provisional(files: FileDescriptorSet) -> set[str]:
    """Returns the types that provisional fields and RPCs reach, and nothing else does."""
    types = {name: kind for file in files.file for name, kind in _types(file, f".{file.package}")}
    served, provisional = set[str](), set[str]()
    for method in (method for file in files.file for service in file.service for method in service.method):
        (provisional if _is_provisional(method) else served).update((method.input_type, method.output_type))
    for kind in types.values():
        provisional.update(field.type_name for field in _fields(kind) if _is_provisional(field))
    reached = _reached(types, provisional - {""}, with_provisional=True)
    return types.keys() - _reached(types, served | (types.keys() - reached), with_provisional=False)


def _reached(types: Mapping[str, _Type], roots: set[str], *, with_provisional: bool) -> set[str]:
    """Returns the types and those of their fields and so on; with a type that is inside a message, the message."""
    reached, to_read = set[str](), [*roots]
    while to_read:
        name = to_read.pop()
        if name in reached or name not in types:
            continue
        reached.add(name)
        to_read.append(name.rpartition(".")[0])
        fields = _fields(types[name])
        to_read += [field.type_name for field in fields if with_provisional or not _is_provisional(field)]
    return reached


def _types(holder: FileDescriptorProto | DescriptorProto, scope: str) -> Iterator[tuple[str, _Type]]:
    yield from ((f"{scope}.{enum.name}", enum) for enum in holder.enum_type)
    for message in holder.message_type if isinstance(holder, FileDescriptorProto) else holder.nested_type:
        yield f"{scope}.{message.name}", message
        yield from _types(message, f"{scope}.{message.name}")


def _fields(kind: _Type) -> Sequence[FieldDescriptorProto]:
    return kind.field if isinstance(kind, DescriptorProto) else ()


def _is_provisional(item: FieldDescriptorProto | MethodDescriptorProto) -> bool:
    if isinstance(item, FieldDescriptorProto):
        return bool(item.options.Extensions[options_pb2.provisional])
    return bool(item.options.Extensions[options_pb2.provisional_method])


def _keep(items: Any, wanted: Sequence[bool]) -> None:
    """Removes the items of a repeated field that are not wanted."""
    for index in reversed(range(len(items))):
        if not wanted[index]:
            del items[index]


def main() -> None:
    """Checks; see the module's text."""
    found = breaking(ROOT, BASELINE.read_text(encoding="utf-8").strip())
    if found:
        sys.exit(f"{found}These changes break clients of the baseline (docs/compatibility.md).")


if __name__ == "__main__":
    main()
